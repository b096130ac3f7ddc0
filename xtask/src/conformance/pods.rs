//! The images of the tests' pods, made here under the names that the tests ask for.
//!
//! Kubernetes' own images are Alpine with programs beside agnhost. Here the same programs are Debian's, with the
//! libraries that they load. The image that the tests call the one of glibc is the same.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    build::{Profile, images_files, root},
    dns,
    images::{self, Image},
    kube,
};

/// The name of the pause image that the tests ask for; kubelet's is older.
const PAUSE: &str = "registry.k8s.io/pause:3.10.2";
const BUSYBOX: &str = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1";
/// A server that sends what netfilter calls invalid.
const INVALID: &str = "registry.k8s.io/e2e-test-images/regression-issue-74839:1.4";
const GLIBC: &str = "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.0.0";

/// What the tests of ClusterNetworkPolicies ask for.
const AGNHOST_OF_POLICIES: &str = "registry.k8s.io/e2e-test-images/agnhost:2.45";

/// Programs of this machine, and where the tests look for them.
const PROGRAMS: [(&str, &str); 9] = [
    ("/bin/busybox", "/bin/busybox"),
    // Debian's busybox as a shell would run its own nc and wget, whatever PATH says.
    ("/bin/dash", "/bin/sh"),
    ("/bin/ip", "/bin/ip"),
    ("/bin/nc.openbsd", "/bin/nc"),
    ("/bin/ss", "/bin/ss"),
    ("/usr/bin/curl", "/bin/curl"),
    ("/usr/bin/dig", "/bin/dig"),
    ("/usr/bin/getent", "/bin/getent"),
    ("/usr/bin/wget", "/bin/wget"),
];

/// Programs that busybox provides under their names.
const APPLETS: [&str; 24] = [
    "awk", "cat", "cut", "date", "dd", "echo", "env", "grep", "head", "hostname", "id", "ls", "mkdir",
    "nslookup", "ps", "rm", "sed", "seq", "sleep", "sort", "tail", "test", "true", "wc",
];

/// Returns the archives of all images. Makes an archive again when one of its files is newer.
pub fn images(tools: &Path) -> Result<Vec<PathBuf>> {
    let links: Vec<(String, &str)> = APPLETS
        .iter()
        .map(|applet| (format!("/bin/{applet}"), "busybox"))
        .collect();
    let links: Vec<(&str, &str)> = links
        .iter()
        .map(|(path, target)| (path.as_str(), *target))
        .collect();
    let mut libraries = BTreeSet::new();
    for (program, _) in PROGRAMS {
        libraries.extend(images::libraries(Path::new(program))?);
    }
    let certificates = source()?.join("test/images/agnhost/porter");
    let mut files = vec![(kube::binaries()?.join("agnhost"), "/agnhost".to_owned())];
    files.push((root().join("e2e/images/wgetrc"), "/etc/wgetrc".into()));
    files.push((root().join("e2e/images/bash"), "/bin/bash".into()));
    files.extend(PROGRAMS.map(|(source, inside)| (source.into(), inside.into())));
    files.extend(libraries.into_iter().map(|path| (PathBuf::from(&path), path)));
    for name in ["localhost.crt", "localhost.key"] {
        files.push((certificates.join(name), format!("/{name}")));
    }
    files.push((dns::ensure()?.join("coredns"), "/coredns".into()));
    let with_programs = |archive, name, entrypoint, command| Image {
        archive,
        name,
        files: files.clone(),
        links: &links,
        entrypoint,
        command,
    };
    let list = [
        with_programs("agnhost-programs.tar", images::AGNHOST, &["/agnhost"], &["pause"]),
        with_programs(
            "agnhost-policies.tar",
            AGNHOST_OF_POLICIES,
            &["/agnhost"],
            &["pause"],
        ),
        with_programs("glibc.tar", GLIBC, &["/bin/sh"], &[]),
        with_programs("busybox.tar", BUSYBOX, &["/bin/sh"], &[]),
        Image {
            archive: "invalid.tar",
            name: INVALID,
            files: vec![(
                tools.join("regression-issue-74839"),
                "/regression-issue-74839".into(),
            )],
            links: &[],
            entrypoint: &["/regression-issue-74839"],
            command: &[],
        },
        Image {
            archive: "pause-tests.tar",
            name: PAUSE,
            files: vec![(images_files(Profile::Release)?.join("pause"), "/pause".into())],
            links: &[],
            entrypoint: &["/pause"],
            command: &[],
        },
    ];
    // This folder is not among the images that every cluster imports.
    let folder = Profile::Release.images().join("more");
    list.iter().map(|image| image.write(&folder)).collect()
}

/// Returns the folder of Kubernetes' source, by Go: the image has certificates of it.
fn source() -> Result<PathBuf> {
    let mut go = Command::new("go");
    go.current_dir(root().join("e2e/kube"))
        .args(["mod", "download", "-json", "k8s.io/kubernetes"]);
    let output = go.output().context("starting go")?;
    let module: serde_json::Value = serde_json::from_slice(&output.stdout).context("go mod download")?;
    let folder = module["Dir"].as_str().context("no folder of k8s.io/kubernetes")?;
    Ok(folder.into())
}
