//! Takes Thuban off a local cluster: tenants first, while the operator can still take their rows out of droplets, then
//! the manifests in reverse order.

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::install::{manifest_for, manifests};

/// Pods outside thuban-system must be gone before: their addresses are taken away.
pub fn run(name: &str) -> Result<()> {
    let cluster = Cluster::named(name)?;
    for kind in ["networks.thuban.dev", "vpcs.thuban.dev"] {
        println!("deleting {kind}");
        cluster
            .kubectl(&["delete", kind, "--all", "--wait", "--timeout=60s"])
            .with_context(|| format!("{kind} stay: delete the pods in them first"))?;
    }
    for manifest in manifests()?.iter().rev() {
        println!("deleting {}", manifest.display());
        let text = manifest_for(manifest, cluster.instance())?;
        let partial = cluster.instance().state().join("uninstall.yaml");
        std::fs::write(&partial, text).with_context(|| format!("writing {}", partial.display()))?;
        let file = partial.display().to_string();
        cluster.kubectl(&[
            "delete",
            "--ignore-not-found",
            "--wait",
            "--timeout=120s",
            "-f",
            &file,
        ])?;
    }
    Ok(())
}
