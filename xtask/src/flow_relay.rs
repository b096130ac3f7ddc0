//! thuban-observe: its image, and the manifest of `install/observe/`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::json;
use thuban_cluster::Cluster;

use crate::{
    build::{Profile, compile, images_files, stripped_for},
    images::{self, Image},
    install::{self, bring, wait, workload},
    page,
    platform::Platform,
    progress,
};

pub const NAMESPACE: &str = "thuban-observe";
/// The value of THUBAN_FLOWS with which nodes tell of all flows.
pub const MODE: &str = "all";
/// The packages of the image.
pub const PACKAGES: [&str; 1] = ["thuban-observe"];
const BINARY: &str = "thuban-observe";

/// Returns the image, which is made if it is out of date. The tests' binary must have been built after the page.
pub fn archive(profile: Profile) -> Result<PathBuf> {
    progress::watched("building thuban-observe's page", page::build)?;
    compile(profile, &PACKAGES, &[])?;
    archive_of(
        Platform::own(),
        &profile.binaries()?,
        &images_files(profile)?,
        &profile.images(),
    )
}

/// Returns the image of a platform, from the binaries in a folder. `work`: where copies of them may be; `folder`: of
/// the platform's images.
pub fn archive_of(platform: Platform, binaries: &Path, work: &Path, folder: &Path) -> Result<PathBuf> {
    let binary = stripped_for(
        platform,
        &binaries.join(BINARY),
        &work.join(BINARY),
        "--strip-debug",
    )?;
    let image = Image {
        archive: "observe.tar",
        name: images::OBSERVE,
        files: vec![(binary, format!("/bin/{BINARY}"))],
        links: &[],
        entrypoint: &["/bin/thuban-observe"],
        command: &[],
    };
    image.write_for(platform, &folder.join("more"))
}

/// Brings the image and the manifest, and does not wait.
pub fn apply(cluster: &Cluster) -> Result<()> {
    bring(cluster, &archive(Profile::of(cluster.name()))?, "observe")
}

/// Installs thuban-observe on a cluster that has Thuban, has nodes tell it of all flows, and waits until it works.
pub fn install(cluster: &Cluster) -> Result<()> {
    apply(cluster)?;
    let values = json!({"data": {"THUBAN_OBSERVE_NAMESPACE": NAMESPACE, "THUBAN_FLOWS": MODE}});
    cluster.kubectl(&[
        "patch",
        "configmap",
        "thuban-config",
        "-n",
        install::NAMESPACE,
        "--type=merge",
        "-p",
        &values.to_string(),
    ])?;
    let transitd = "daemonset/transitd";
    cluster.kubectl(&["rollout", "restart", "-n", install::NAMESPACE, transitd])?;
    wait("transitd", || workload(cluster, install::NAMESPACE, transitd))?;
    wait("thuban-observe", || {
        workload(cluster, NAMESPACE, "deployment/thuban-observe")
    })
}
