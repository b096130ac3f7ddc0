//! thuban-observe: its page, its image, and the manifest of `install/observe/`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde_json::json;
use thuban_cluster::Cluster;

use crate::{
    build::{Profile, compile, images_files, root, run_command, stripped_for},
    deps,
    images::{self, Image, is_newer},
    install::{self, manifests_in, wait, workload},
    platform::Platform,
    progress,
};

pub const NAMESPACE: &str = "thuban-observe";
/// The packages of the image.
pub const PACKAGES: [&str; 1] = ["thuban-observe"];
const BINARY: &str = "thuban-observe";
/// The folder of the page's sources.
const PAGE: &str = "observe/ui";

/// Builds the page by npm, if one of its sources is newer than what was built. The binary has it inside.
pub fn build_page() -> Result<()> {
    let folder = root().join(PAGE);
    let built = folder.join("dist/.built");
    let sources = ["package-lock.json", "package.json", "src"].map(|name| folder.join(name));
    let mut files = Vec::new();
    for source in sources {
        files_below(&source, &mut files)?;
    }
    if files.iter().all(|file| is_newer(&built, file)) {
        return Ok(());
    }
    deps::ensure_more(&deps::PAGE_PACKAGES)?;
    for arguments in [&["ci", "--no-audit", "--no-fund"][..], &["run", "build"]] {
        run_command(Command::new("npm").current_dir(&folder).args(arguments))?;
    }
    fs::write(&built, "").with_context(|| format!("writing {}", built.display()))
}

fn files_below(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| format!("reading {}", path.display()))? {
        files_below(&entry?.path(), files)?;
    }
    Ok(())
}

/// Returns the image, which is made if it is out of date. The tests' binary must have been built after the page.
pub fn archive(profile: Profile) -> Result<PathBuf> {
    progress::watched("building thuban-observe's page", build_page)?;
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

/// Imports the image on all nodes.
pub fn import(cluster: &Cluster) -> Result<()> {
    cluster.import_image(&archive(Profile::of(cluster.name()))?)
}

/// Installs thuban-observe on a cluster that has Thuban, has nodes tell it of all flows, and waits until it works.
pub fn install(cluster: &Cluster) -> Result<()> {
    import(cluster)?;
    for file in manifests_in(&root().join("install/observe"))? {
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        cluster
            .kubectl_apply(&text)
            .with_context(|| format!("applying {}", file.display()))?;
    }
    let values = json!({"data": {"THUBAN_OBSERVE_NAMESPACE": NAMESPACE, "THUBAN_FLOWS": "all"}});
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
    wait("transitd", || {
        workload(
            cluster,
            install::NAMESPACE,
            transitd,
            "desiredNumberScheduled",
            "numberReady",
        )
    })?;
    wait("thuban-observe", || {
        workload(
            cluster,
            NAMESPACE,
            "deployment/thuban-observe",
            "replicas",
            "readyReplicas",
        )
    })
}
