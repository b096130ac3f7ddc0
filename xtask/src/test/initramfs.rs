//! The root of a virtual machine: programs with their libraries, in an archive that the kernel unpacks into memory.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};

use crate::images::libraries;

/// A folder that becomes the root. Paths of its methods are the virtual machine's.
#[derive(Debug)]
pub struct Root(PathBuf);

impl Root {
    /// Begins with an empty folder.
    pub fn new(folder: PathBuf) -> Result<Self> {
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
        Ok(Self(folder))
    }

    /// Adds busybox and the folders that file systems are mounted on.
    pub fn add_base(&self) -> Result<()> {
        for mount_point in ["/proc", "/sys", "/dev", "/run", "/tmp"] {
            self.folder(mount_point)?;
        }
        self.program(Path::new("/bin/busybox"), "/bin/busybox")
    }

    /// Adds a folder, with those that it is in.
    pub fn folder(&self, path: &str) -> Result<()> {
        let folder = self.place(path);
        fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))
    }

    /// Adds a file that may be run.
    pub fn file(&self, path: &str, content: &[u8]) -> Result<()> {
        let file = self.place(path);
        fs::create_dir_all(file.parent().unwrap_or(&self.0))
            .and_then(|()| fs::write(&file, content))
            .and_then(|()| fs::set_permissions(&file, Permissions::from_mode(0o755)))
            .with_context(|| format!("writing {}", file.display()))
    }

    /// Adds a file of this machine.
    pub fn copy(&self, from: &Path, to: &str) -> Result<()> {
        let content = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
        self.file(to, &content)
    }

    /// Adds a program of this machine, and the libraries that it loads.
    pub fn program(&self, from: &Path, to: &str) -> Result<()> {
        self.copy(from, to)?;
        for library in libraries(from)? {
            self.copy(Path::new(&library), &library)?;
        }
        Ok(())
    }

    /// Writes the archive, in the only format that the kernel takes.
    pub fn archive(&self, to: &Path) -> Result<()> {
        let output = File::create(to).with_context(|| format!("writing {}", to.display()))?;
        let status = Command::new("sh")
            .args(["-c", "find . | busybox cpio -o -H newc"])
            .current_dir(&self.0)
            .stdout(output)
            .stderr(Stdio::null())
            .status()
            .context("starting busybox")?;
        ensure!(status.success(), "archiving {}: {status}", self.0.display());
        Ok(())
    }

    fn place(&self, path: &str) -> PathBuf {
        self.0.join(path.trim_start_matches('/'))
    }
}
