//! The checks that need no cluster and no root: format, lints, what pages refer to, names of tests, dependencies, and
//! that the eBPF object builds.

use std::process::Command;

use anyhow::Result;

use crate::{
    build::{self, root, run_command, step},
    deps, ebpf, links, test_names,
};

/// Runs all checks and stops at the first that fails.
pub fn run() -> Result<()> {
    deps::ensure()?;
    format()?;
    pages()?;
    test_names()?;
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
    dependencies()?;
    step("eBPF programs", ebpf::build).map(|_| ())
}

/// Checks that dependencies are as `deny.toml` wants them. Advisories are left to CI: they need the network and change
/// daily.
fn dependencies() -> Result<()> {
    let deny = deps::cargo_deny()?;
    step("dependencies", || {
        let mut command = Command::new(deny);
        command
            .current_dir(root())
            .args(["--log-level", "error", "check", "bans", "licenses", "sources"]);
        run_command(&mut command)
    })
}

/// Checks that all code is as `cargo fmt` formats it.
pub fn format() -> Result<()> {
    step("format", || cargo(&["fmt", "--all", "--check"]))
}

/// Checks that everything that pages refer to exists.
pub fn pages() -> Result<()> {
    step("pages", links::run)
}

/// Checks that a list of tests fits on a screen.
pub fn test_names() -> Result<()> {
    step("names of tests", test_names::run)
}

fn cargo(arguments: &[&str]) -> Result<()> {
    run_command(build::cargo().current_dir(root()).args(arguments))
}
