//! What load balancers need besides Thuban: the image with cidrd, lbaasd, the speaker, gobgpd and HAProxy, and the
//! manifests of `install/load-balancers/`.

use std::path::{Path, PathBuf};

use anyhow::Result;
use thuban_cluster::Cluster;

use crate::build::{Profile, compile, images_files, stripped_for};
use crate::deps;
use crate::go_tools::GoTools;
use crate::images::{self, Image, with_libraries};
use crate::install::{NAMESPACE, bring, wait, workload};
use crate::platform::Platform;
use crate::progress;

const GOBGPD: GoTools = GoTools {
    name: "gobgpd",
    modules: "speaker/gobgpd",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &["gobgpd"],
};
/// The packages of the image.
pub const PACKAGES: [&str; 3] = ["cidrd", "lbaasd", "thuban-speaker"];
/// Their binaries.
const BINARIES: [&str; 4] = ["cidrd", "lbaasd", "lbaasctl", "thuban-speaker"];

/// Builds gobgpd if it doesn't exist; returns its folder.
pub fn ensure_gobgpd() -> Result<PathBuf> {
    ensure_gobgpd_for(Platform::own())
}

fn ensure_gobgpd_for(platform: Platform) -> Result<PathBuf> {
    progress::watched("building gobgpd", || GOBGPD.ensure_for(platform))
}

/// Returns the image, which is made if it is out of date. The tests' binaries must have been built.
pub fn archive(profile: Profile) -> Result<PathBuf> {
    compile(profile, &PACKAGES, &[])?;
    let platform = Platform::own();
    archive_of(
        platform,
        &profile.binaries()?,
        &images_files(profile)?,
        &profile.images(),
    )
}

/// Returns the image of a platform, from the binaries in a folder. `work`: where copies of them may be; `folder`: of
/// the platform's images.
pub fn archive_of(platform: Platform, binaries: &Path, work: &Path, folder: &Path) -> Result<PathBuf> {
    let gobgpd = ensure_gobgpd_for(platform)?.join("gobgpd");
    let mut files = haproxy_of(platform)?;
    files.push((gobgpd, "/bin/gobgpd".to_owned()));
    for name in BINARIES {
        let binary = stripped_for(platform, &binaries.join(name), &work.join(name), "--strip-debug")?;
        files.push((binary, format!("/bin/{name}")));
    }
    let image = Image {
        archive: "load-balancers.tar",
        name: images::LOAD_BALANCERS,
        files,
        links: &[],
        entrypoint: &[],
        command: &[],
    };
    image.write_for(platform, &folder.join("more"))
}

/// Returns Debian's HAProxy and its libraries, as they are on this machine. Images of other platforms have none.
fn haproxy_of(platform: Platform) -> Result<Vec<(PathBuf, String)>> {
    if platform != Platform::own() {
        return Ok(Vec::new());
    }
    with_libraries(&deps::program("haproxy")?)
}

/// Imports the image on all nodes.
pub fn import(cluster: &Cluster) -> Result<()> {
    cluster.import_image(&archive(Profile::of(cluster.name()))?)
}

/// Installs what load balancers need on a cluster that has Thuban, and waits until it works.
pub fn install(cluster: &Cluster) -> Result<()> {
    bring(cluster, &archive(Profile::of(cluster.name()))?, "load-balancers")?;
    for name in [
        "deployment/thuban-cidrd",
        "deployment/thuban-lbaasd",
        "daemonset/thuban-speaker",
    ] {
        wait(name, || workload(cluster, NAMESPACE, name))?;
    }
    Ok(())
}
