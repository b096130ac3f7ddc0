//! `cargo xtask images`: puts the images of a release into a registry, by go-containerregistry's crane, signs them, and
//! prints the chart's values for them: digests, so that nodes run exactly these.
//!
//! An image for several platforms is one index. Its digest is what is signed and what the values name.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use clap::Subcommand;
use thuban_cluster::command::output;

use self::{layout::Layout, signature::Key};
use crate::{
    build::{self, Profile},
    cross, flow_relay,
    go_tools::GoTools,
    images, load_balancers,
    platform::Platform,
    progress,
};

mod emulation;
mod layout;
pub mod registry;
mod sbom;
mod signature;

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
const IMAGES: [(&str, &str, &str); 4] = [
    ("operator", "operator.tar", images::OPERATOR),
    ("transitd", "transitd.tar", images::TRANSITD),
    ("loadBalancers", "more/load-balancers.tar", images::LOAD_BALANCERS),
    ("observe", "more/observe.tar", images::OBSERVE),
];

#[derive(Debug, Subcommand)]
pub enum Action {
    /// Build the images, push them to a registry, and print the chart's values for them
    Push {
        /// Registry and path, such as registry.example.com/thuban. Log in before, with docker, podman or crane
        registry: String,
        /// Speak HTTP, not HTTPS
        #[arg(long)]
        insecure: bool,
        /// Platforms, with commas between them. Several are pushed as one index. Default: this machine's own
        #[arg(long, value_delimiter = ',', value_name = "PLATFORMS")]
        platforms: Vec<Platform>,
        /// Sign the images for `cosign verify`, with this private key: ECDSA on the curve P-256, in PEM
        #[arg(long, value_name = "FILE")]
        sign_key: Option<PathBuf>,
    },
    /// Build the images for arm64, and start each program in them under emulation, by qemu
    #[command(name = "check-arm64")]
    CheckArm64,
    /// Write the list of all crates in the images, as SPDX 2.3 in JSON
    Sbom,
}

pub fn run(action: &Action) -> Result<()> {
    match action {
        Action::Push {
            registry,
            insecure,
            platforms,
            sign_key,
        } => {
            // A key of no use is told before minutes of building.
            let key = sign_key.as_deref().map(Key::read).transpose()?;
            let platforms = Platform::chosen(platforms);
            for platform in &platforms {
                build_for(*platform)?;
            }
            let destination = Destination {
                registry: registry.trim_end_matches('/'),
                insecure: *insecure,
                key: key.as_ref(),
            };
            let values = push(Profile::Release, &platforms, &destination)?;
            println!("\nThe crates in them: {}", sbom::write()?.display());
            println!("\nThe chart's values:\n\n{values}");
            Ok(())
        }
        Action::CheckArm64 => emulation::check(),
        Action::Sbom => {
            println!("{}", sbom::write()?.display());
            Ok(())
        }
    }
}

/// Builds all images of a platform.
fn build_for(platform: Platform) -> Result<()> {
    if platform != Platform::own() {
        return cross::images();
    }
    build::run()?;
    build::step("image of load balancers", || {
        load_balancers::archive(Profile::Release).map(drop)
    })?;
    build::step("image of thuban-observe", || {
        flow_relay::archive(Profile::Release).map(drop)
    })
}

pub fn crane() -> Result<PathBuf> {
    Ok(progress::watched("building crane", || CRANE.ensure())?.join("crane"))
}

/// Where images are pushed, and who signs them.
struct Destination<'a> {
    /// Registry and path, without a slash at the end.
    registry: &'a str,
    insecure: bool,
    key: Option<&'a Key>,
}

impl Destination<'_> {
    /// Pushes what a layout has under a repository and a tag; returns its digest.
    fn push(&self, layout: &Layout, name: &str) -> Result<String> {
        let target = format!("{}/{name}", self.registry);
        let mut command = Command::new(crane()?);
        command.arg("push").arg(layout.folder()).arg(&target);
        if self.insecure {
            command.arg("--insecure");
        }
        let pushed = output(&mut command)?;
        let pushed = pushed.trim();
        let (_, digest) = pushed
            .rsplit_once('@')
            .with_context(|| format!("no digest in {pushed:?}"))?;
        println!("    pushed {pushed}");
        Ok(digest.to_owned())
    }

    /// Signs an image, if there is a key, and pushes the signature beside the image. `folder`: for what is pushed.
    fn sign(&self, repository: &str, digest: &str, folder: PathBuf) -> Result<()> {
        let Some(key) = self.key else {
            return Ok(());
        };
        let layout = key.sign(&format!("{}/{repository}", self.registry), digest, folder)?;
        self.push(&layout, &format!("{repository}:{}", signature::tag(digest)))
            .map(drop)
    }
}

/// Pushes the images of a profile. Returns the chart's values.
fn push(profile: Profile, platforms: &[Platform], destination: &Destination<'_>) -> Result<String> {
    let mut values = format!("images:\n  registry: {}\n", destination.registry);
    for (key, archive, name) in IMAGES {
        let archives: Vec<(Platform, PathBuf)> = platforms
            .iter()
            .map(|platform| (*platform, profile.images_for(*platform).join(archive)))
            .collect();
        let folder = folder_beside(&profile.images().join(archive));
        let short = without_registry(name);
        let (repository, _) = short.split_once(':').context("a tag")?;
        let digest = destination.push(&Layout::of(&archives, folder.clone())?, short)?;
        destination.sign(repository, &digest, folder)?;
        let _ = writeln!(values, "  {key}: {{digest: \"{digest}\"}}");
    }
    Ok(values)
}

/// Returns repository and tag of an image's name.
fn without_registry(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

/// Returns a folder beside an archive, for the layout that crane reads.
fn folder_beside(archive: &Path) -> PathBuf {
    archive.with_extension(format!("layout-{}", std::process::id()))
}
