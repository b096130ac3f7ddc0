//! `cargo xtask images check-arm64`: starts each program of arm64's images on an x86-64 machine, by qemu's user mode.
//!
//! This shows that programs and libraries are there and fit. qemu's user mode has neither BPF nor nf_tables, so the
//! data plane is not tried.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};
use oci_spec::image::{ImageIndex, ImageManifest};
use thuban_cluster::command::output_with_input;

use super::{IMAGES, folder_beside, layout::Layout};
use crate::{
    build::{Profile, step},
    cross, deps,
    images::blob_path,
    platform::Platform,
};

/// A program, how it is started, and what it must print.
struct Start {
    program: &'static str,
    arguments: &'static [&'static str],
    environment: &'static [(&'static str, &'static str)],
    input: &'static str,
    printed: &'static str,
}

/// A program that prints its version.
const fn versioned(program: &'static str, printed: &'static str) -> Start {
    Start {
        program,
        arguments: &["--version"],
        environment: &[],
        input: "",
        printed,
    }
}

const OWN: &str = env!("CARGO_PKG_VERSION");
const OPERATOR: [Start; 1] = [versioned("bin/thuban-operator", OWN)];
const TRANSITD: [Start; 3] = [
    versioned("bin/transitd", OWN),
    Start {
        program: "opt/thuban/thuban",
        arguments: &[],
        environment: &[("CNI_COMMAND", "VERSION")],
        input: r#"{"cniVersion": "1.1.0"}"#,
        printed: "supportedVersions",
    },
    // nft asks the kernel for nf_tables even to print its version, so only its loader runs.
    Start {
        program: "lib/ld-linux-aarch64.so.1",
        arguments: &["--list", "/bin/nft"],
        environment: &[],
        input: "",
        printed: "libnftables.so",
    },
];
const LOAD_BALANCERS: [Start; 5] = [
    versioned("bin/cidrd", OWN),
    versioned("bin/lbaasd", OWN),
    versioned("bin/lbaasctl", OWN),
    versioned("bin/thuban-speaker", OWN),
    versioned("bin/gobgpd", "gobgpd version"),
];

const OBSERVE: [Start; 1] = [versioned("bin/thuban-observe", OWN)];

/// Builds the images of arm64 and starts their programs.
pub fn check() -> Result<()> {
    deps::ensure_more(&deps::EMULATION_PACKAGES)?;
    cross::images()?;
    step("programs of arm64 under emulation", || {
        for (key, archive, name) in IMAGES {
            let programs: &[Start] = match key {
                "operator" => &OPERATOR,
                "transitd" => &TRANSITD,
                "observe" => &OBSERVE,
                _ => &LOAD_BALANCERS,
            };
            let archive = Profile::Release.images_for(Platform::Arm64).join(archive);
            check_image(&archive, programs).with_context(|| name.to_owned())?;
        }
        Ok(())
    })
}

fn check_image(archive: &Path, programs: &[Start]) -> Result<()> {
    let layout = Layout::of(
        &[(Platform::Arm64, archive.to_path_buf())],
        folder_beside(archive),
    )?;
    let root = layout.folder().join("root");
    unpack(layout.folder(), &root)?;
    for start in programs {
        let printed = printed(start, &root).with_context(|| format!("starting /{}", start.program))?;
        ensure!(
            printed.contains(start.printed),
            "/{} printed no {:?}: {printed}",
            start.program,
            start.printed
        );
        println!(
            "    /{}: {}",
            start.program,
            printed.lines().next().unwrap_or_default().trim()
        );
    }
    Ok(())
}

/// Unpacks the layers of a layout's only image.
fn unpack(layout: &Path, root: &Path) -> Result<()> {
    let blob = |digest: &str| layout.join(blob_path(digest));
    let index = ImageIndex::from_file(layout.join("index.json")).context("reading the index")?;
    let manifest = index.manifests().first().context("an image")?;
    let manifest =
        ImageManifest::from_file(blob(manifest.digest().as_ref())).context("reading the manifest")?;
    for layer in manifest.layers() {
        let path = blob(layer.digest().as_ref());
        let file = fs::File::open(&path).with_context(|| format!("opening {}", path.display()))?;
        tar::Archive::new(file)
            .unpack(root)
            .with_context(|| format!("unpacking {}", path.display()))?;
    }
    Ok(())
}

/// Starts a program of an image by qemu, and returns what it printed.
fn printed(start: &Start, root: &Path) -> Result<String> {
    let mut qemu = Command::new("qemu-aarch64");
    qemu.arg("-L")
        .arg(root)
        .arg(root.join(start.program))
        .args(start.arguments)
        .envs(start.environment.iter().copied());
    output_with_input(&mut qemu, start.input)
}
