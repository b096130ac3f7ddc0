//! The binaries of the local cluster: etcd, Kubernetes and agnhost.
//!
//! They are built once as Go tools from `e2e/kube`, whose go.mod names their versions, and kept in the user's cache
//! under that file's digest. A folder in the cache is complete: it is filled under another name and then renamed.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};

use crate::{
    build::{root, run_command},
    progress,
};

const VERSION: &str = "v1.36.3";
const OLDEST_ETCD: (u32, u32, u32) = (3, 5, 13);
pub const OLDEST_GO: &str = "1.26";
/// The value that makes the compiler collect its garbage less often: memory for time.
const GOGC: &str = "400";
const NAMES: [&str; 7] = [
    "agnhost",
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
];

/// Returns the folder with all binaries; builds them first if they don't exist (about 8 minutes).
pub fn binaries() -> Result<PathBuf> {
    let modules = root().join("e2e/kube");
    let go_mod = fs::read(modules.join("go.mod")).context("reading e2e/kube/go.mod")?;
    let digest = format!("{:x}", Sha256::digest(&go_mod));
    let folder = cache()?.join(format!("kube-{}", &digest[..12]));
    if !is_complete(&folder) {
        build(&modules, &folder)?;
    }
    Ok(folder)
}

fn is_complete(folder: &Path) -> bool {
    NAMES.iter().all(|name| folder.join(name).exists())
}

/// Returns the folder where built tools are kept.
pub fn cache() -> Result<PathBuf> {
    let base = match env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()) {
        Some(path) => PathBuf::from(path),
        None => PathBuf::from(env::var_os("HOME").context("neither XDG_CACHE_HOME nor HOME is set")?)
            .join(".cache"),
    };
    Ok(base.join("thuban"))
}

fn build(modules: &Path, folder: &Path) -> Result<()> {
    let partial = folder.with_extension(format!("partial-{}", std::process::id()));
    fs::create_dir_all(&partial).with_context(|| format!("making {}", partial.display()))?;
    let result = fill(modules, &partial);
    if result.is_ok() {
        // A folder that misses a file is of no use.
        let _ = fs::remove_dir_all(folder);
        fs::rename(&partial, folder).with_context(|| format!("renaming to {}", folder.display()))?;
    } else {
        let _ = fs::remove_dir_all(&partial);
    }
    result
}

fn fill(modules: &Path, partial: &Path) -> Result<()> {
    let mut missing = Vec::new();
    for name in NAMES {
        match suitable(name) {
            Some(path) => {
                println!("    {name}: {}", path.display());
                std::os::unix::fs::symlink(path, partial.join(name))?;
            }
            None => missing.push(package(name)),
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    if Command::new("go")
        .arg("version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        bail!("no Go: install version {OLDEST_GO} or newer (https://go.dev/dl) to build etcd and Kubernetes");
    }
    println!("    building {} (about 8 minutes, once)", missing.join(" "));
    let variable = |name: &str, value: &str| format!("-X k8s.io/component-base/version.{name}={value}");
    let flags = [
        "-s -w".to_owned(),
        variable("gitVersion", VERSION),
        variable("gitMajor", "1"),
        variable("gitMinor", "36"),
    ];
    let mut go = go();
    go.current_dir(modules).env("GOBIN", partial);
    go.args(["install", "-ldflags", &flags.join(" ")]).args(&missing);
    progress::watched("building etcd and Kubernetes", || run_command(&mut go))?;
    let server = partial.join("server");
    if server.exists() {
        fs::rename(&server, partial.join("etcd"))?;
    }
    if !is_complete(partial) {
        bail!("`go install` left out some of {}", NAMES.join(", "));
    }
    Ok(())
}

/// Returns the Go command, for static programs. It runs after all other processes that want the CPUs, because tests may
/// run beside it.
pub fn go() -> Command {
    let mut go = Command::new("nice");
    go.args(["-n", "10", "go"])
        .env("CGO_ENABLED", "0")
        .env("GOGC", GOGC);
    go
}

/// Returns the Go package of a binary.
fn package(name: &str) -> String {
    match name {
        "etcd" => "go.etcd.io/etcd/server/v3".into(),
        "agnhost" => "k8s.io/kubernetes/test/images/agnhost".into(),
        _ => format!("k8s.io/kubernetes/cmd/{name}"),
    }
}

/// Returns the binary in PATH, if its version is one that the cluster can take. agnhost goes into an image, and so is
/// always built.
fn suitable(name: &str) -> Option<PathBuf> {
    if name == "agnhost" {
        return None;
    }
    let path = env::split_paths(&env::var_os("PATH")?)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())?;
    let arguments: &[&str] = if name == "kubectl" {
        &["version", "--client"]
    } else {
        &["--version"]
    };
    let output = Command::new(&path).args(arguments).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let fits = if name == "etcd" {
        is_new_etcd(&text)
    } else {
        is_same_minor(&text)
    };
    fits.then_some(path)
}

/// Whether the text has the cluster's minor version: `Kubernetes v1.36.x`, or kubectl's `Client Version: v1.36.x`.
fn is_same_minor(text: &str) -> bool {
    let minor = VERSION.rsplit_once('.').map_or(VERSION, |(minor, _)| minor);
    text.split_whitespace()
        .any(|word| word.starts_with(&format!("{minor}.")))
}

fn is_new_etcd(text: &str) -> bool {
    let Some(version) = text.lines().find_map(|line| line.strip_prefix("etcd Version: ")) else {
        return false;
    };
    let numbers: Vec<u32> = version
        .trim()
        .split('.')
        .filter_map(|part| part.parse().ok())
        .collect();
    matches!(numbers[..], [major, minor, patch] if (major, minor, patch) >= OLDEST_ETCD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fitting_versions_are_taken_from_path() {
        assert!(is_same_minor("Kubernetes v1.36.1\n"));
        assert!(is_same_minor(
            "Client Version: v1.36.0\nKustomize Version: v5.8.1\n"
        ));
        assert!(!is_same_minor(
            "Client Version: v1.32.4-dispatcher\nKustomize Version: v5.5.0\n"
        ));
        assert!(is_new_etcd("etcd Version: 3.6.8\nGit SHA: x\n"));
        assert!(!is_new_etcd("etcd Version: 3.4.23\n"));
        assert!(!is_new_etcd("etcd Version: 3.5.12\n"));
    }
}
