//! The list of all crates in the images, as SPDX 2.3. It does not have gobgpd, HAProxy, nft, and libraries of these.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::command::bytes;

use crate::{
    build::{self, Profile, cargo, root},
    flow_relay, load_balancers,
    platform::Platform,
};

/// Writes the list beside the images; returns its path.
pub fn write() -> Result<PathBuf> {
    let path = Profile::Release.images().join("sbom.spdx.json");
    fs::create_dir_all(Profile::Release.images()).context("making the images' folder")?;
    fs::write(&path, serde_json::to_vec_pretty(&sbom()?)?)
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

/// Returns the crates of the images' binaries, those of build scripts and macros included.
fn sbom() -> Result<Value> {
    let metadata = bytes(
        cargo()
            .current_dir(root())
            .args(["metadata", "--format-version=1", "--locked"])
            .args(["--filter-platform", Platform::Amd64.target()])
            .args(["--filter-platform", Platform::Arm64.target()]),
    )?;
    let metadata: Value = serde_json::from_slice(&metadata).context("reading cargo metadata")?;
    let used = used(&metadata);
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let packages: Vec<Value> = packages
        .filter(|package| {
            let is_own = package["source"].is_null();
            !is_own && used.contains(package["id"].as_str().unwrap_or_default())
        })
        .map(described)
        .collect();
    Ok(json!({
        "spdxVersion": "SPDX-2.3", "dataLicense": "CC0-1.0", "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("thuban-{}", env!("CARGO_PKG_VERSION")),
        "documentNamespace": format!("https://thuban.dev/sbom/{}", env!("CARGO_PKG_VERSION")),
        "creationInfo": {"created": "1970-01-01T00:00:00Z", "creators": ["Tool: cargo-xtask"]},
        "packages": packages,
    }))
}

/// Returns the ids of the packages that the images' binaries are built of: not what only tests and tools need.
fn used(metadata: &Value) -> BTreeSet<&str> {
    let nodes = metadata["resolve"]["nodes"].as_array().into_iter().flatten();
    let nodes: BTreeMap<&str, &Value> = nodes
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let mut left: Vec<&str> = packages
        .filter(|package| package["source"].is_null())
        .filter(|package| {
            let name = package["name"].as_str().unwrap_or_default();
            build::PACKAGES.contains(&name)
                || load_balancers::PACKAGES.contains(&name)
                || flow_relay::PACKAGES.contains(&name)
        })
        .filter_map(|package| package["id"].as_str())
        .collect();
    let mut used = BTreeSet::new();
    while let Some(id) = left.pop() {
        if !used.insert(id) {
            continue;
        }
        let own = nodes.get(id).and_then(|node| node["deps"].as_array());
        for dependency in own.into_iter().flatten() {
            let mut kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            if kinds.any(|kind| kind["kind"] != "dev") {
                left.extend(dependency["pkg"].as_str());
            }
        }
    }
    used
}

fn described(package: &Value) -> Value {
    let text = |key: &str| package[key].as_str().unwrap_or("NOASSERTION").to_owned();
    let (name, version) = (text("name"), text("version"));
    json!({
        "SPDXID": format!("SPDXRef-{}-{}", name.replace('_', "-"), version.replace('+', "-")),
        "name": name, "versionInfo": version,
        "licenseDeclared": text("license").replace(" / ", "/").replace('/', " OR "), "licenseConcluded": "NOASSERTION",
        "downloadLocation": package["repository"].as_str().unwrap_or("NOASSERTION"),
        "externalRefs": [{
            "referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl",
            "referenceLocator": format!("pkg:cargo/{name}@{version}"),
        }],
    })
}

#[cfg(test)]
mod tests {
    use super::sbom;

    #[test]
    fn the_list_of_crates_has_licenses_and_addresses() {
        let list = sbom().unwrap();
        let packages = list["packages"].as_array().unwrap();
        let tokio = packages
            .iter()
            .find(|package| package["name"] == "tokio")
            .unwrap();
        assert_eq!(tokio["licenseDeclared"], "MIT");
        let locator = tokio["externalRefs"][0]["referenceLocator"].as_str().unwrap();
        assert!(locator.starts_with("pkg:cargo/tokio@1."), "{locator}");
        // Own packages, and what only tests and tools use.
        for name in ["transitd", "plotters"] {
            assert!(!packages.iter().any(|package| package["name"] == name), "{name}");
        }
    }
}
