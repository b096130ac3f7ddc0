//! The page of flows: built from `observe/ui` with npm's lockfile, and tested by node's own test runner.

use std::{path::PathBuf, process::Command};

use anyhow::Result;

use crate::{
    build::{root, run_command},
    deps,
};

/// Builds the page into `observe/ui/dist` and runs the tests of its pure parts.
pub fn check() -> Result<()> {
    build()?;
    run_command(npm().arg("test"))
}

/// Builds the page into `observe/ui/dist`.
fn build() -> Result<()> {
    deps::ensure_more(&deps::PAGE_PACKAGES)?;
    // What a package would run while it is installed, nobody has read.
    run_command(npm().args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]))?;
    run_command(npm().args(["run", "build"]))
}

fn npm() -> Command {
    let mut command = Command::new("npm");
    command.current_dir(folder());
    command
}

fn folder() -> PathBuf {
    root().join("observe/ui")
}
