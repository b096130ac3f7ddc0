//! Others' code that tests and benchmarks run against or beside the CNI plugin: cnitool, libcni in a small driver, portmap
//! and tuning, ptp and bridge with host-local.
//!
//! Built once as Go tools from `e2e/cni`, kept in the user's cache under the digest of its files, and linked to
//! `target/cni-tools`, where the tests look.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::{
    build::{root, run_command},
    kube,
};

const NAMES: [&str; 7] = [
    "bridge",
    "cnitool",
    "driver",
    "host-local",
    "portmap",
    "ptp",
    "tuning",
];

/// Takes no time when they are there.
pub fn ensure() -> Result<()> {
    let modules = root().join("e2e/cni");
    let mut digest = Sha256::new();
    for file in ["go.mod", "go.sum", "driver/main.go"] {
        digest.update(fs::read(modules.join(file)).with_context(|| format!("reading e2e/cni/{file}"))?);
    }
    let digest = format!("{:x}", digest.finalize());
    let folder = kube::cache()?.join(format!("cni-{}", &digest[..12]));
    if !is_complete(&folder) {
        build(&modules, &folder)?;
    }
    let link = root().join("target/cni-tools");
    if fs::read_link(&link).is_ok_and(|target| target == folder) {
        return Ok(());
    }
    let _ = fs::remove_file(&link);
    std::os::unix::fs::symlink(&folder, &link).with_context(|| format!("linking {}", link.display()))
}

fn is_complete(folder: &Path) -> bool {
    NAMES.iter().all(|name| folder.join(name).exists())
}

fn build(modules: &Path, folder: &Path) -> Result<()> {
    let go = Command::new("go").arg("version").stdout(Stdio::null()).status();
    if go.is_err() {
        bail!(
            "no Go: install version {} or newer (https://go.dev/dl) to build cnitool",
            kube::OLDEST_GO
        );
    }
    let partial = folder.with_extension(format!("partial-{}", std::process::id()));
    fs::create_dir_all(&partial).with_context(|| format!("making {}", partial.display()))?;
    let mut go = Command::new("go");
    go.current_dir(modules)
        .env("CGO_ENABLED", "0")
        .env("GOBIN", &partial)
        .args(["install", "-ldflags", "-s -w", "tool"]);
    let result = run_command(&mut go).and_then(|()| {
        let _ = fs::remove_dir_all(folder);
        fs::rename(&partial, folder).with_context(|| format!("renaming to {}", folder.display()))
    });
    if result.is_err() {
        let _ = fs::remove_dir_all(&partial);
    } else if !is_complete(folder) {
        bail!("`go install` left out some of {}", NAMES.join(", "));
    }
    result
}
