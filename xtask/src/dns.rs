//! CoreDNS on a local cluster, as users have it: built from its Go module, in an image of its usual name.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::{
    build::{Profile, root},
    go_tools::GoTools,
    images::Image,
    install::{wait, workload},
    progress,
};

pub const NAMESPACE: &str = "kube-system";
const NAME: &str = "registry.k8s.io/coredns/coredns:v1.14.2";
const COREDNS: GoTools = GoTools {
    name: "coredns",
    modules: "e2e/dns",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &["coredns"],
};

/// Applies `e2e/dns/coredns.yaml`, with the image on all nodes. Its pods wait for a network.
pub fn apply(cluster: &Cluster) -> Result<()> {
    import(cluster)?;
    let path = root().join("e2e/dns/coredns.yaml");
    let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
    cluster.kubectl_apply(&text).context("applying CoreDNS")?;
    println!("applied e2e/dns/coredns.yaml");
    Ok(())
}

/// Builds CoreDNS if it doesn't exist; returns its folder.
pub fn ensure() -> Result<PathBuf> {
    progress::watched("building CoreDNS", || COREDNS.ensure())
}

/// Imports CoreDNS' image on all nodes.
pub fn import(cluster: &Cluster) -> Result<()> {
    cluster.import_image(&archive(Profile::of(cluster.name()))?)
}

/// Returns CoreDNS' image, which is made if it doesn't exist.
pub fn archive(profile: Profile) -> Result<PathBuf> {
    image(profile, &ensure()?)
}

/// Waits until CoreDNS is ready.
pub fn wait_ready(cluster: &Cluster) -> Result<()> {
    wait("CoreDNS", || workload(cluster, NAMESPACE, "deployment/coredns"))
}

/// Writes the image, in a folder apart from the images that every cluster imports.
fn image(profile: Profile, folder: &Path) -> Result<PathBuf> {
    let image = Image {
        archive: "coredns.tar",
        name: NAME,
        files: vec![(folder.join("coredns"), "/coredns".into())],
        links: &[],
        entrypoint: &["/coredns"],
        command: &[],
    };
    image.write(&profile.images().join("more"))
}
