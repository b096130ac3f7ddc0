//! What needs no cluster and no root: format, lints, the committed CRDs, what pages refer to, and that the eBPF object
//! builds.

use std::process::Command;

use anyhow::Result;

use crate::{
    build::{root, run_command, step},
    crds, deps, ebpf, links,
};

/// Stops at the first that fails.
pub fn run() -> Result<()> {
    deps::ensure()?;
    step("format", || cargo(&["fmt", "--all", "--check"]))?;
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
    step("CRDs", || crds::run(true))?;
    step("pages", links::run)?;
    step("eBPF programs", ebpf::build).map(|_| ())
}

fn cargo(arguments: &[&str]) -> Result<()> {
    run_command(Command::new("cargo").current_dir(root()).args(arguments))
}
