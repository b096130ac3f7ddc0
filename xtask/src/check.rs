//! What needs no cluster and no root: format, lints, what pages refer to, and that the eBPF object builds.

use anyhow::Result;

use crate::{
    build::{self, root, run_command, step},
    deps, ebpf, links,
};

/// Stops at the first that fails.
pub fn run() -> Result<()> {
    deps::ensure()?;
    format()?;
    pages()?;
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

/// Whether what pages refer to is there.
pub fn pages() -> Result<()> {
    step("pages", links::run)
}

fn cargo(arguments: &[&str]) -> Result<()> {
    run_command(build::cargo().current_dir(root()).args(arguments))
}
