//! `kubectl thuban` as other commands of this program use it: what both can do has one place, in the plugin.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use thuban_cluster::Instance;

use crate::build::{self, Profile, run_command};

const PACKAGE: &str = "kubectl-thuban";

/// Prints the values with which Thuban is installed on the cluster of the user's kubeconfig.
pub fn values(is_env: bool) -> Result<()> {
    let mut plugin = Command::new(binary(Profile::Demo)?);
    plugin.arg("values");
    if is_env {
        plugin.arg("--env");
    }
    run_command(&mut plugin)
}

/// Returns the plugin as the administrator of a local cluster.
pub fn of(instance: &Instance) -> Result<Command> {
    let binary = binary(Profile::of(instance.name()))?;
    Ok(administrator(&binary, instance))
}

fn administrator(binary: &Path, instance: &Instance) -> Command {
    let mut plugin = Command::new(binary);
    plugin
        .arg("--kubeconfig")
        .arg(instance.kubeconfig())
        .arg("--kubectl")
        .arg(instance.bin().join("kubectl"))
        .env("KUBECACHEDIR", instance.state().join("kubectl-cache"));
    plugin
}

/// Returns the plugin as the administrator of a local cluster, if it has been built: nothing is built.
pub fn built(instance: &Instance) -> Option<Command> {
    let binary = Profile::of(instance.name()).binaries().ok()?.join(PACKAGE);
    binary.exists().then(|| administrator(&binary, instance))
}

/// Builds the plugin if it is out of date. That of the tests has been built.
fn binary(profile: Profile) -> Result<PathBuf> {
    build::compile(profile, &[PACKAGE], &[])?;
    Ok(profile.binaries()?.join(PACKAGE))
}
