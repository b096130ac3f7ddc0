//! What needs no cluster and no root: format, lints, and that the eBPF object builds.

use std::process::Command;

use anyhow::Result;

use crate::{
    build::{root, run_command, step},
    deps, ebpf,
};

/// Stops at the first that fails.
pub fn run() -> Result<()> {
    deps::ensure()?;
    format()?;
    step("lints", || {
        cargo(&[
            "clippy",
            "--quiet",
            "--workspace",
            "--exclude",
            "xdp-programs",
            "--all-targets",
            "--",
            "-D",
            "warnings",
        ])
    })?;
    step("eBPF programs", ebpf::build).map(|_| ())
}

/// Whether all is as `cargo fmt` has it.
pub fn format() -> Result<()> {
    step("format", || cargo(&["fmt", "--all", "--check"]))
}

fn cargo(arguments: &[&str]) -> Result<()> {
    run_command(Command::new("cargo").current_dir(root()).args(arguments))
}
