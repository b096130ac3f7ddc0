//! The collector of traces that a test of the cluster starts: the OpenTelemetry collector's receiver in a small
//! program. `target/otlp`, where the test looks for it, is a link to its folder.

use std::fs;

use anyhow::{Context, Result};
use thuban_cluster::Instance;

use crate::{build::root, go_tools::GoTools};

const COLLECTOR: GoTools = GoTools {
    name: "otlp",
    modules: "e2e/otlp",
    files: &["go.mod", "go.sum", "main.go"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["."],
    tests: &[],
    binaries: &["otlp"],
};
/// The port of collectors for OTLP over HTTP.
const PORT: u16 = 4318;

/// Builds the collector; takes no time when it exists.
pub fn ensure() -> Result<()> {
    let folder = COLLECTOR.ensure()?;
    let link = root().join("target/otlp");
    if fs::read_link(&link).is_ok_and(|target| target == folder) {
        return Ok(());
    }
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(&folder, &link).with_context(|| format!("linking {}", link.display()))
}

/// Returns where the processes of a cluster of tests send spans. Nobody listens there until a test does.
pub fn endpoint(instance: &Instance) -> String {
    format!("http://{}:{PORT}", instance.gateway())
}
