//! Debian's kernel of another series: downloaded as a package and unpacked, never installed.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use thuban_cluster::command::bytes;

use super::initramfs::Root;
use crate::build::run_command;

/// Debian's package that leads to the newest kernel of this series; its security archive has it, and backports.
pub const SERIES: &str = "linux-image-6.12-cloud-amd64";

/// A kernel that a package brought.
pub struct Kernel {
    pub image: PathBuf,
    modules: PathBuf,
}

impl Kernel {
    /// Adds modules to a machine's root, numbered in this order; paths are those in the package.
    pub fn add_modules(&self, root: &Root, modules: &[&str]) -> Result<()> {
        for (number, module) in modules.iter().enumerate() {
            let packed = self.modules.join(module);
            let unpacked = bytes(Command::new("xz").arg("-dc").arg(&packed))?;
            root.file(&format!("/modules/{number}.ko"), &unpacked)?;
        }
        Ok(())
    }
}

/// Downloads the newest kernel of the series, unless it is there, and unpacks it without installing it.
pub fn fetch(folder: &Path) -> Result<Kernel> {
    let package = newest()?;
    let place = folder.join(&package);
    if !place.exists() {
        run_command(
            Command::new("apt-get")
                .current_dir(folder)
                .args(["-q", "download", &package]),
        )?;
        let downloaded = named(folder, |name| name.starts_with(&format!("{package}_")))?;
        let partial = folder.join("partial");
        let _ = fs::remove_dir_all(&partial);
        run_command(
            Command::new("dpkg-deb")
                .arg("--extract")
                .args([&downloaded, &partial]),
        )?;
        fs::rename(&partial, &place).with_context(|| format!("renaming to {}", place.display()))?;
        fs::remove_file(&downloaded).with_context(|| format!("removing {}", downloaded.display()))?;
    }
    Ok(Kernel {
        image: named(&place.join("boot"), |name| name.starts_with("vmlinuz-"))?,
        modules: named(&place.join("lib/modules"), |name| name.starts_with("6."))?.join("kernel"),
    })
}

/// Returns the package that the series leads to.
fn newest() -> Result<String> {
    let output = Command::new("apt-cache")
        .args(["depends", SERIES])
        .output()
        .context("starting apt-cache: the kernel comes from Debian's packages")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut depends = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "));
    let package = depends.find(|package| package.starts_with("linux-image-"));
    let package = package.with_context(|| {
        format!(
            "apt knows no {SERIES}: run `apt-get update`; Debian 12 has it in bookworm-security and backports"
        )
    })?;
    Ok(package.to_owned())
}

/// Returns the path of the first file or folder with such a name.
fn named(folder: &Path, is_right: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    let found = paths.find(|path| {
        let name = path.file_name().unwrap_or_default();
        is_right(&name.to_string_lossy())
    });
    found.with_context(|| format!("{} has not what a kernel's package has", folder.display()))
}
