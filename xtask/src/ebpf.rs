//! Builds the eBPF object, `target/bpf/thuban-programs.o`.
//!
//! The target has no prebuilt `core`, so a compiler with its own source is needed: rustup's nightly with rust-src, or
//! Debian's rust-web packages. cargo decides what is out of date; a current object costs one look.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};

const TARGET: &str = "bpfel-unknown-none";
const DEBIAN_CARGO: &str = "/usr/bin/cargo";
const DEBIAN_RUSTC: &str = "/usr/bin/rustc";
const DEBIAN_LLVM: &str = "/usr/lib/llvm-22";
const DEBIAN_PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "llvm-22-dev"];

/// A compiler that can build `core` for the target.
enum Toolchain {
    Nightly,
    Debian,
}

/// Builds what is out of date and returns the object's path.
pub fn build() -> Result<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("xtask lies in the workspace")?;
    let output = root.join("target/bpf");
    let toolchain = choose()?;
    let linker = find_linker()?;
    let mut command = match toolchain {
        Toolchain::Nightly => {
            let mut command = Command::new("rustup");
            command.args(["run", "nightly", "cargo"]);
            command
        }
        Toolchain::Debian => {
            let mut command = Command::new(DEBIAN_CARGO);
            command.env("RUSTC_BOOTSTRAP", "1").env("RUSTC", DEBIAN_RUSTC);
            command
        }
    };
    for inherited in [
        "RUSTUP_TOOLCHAIN",
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "CARGO_TARGET_DIR",
    ] {
        command.env_remove(inherited);
    }
    if matches!(toolchain, Toolchain::Nightly) {
        command.env_remove("RUSTC");
    }
    command
        .current_dir(root)
        .env(
            "PATH",
            path_with(&[linker.parent(), Some(&Path::new(DEBIAN_LLVM).join("bin"))])?,
        )
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "xdp-programs",
            "-Z",
            "build-std=core",
        ])
        .args(["--target", TARGET, "--target-dir"])
        .arg(&output);
    run(&mut command)?;
    let built = output.join(TARGET).join("release/thuban-programs");
    let object = output.join("thuban-programs.o");
    if !is_newer(&object, &built) {
        let partial = output.join("thuban-programs.o.partial");
        fs::copy(&built, &partial).with_context(|| format!("copying {}", built.display()))?;
        fs::rename(&partial, &object).with_context(|| format!("renaming to {}", object.display()))?;
    }
    Ok(object)
}

fn choose() -> Result<Toolchain> {
    if has_nightly() {
        return Ok(Toolchain::Nightly);
    }
    let debian_source = Path::new("/usr/lib/rustlib/src/rust/library/core/Cargo.toml");
    if Path::new(DEBIAN_CARGO).exists() && debian_source.exists() {
        return Ok(Toolchain::Debian);
    }
    if is_root() && Path::new("/usr/bin/apt-get").exists() {
        println!("installing {}", DEBIAN_PACKAGES.join(" "));
        run(Command::new("apt-get")
            .args(["install", "-y", "--no-install-recommends"])
            .args(DEBIAN_PACKAGES))?;
        return Ok(Toolchain::Debian);
    }
    bail!("no compiler for eBPF: run `rustup toolchain install nightly --component rust-src`")
}

fn has_nightly() -> bool {
    let Ok(output) = Command::new("rustup")
        .args(["run", "nightly", "rustc", "--print", "sysroot"])
        .output()
    else {
        return false;
    };
    let sysroot = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    output.status.success()
        && sysroot
            .join("lib/rustlib/src/rust/library/core/Cargo.toml")
            .exists()
}

/// bpf-linker from PATH or cargo's folder; installed when it is missing and LLVM is there.
fn find_linker() -> Result<PathBuf> {
    let cargo_home = env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(env::var_os("HOME")?).join(".cargo")));
    let mut folders: Vec<PathBuf> = env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect())
        .unwrap_or_default();
    folders.extend(cargo_home.map(|home| home.join("bin")));
    let find = || {
        folders
            .iter()
            .map(|folder| folder.join("bpf-linker"))
            .find(|path| path.exists())
    };
    if let Some(found) = find() {
        return Ok(found);
    }
    println!("installing bpf-linker");
    let mut install = Command::new("cargo");
    install.args(["install", "bpf-linker", "--locked"]);
    if Path::new(DEBIAN_LLVM).exists() {
        install
            .args(["--no-default-features", "--features", "llvm-22"])
            .env("LLVM_PREFIX", DEBIAN_LLVM);
    }
    run(&mut install)?;
    find().context("bpf-linker was installed, but is not in cargo's bin folder")
}

fn path_with(front: &[Option<&Path>]) -> Result<std::ffi::OsString> {
    let old = env::var_os("PATH").unwrap_or_default();
    let folders = front
        .iter()
        .flatten()
        .map(|path| path.to_path_buf())
        .chain(env::split_paths(&old));
    env::join_paths(folders).context("PATH")
}

fn is_newer(object: &Path, built: &Path) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    matches!((time(object), time(built)), (Some(object), Some(built)) if object >= built)
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("starting {command:?}"))?;
    if !status.success() {
        bail!("{command:?}: {status}");
    }
    Ok(())
}
