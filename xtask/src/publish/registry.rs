//! The test "images in a registry": pushes and signs images at a registry on loopback, and reads back from it what
//! nodes and cosign would read.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use thuban_cluster::{command::bytes, wait::wait_for};

use super::{Destination, IMAGES, crane, layout::Layout, push, signature, without_registry};
use crate::{
    build::Profile,
    flow_relay,
    images::{digest, testing::image},
    load_balancers,
    platform::Platform,
};

const TIMEOUT: Duration = Duration::from_secs(10);

/// A registry on loopback, which ends with this.
struct Registry {
    crane: PathBuf,
    server: Child,
    address: String,
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Registry {
    fn start() -> Result<Self> {
        let crane = crane()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let address = format!("127.0.0.1:{port}");
        let server = Command::new(&crane)
            .args(["registry", "serve", "--address", &address])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting a registry")?;
        let registry = Self {
            crane,
            server,
            address,
        };
        let what = format!("a registry at {}", registry.address);
        wait_for(&what, TIMEOUT, Duration::from_millis(50), || {
            Ok(std::net::TcpStream::connect(&registry.address).is_ok())
        })?;
        Ok(registry)
    }

    /// Returns what crane prints of an image: its `manifest`, its `config`, or a `blob`.
    fn read(&self, what: &[&str], reference: &str) -> Result<Vec<u8>> {
        bytes(
            Command::new(&self.crane)
                .args(what)
                .args(["--insecure", &format!("{}/thuban/{reference}", self.address)]),
        )
    }

    fn manifest(&self, reference: &str) -> Result<Value> {
        serde_json::from_slice(&self.read(&["manifest"], reference)?)
            .with_context(|| format!("reading the manifest of {reference}"))
    }
}

/// Pushes the tests' images, signed, and an index of two platforms.
pub fn check() -> Result<()> {
    let registry = Registry::start()?;
    load_balancers::archive(Profile::Test)?;
    flow_relay::archive(Profile::Test)?;
    let folder = Profile::Test
        .images()
        .join(format!("registry-{}", std::process::id()));
    fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    let checked = check_images(&registry, &folder).and_then(|()| check_index(&registry, &folder));
    fs::remove_dir_all(&folder).with_context(|| format!("removing {}", folder.display()))?;
    checked
}

/// Every image can be pulled by tag and by digest, and has a signature by the key.
fn check_images(registry: &Registry, folder: &Path) -> Result<()> {
    let path = folder.join("key.pem");
    signature::testing::make_key(&path, "P-256")?;
    let key = signature::Key::read(&path)?;
    let destination = Destination {
        registry: &format!("{}/thuban", registry.address),
        insecure: true,
        key: Some(&key),
    };
    let values = push(Profile::Test, &[Platform::own()], &destination)?;
    let values: serde_yaml_ng::Value = serde_yaml_ng::from_str(&values)?;
    for (key, _, name) in IMAGES {
        let digest = values["images"][key]["digest"].as_str().context("a digest")?;
        let short = without_registry(name);
        let (repository, _) = short.split_once(':').context("a tag")?;
        for reference in [short.to_owned(), format!("{repository}@{digest}")] {
            let manifest = registry.manifest(&reference)?;
            ensure!(
                manifest["layers"]
                    .as_array()
                    .is_some_and(|layers| layers.len() == 1),
                "{manifest}"
            );
        }
        check_signature(registry, repository, digest, &path, folder)?;
    }
    Ok(())
}

/// Does what `cosign verify --key` does.
fn check_signature(
    registry: &Registry,
    repository: &str,
    signed: &str,
    key: &Path,
    folder: &Path,
) -> Result<()> {
    let manifest = registry.manifest(&format!("{repository}:{}", signature::tag(signed)))?;
    let layer = &manifest["layers"][0];
    let place = layer["digest"].as_str().context("a payload")?;
    let payload = registry.read(&["blob"], &format!("{repository}@{place}"))?;
    ensure!(digest(&payload) == place, "another payload than {place}");
    let claim: Value = serde_json::from_slice(&payload).context("reading the payload")?;
    ensure!(
        claim["critical"]["image"]["docker-manifest-digest"] == signed,
        "signed is not {signed}: {claim}"
    );
    let encoded = layer["annotations"][signature::ANNOTATION]
        .as_str()
        .with_context(|| format!("no signature: {manifest}"))?;
    signature::testing::verify(key, &payload, encoded, folder)
        .with_context(|| format!("the signature of {repository}"))
}

/// A node of each platform gets its own image from an index.
fn check_index(registry: &Registry, folder: &Path) -> Result<()> {
    let platforms = [Platform::Amd64, Platform::Arm64];
    let mut archives = Vec::new();
    for platform in platforms {
        let path = image().write_for(platform, &folder.join(platform.architecture()))?;
        archives.push((platform, path));
    }
    let destination = Destination {
        registry: &format!("{}/thuban", registry.address),
        insecure: true,
        key: None,
    };
    let pushed = destination.push(&Layout::of(&archives, folder.join("layout"))?, "both:1")?;
    for reference in ["both:1".to_owned(), format!("both@{pushed}")] {
        let index = registry.manifest(&reference)?;
        ensure!(
            index["manifests"]
                .as_array()
                .is_some_and(|manifests| manifests.len() == platforms.len()),
            "{index}"
        );
    }
    for platform in platforms {
        let name = format!("linux/{}", platform.architecture());
        let config = registry.read(&["config", "--platform", &name], "both:1")?;
        let config: Value = serde_json::from_slice(&config).context("reading a config")?;
        ensure!(
            config["architecture"] == platform.architecture(),
            "{name}: {config}"
        );
    }
    Ok(())
}
