//! `cargo xtask images push`: puts the images of a release into a registry, by go-containerregistry's crane, and prints
//! the chart's values for them: digests, so that nodes run exactly these.
//!
//! Beside the images lies a list of all crates in them (SPDX 2.3), `target/images/sbom.spdx.json`. It does not have
//! gobgpd, nft, and nft's libraries.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Subcommand;
use serde_json::{Value, json};

use crate::{
    build::{self, Profile, cargo, root},
    go_tools::GoTools,
    images, load_balancers, progress,
};

const CRANE: GoTools = GoTools {
    name: "crane",
    modules: "e2e/crane",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &["crane"],
};
/// Each image: its key in the chart's values, its archive, and its name.
const IMAGES: [(&str, &str, &str); 3] = [
    ("operator", "operator.tar", images::OPERATOR),
    ("transitd", "transitd.tar", images::TRANSITD),
    ("loadBalancers", "more/load-balancers.tar", images::LOAD_BALANCERS),
];
const REGISTRY_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, Subcommand)]
pub enum Action {
    /// Build the images, push them to a registry, and print the chart's values for them
    Push {
        /// Registry and path, such as registry.example.com/thuban. Log in before, with docker, podman or crane
        registry: String,
        /// Speak HTTP, not HTTPS
        #[arg(long)]
        insecure: bool,
    },
    /// Write the list of all crates in the images, as SPDX 2.3 in JSON
    Sbom,
}

pub fn run(action: &Action) -> Result<()> {
    match action {
        Action::Push { registry, insecure } => {
            build::run()?;
            build::step("image of load balancers", || {
                load_balancers::archive(Profile::Release)
            })?;
            let values = push(Profile::Release, registry, *insecure)?;
            println!("\nThe crates in them: {}", write_sbom()?.display());
            println!("\nThe chart's values:\n\n{values}");
            Ok(())
        }
        Action::Sbom => {
            println!("{}", write_sbom()?.display());
            Ok(())
        }
    }
}

fn write_sbom() -> Result<PathBuf> {
    let path = Profile::Release.images().join("sbom.spdx.json");
    fs::create_dir_all(Profile::Release.images()).context("making the images' folder")?;
    fs::write(&path, serde_json::to_vec_pretty(&sbom()?)?)
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

pub fn crane() -> Result<PathBuf> {
    Ok(progress::watched("building crane", || CRANE.ensure())?.join("crane"))
}

/// Pushes the images of a profile. Returns the chart's values.
fn push(profile: Profile, registry: &str, insecure: bool) -> Result<String> {
    let crane = crane()?;
    let registry = registry.trim_end_matches('/');
    let mut values = format!("images:\n  registry: {registry}\n");
    for (key, archive, name) in IMAGES {
        let short = without_registry(name);
        let target = format!("{registry}/{short}");
        let layout = unpacked(&profile.images().join(archive))?;
        let mut command = Command::new(&crane);
        command.arg("push").arg(&layout).arg(&target);
        if insecure {
            command.arg("--insecure");
        }
        let output = command.output().context("starting crane")?;
        fs::remove_dir_all(&layout).with_context(|| format!("removing {}", layout.display()))?;
        if !output.status.success() {
            bail!(
                "pushing {target}: {}",
                String::from_utf8_lossy(&output.stderr).trim()
            );
        }
        let pushed = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        let (_, digest) = pushed
            .rsplit_once('@')
            .with_context(|| format!("no digest in {pushed:?}"))?;
        println!("    pushed {pushed}");
        let _ = writeln!(values, "  {key}: {{digest: \"{digest}\"}}");
    }
    Ok(values)
}

/// Returns repository and tag of an image's name.
fn without_registry(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// Unpacks an archive into a folder beside it, as crane reads it.
fn unpacked(archive: &Path) -> Result<PathBuf> {
    let folder = archive.with_extension(format!("layout-{}", std::process::id()));
    let file = fs::File::open(archive).with_context(|| format!("opening {}", archive.display()))?;
    tar::Archive::new(file)
        .unpack(&folder)
        .with_context(|| format!("unpacking {}", archive.display()))?;
    Ok(folder)
}

/// Returns the crates of the images' binaries, those of build scripts and macros included.
fn sbom() -> Result<Value> {
    let output = cargo()
        .current_dir(root())
        .args(["metadata", "--format-version=1", "--locked"])
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .output()
        .context("starting cargo metadata")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: Value = serde_json::from_slice(&output.stdout).context("reading cargo metadata")?;
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
            build::PACKAGES.contains(&name) || load_balancers::PACKAGES.contains(&name)
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

/// A registry on loopback, which ends with this.
struct Registry(Child);

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Pushes the tests' images to a registry, and reads back from it what a node would pull.
pub fn check() -> Result<()> {
    let crane = crane()?;
    let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let address = format!("127.0.0.1:{port}");
    let serve = Command::new(&crane)
        .args(["registry", "serve", "--address", &address])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let _registry = Registry(serve.context("starting a registry")?);
    let end = Instant::now() + REGISTRY_TIMEOUT;
    while std::net::TcpStream::connect(&address).is_err() {
        ensure!(Instant::now() < end, "no registry at {address}");
        thread::sleep(Duration::from_millis(50));
    }
    load_balancers::archive(Profile::Test)?;
    let values = push(Profile::Test, &format!("{address}/thuban/"), true)?;
    let values: serde_yaml_ng::Value = serde_yaml_ng::from_str(&values)?;
    for (key, _, name) in IMAGES {
        let digest = values["images"][key]["digest"].as_str().context("a digest")?;
        let short = without_registry(name);
        let (repository, _) = short.split_once(':').context("a tag")?;
        for reference in [short.to_owned(), format!("{repository}@{digest}")] {
            let output = Command::new(&crane)
                .args(["manifest", "--insecure", &format!("{address}/thuban/{reference}")])
                .output()
                .context("starting crane")?;
            ensure!(
                output.status.success(),
                "{reference}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            let manifest: Value = serde_json::from_slice(&output.stdout)?;
            ensure!(
                manifest["layers"]
                    .as_array()
                    .is_some_and(|layers| layers.len() == 1),
                "{manifest}"
            );
        }
    }
    Ok(())
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
