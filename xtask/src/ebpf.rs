//! Builds the eBPF object, `target/bpf/thuban-programs.o`.
//!
//! The target has no prebuilt `core`, so a compiler with its own source is needed: rustup's nightly with rust-src, or
//! Debian's rust-web packages. cargo decides what is out of date; a current object costs one look.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    btf,
    build::{root, run_command},
    deps,
};

const TARGET: &str = "bpfel-unknown-none";
pub const DEBIAN_CARGO: &str = "/usr/bin/cargo";
pub const DEBIAN_RUSTC: &str = "/usr/bin/rustc";

/// Builds what is out of date and returns the object's path. [`deps::ensure`] must have been called before.
pub fn build() -> Result<PathBuf> {
    let root = root();
    let output = root.join("target/bpf");
    let linker = deps::bpf_linker()?;
    let mut command = Command::new(DEBIAN_CARGO);
    if deps::has_nightly_source() {
        command = Command::new("rustup");
        command.args(["run", "nightly", "cargo"]).env_remove("RUSTC");
    } else {
        command.env("RUSTC_BOOTSTRAP", "1").env("RUSTC", DEBIAN_RUSTC);
    }
    for inherited in [
        "RUSTUP_TOOLCHAIN",
        "RUSTFLAGS",
        "CARGO_ENCODED_RUSTFLAGS",
        "CARGO_BUILD_TARGET",
        "CARGO_TARGET_DIR",
    ] {
        command.env_remove(inherited);
    }
    command
        .current_dir(root)
        // BTF is made of the debug information of all functions, those of `core` too.
        .env("RUSTFLAGS", "-C link-arg=--btf")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "2")
        .env(
            "PATH",
            path_with(&[linker.parent(), Some(&Path::new(deps::LLVM).join("bin"))])?,
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
    run_command(&mut command)?;
    let built = output.join(TARGET).join("release/thuban-programs");
    let object = output.join("thuban-programs.o");
    let linked = fs::read(&built).with_context(|| format!("reading {}", built.display()))?;
    let finished = btf::finish(&linked)?;
    if fs::read(&object).ok().as_ref() != Some(&finished) {
        let partial = output.join("thuban-programs.o.partial");
        fs::write(&partial, finished).with_context(|| format!("writing {}", partial.display()))?;
        fs::rename(&partial, &object).with_context(|| format!("renaming to {}", object.display()))?;
    }
    Ok(object)
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
