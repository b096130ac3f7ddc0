//! etcd and an API server alone: no nodes, no scheduler, no controllers. Measurements there are of the operator alone.

use std::{fs, os::unix::fs::symlink, path::Path};

use anyhow::{Context, Result};

use crate::{
    cgroups, control_plane,
    instance::Instance,
    lifecycle::{leftovers, lock, take_down},
    network, pki,
};

/// Brings it up, always anew: leftovers of an earlier one are removed first.
pub fn up(instance: &Instance, binaries: &Path) -> Result<()> {
    let _lock = lock(instance)?;
    if !leftovers(instance)?.is_empty() {
        take_down(instance)?;
    }
    fs::create_dir_all(instance.logs())?;
    fs::create_dir_all(instance.bin())?;
    symlink(binaries.join("kubectl"), instance.bin().join("kubectl")).context("linking kubectl")?;
    pki::create(instance)?;
    cgroups::create(&instance.cgroup())?;
    network::create_bridge(instance)?;
    control_plane::start_api_server(instance, binaries)
}

/// Gives a network namespace the `eth0` of a node, with its address, by which the API server can be reached. It is
/// removed with the namespace or the instance.
pub fn connect(instance: &Instance, node: &str, namespace: &str) -> Result<()> {
    network::connect(instance, node, namespace)
}

/// Returns the processes of `etcd` or `apiserver`.
pub fn processes(instance: &Instance, component: &str) -> Result<Vec<i32>> {
    let found = cgroups::processes(&control_plane::group(instance, component))?;
    Ok(found.into_iter().collect())
}
