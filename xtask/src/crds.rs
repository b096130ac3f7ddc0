//! `install/10-crds.yaml`: generated from the types of `api/`, committed, and checked to be current.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::build::{cargo, root};

/// Writes the file; with `check` only compares.
pub fn run(check: bool) -> Result<()> {
    let path = root().join("install/10-crds.yaml");
    let output = cargo()
        .current_dir(root())
        .args(["run", "--quiet", "-p", "thuban-api", "--bin", "crds"])
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("starting cargo")?;
    if !output.status.success() {
        bail!("generating the CRDs: {}", output.status);
    }
    if fs::read(&path).is_ok_and(|current| current == output.stdout) {
        println!("{} is current", path.display());
        return Ok(());
    }
    if check {
        bail!(
            "{} is not what api/ says: run `cargo xtask crds` and commit it",
            path.display()
        );
    }
    fs::write(&path, output.stdout).with_context(|| format!("writing {}", path.display()))?;
    println!("wrote {}", path.display());
    Ok(())
}
