//! Programs of others that tests and benchmarks run against or beside the CNI plugin: cnitool, libcni in a small
//! driver, portmap and tuning, ptp and bridge with host-local. `target/cni-tools`, where the tests look for them, is a
//! link to them.

use std::fs;

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::{build::root, go_tools::GoTools};

const TOOLS: GoTools = GoTools {
    name: "cni",
    modules: "e2e/cni",
    files: &["go.mod", "go.sum", "driver/main.go"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &[
        "bridge",
        "cnitool",
        "driver",
        "host-local",
        "portmap",
        "ptp",
        "tuning",
    ],
};

/// Gives every node portmap, as runtimes' packages do, so that pods may have host ports. Must run before Thuban is
/// installed.
pub fn portmap_on_nodes(cluster: &Cluster) -> Result<()> {
    ensure()?;
    let built = root().join("target/cni-tools/portmap").display().to_string();
    for node in cluster.nodes()? {
        cluster.exec_on_node(&node, &["mkdir", "-p", "/opt/cni/bin"])?;
        cluster.exec_on_node(&node, &["cp", &built, "/opt/cni/bin/"])?;
    }
    Ok(())
}

/// Builds the tools; takes no time when they exist.
pub fn ensure() -> Result<()> {
    let folder = TOOLS.ensure()?;
    let link = root().join("target/cni-tools");
    if fs::read_link(&link).is_ok_and(|target| target == folder) {
        return Ok(());
    }
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(&folder, &link).with_context(|| format!("linking {}", link.display()))
}
