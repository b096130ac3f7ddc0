//! What this machine must have. It is looked at before anything is built.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};

use crate::build::{Profile, root};

const GIB: u64 = 1 << 30;

/// The oldest kernel that Thuban runs on (docs/guide/install.md).
pub const KERNEL: (u32, u32) = (6, 6);

/// What a command needs of a machine.
pub struct Needs {
    /// What it builds. Only a first build needs the disk.
    pub profile: Profile,
    /// GiB that are free before the first build.
    pub disk: u64,
    /// GiB that are free before its clusters are up.
    pub memory: u64,
    /// The oldest kernel.
    pub kernel: (u32, u32),
}

/// Fails if this machine lacks something: root, a kernel, memory, or space for a first build. All that is missing is
/// named at once. `is_up`: the cluster has its memory already.
pub fn check(needs: &Needs, is_up: bool) -> Result<()> {
    let Needs {
        profile,
        disk,
        memory,
        kernel,
    } = *needs;
    let mut missing = Vec::new();
    if !nix::unistd::geteuid().is_root() {
        missing.push("root: run the command with sudo".to_owned());
    }
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").context("reading the kernel's version")?;
    if version(&release).is_some_and(|own| own < kernel) {
        let (major, minor) = kernel;
        missing.push(format!(
            "Linux {major}.{minor} or newer: this is {}",
            release.trim()
        ));
    }
    let table = fs::read_to_string("/proc/meminfo").context("reading the size of the memory")?;
    if let Some(own) = available(&table).filter(|own| !is_up && *own < memory * GIB) {
        missing.push(format!("{memory} GiB of free memory: {:.1} are free", gib(own)));
    }
    // A later run needs little more than is there.
    let is_first = !profile.images().join("operator.tar").exists();
    let free = free(&root())?;
    if is_first && free < disk * GIB {
        missing.push(format!(
            "{disk} GiB of free disk in {}: {:.1} are free",
            root().display(),
            gib(free)
        ));
    }
    if missing.is_empty() {
        return Ok(());
    }
    bail!("this machine lacks:\n  {}", missing.join("\n  "))
}

fn gib(bytes: u64) -> f64 {
    let mebibytes = u32::try_from(bytes >> 20).unwrap_or(u32::MAX);
    f64::from(mebibytes) / 1024.0
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

fn free(folder: &Path) -> Result<u64> {
    let stat =
        nix::sys::statvfs::statvfs(folder).with_context(|| format!("asking about {}", folder.display()))?;
    Ok(stat.blocks_available() * stat.fragment_size())
}

#[cfg(test)]
mod tests {
    use super::{Needs, available, version};
    use crate::build::Profile;

    #[test]
    fn kernels_and_memory_are_read() {
        assert_eq!(version("6.1.0-13-amd64\n"), Some((6, 1)));
        assert_eq!(version("6.12.9+deb13"), Some((6, 12)));
        assert_eq!(
            available("MemTotal: 9 kB\nMemAvailable:    2048 kB\n"),
            Some(2 << 20)
        );
    }

    #[test]
    fn all_that_is_missing_is_named_at_once() {
        let needs = Needs {
            profile: Profile::Demo,
            disk: 1 << 30,
            memory: 1 << 20,
            kernel: (99, 0),
        };
        let error = super::check(&needs, false).unwrap_err().to_string();
        for what in ["Linux 99.0", "GiB of free memory"] {
            assert!(error.contains(what), "{error}");
        }
    }
}
