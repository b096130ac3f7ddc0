//! Folders and mounts of a node; they are removed with their owner.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context, Result};
use nix::mount::{MntFlags, MsFlags, mount, umount2};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A folder on a disk, like `/var/lib` of a node. No two folders of a process have the same path: nodes may run side by
/// side.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn new(word: &str) -> Result<Self> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("thuban-bench-{}-{number}-{word}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).with_context(|| format!("making {}", path.display()))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}

/// A bpffs for one owner.
#[derive(Debug)]
pub struct Bpffs(PathBuf);

impl Bpffs {
    pub fn new(path: PathBuf) -> Result<Self> {
        mount(Some("bpf"), &path, Some("bpf"), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mounting a bpffs at {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Bpffs {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("{}: {error}", self.0.display());
        }
    }
}
