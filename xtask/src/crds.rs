//! The CRDs in `install/` and `charts/thuban`: generated from the types of `api/`, committed, and checked to be
//! current.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, bail};

use crate::build::{cargo, root};

/// Writes the files; with `check` only compares.
pub fn run(check: bool) -> Result<()> {
    let output = cargo()
        .current_dir(root())
        .args(["run", "--quiet", "-p", "thuban-api", "--bin", "crds"])
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("starting cargo")?;
    if !output.status.success() {
        bail!("generating the CRDs: {}", output.status);
    }
    let manifests: BTreeMap<String, String> =
        serde_json::from_slice(&output.stdout).context("reading the generated CRDs")?;
    for (file, text) in manifests {
        let path = root().join(file);
        if fs::read_to_string(&path).is_ok_and(|current| current == text) {
            println!("{} is current", path.display());
            continue;
        }
        if check {
            bail!(
                "{} is not what api/ says: run `cargo xtask crds` and commit it",
                path.display()
            );
        }
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(())
}
