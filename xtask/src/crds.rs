//! The CRDs in `install/` and `charts/thuban`: generated from the types of `api/`, committed, and checked to be
//! current.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};

use crate::build::{cargo, root};
use crate::drops;
use crate::manifests::keep_current;

const SOURCE: &str = "api/ says: run `cargo xtask crds`";

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
        keep_current(&root().join(file), &text, check.then_some(SOURCE))?;
    }
    drops::run(check)
}
