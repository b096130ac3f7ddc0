//! The page of thuban-observe: built from `observe/ui` with npm's lockfile, and tested by node's own test runner.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    build::{root, run_command},
    deps,
    images::is_newer,
};

/// What the page is made of, in its folder.
const SOURCES: [&str; 4] = ["build.mjs", "package.json", "package-lock.json", "src"];

/// Builds the page and runs the tests of its pure parts.
pub fn check() -> Result<()> {
    deps::ensure_more(&deps::BROWSER_PACKAGES)?;
    build()?;
    run_command(npm().arg("test"))
}

/// Builds the page into `observe/ui/dist`, if one of its sources is newer. thuban-observe's binary has it inside.
pub fn build() -> Result<()> {
    // The page's own build begins with an empty folder.
    let built = folder().join("dist/built");
    let mut sources = Vec::new();
    for name in SOURCES {
        files_below(&folder().join(name), &mut sources)?;
    }
    if sources.iter().all(|source| is_newer(&built, source)) {
        return Ok(());
    }
    deps::ensure_more(&deps::PAGE_PACKAGES)?;
    // What a package would run while it is installed, nobody has read.
    run_command(npm().args(["ci", "--ignore-scripts", "--no-audit", "--no-fund"]))?;
    run_command(npm().args(["run", "build"]))?;
    fs::write(&built, "").with_context(|| format!("writing {}", built.display()))
}

fn files_below(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_path_buf());
        return Ok(());
    }
    for entry in fs::read_dir(path).with_context(|| format!("reading {}", path.display()))? {
        files_below(&entry?.path(), files)?;
    }
    Ok(())
}

fn npm() -> Command {
    let mut command = Command::new("npm");
    command.current_dir(folder());
    command
}

fn folder() -> PathBuf {
    root().join("observe/ui")
}
