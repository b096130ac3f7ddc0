//! The folder that HAProxy and the speaker share. It has keys of tenants, so it is in memory and root's alone.

use std::collections::BTreeSet;
use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use thiserror::Error;
use thuban_api::proxies::Proxy;

use super::config::{CERTIFICATES, certificate_path};

#[derive(Debug, Error)]
pub enum FolderError {
    #[error("making {}: {source}", path.display())]
    Make { path: PathBuf, source: io::Error },
    #[error("writing {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("encoding what HAProxy serves: {0}")]
    Encode(#[from] serde_json::Error),
}

#[derive(Clone, Debug)]
pub struct Folder(PathBuf);

impl Folder {
    /// Makes what is missing of it. Kubernetes lets every user write into a volume of its own: a worker that was taken
    /// over could replace the configuration, which the master reads as root.
    pub fn new(path: PathBuf) -> Result<Self, FolderError> {
        let certificates = path.join(CERTIFICATES);
        let made = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&certificates)
            .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(0o700)));
        made.map_err(|source| FolderError::Make {
            path: certificates,
            source,
        })?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Returns the configuration that HAProxy reads.
    pub fn config(&self) -> PathBuf {
        self.0.join("haproxy.cfg")
    }

    /// Returns the configuration that is not checked yet.
    pub fn candidate(&self) -> PathBuf {
        self.0.join("candidate.cfg")
    }

    /// Returns the socket of HAProxy's master.
    pub fn socket(&self) -> PathBuf {
        self.0.join("master.sock")
    }

    fn applied(&self) -> PathBuf {
        self.0.join("applied.json")
    }

    /// Writes a file. A reader finds the old content or the new.
    pub fn write(&self, path: &Path, content: &[u8]) -> Result<(), FolderError> {
        let beside = path.with_extension("new");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(0o600);
        let written = options
            .open(&beside)
            .and_then(|mut file| file.write_all(content))
            .and_then(|()| fs::rename(&beside, path));
        written.map_err(|source| FolderError::Write {
            path: path.to_owned(),
            source,
        })
    }

    /// Writes the certificates of Vips.
    pub fn write_certificates(&self, proxies: &[Proxy]) -> Result<(), FolderError> {
        for proxy in proxies {
            if let Some(tls) = &proxy.tls {
                self.write(&certificate_path(proxy, &self.0), tls.pem.text().as_bytes())?;
            }
        }
        Ok(())
    }

    /// Removes the certificates of all other Vips.
    pub fn remove_certificates_but(&self, proxies: &[Proxy]) {
        let known: BTreeSet<PathBuf> = proxies
            .iter()
            .map(|proxy| certificate_path(proxy, &self.0))
            .collect();
        let entries = fs::read_dir(self.0.join(CERTIFICATES)).into_iter().flatten();
        for path in entries.flatten().map(|entry| entry.path()) {
            if !known.contains(&path) {
                // It is tried again with the next reload.
                let _ = fs::remove_file(path);
            }
        }
    }

    /// Keeps the Vips of the configuration for a speaker that starts again.
    pub fn keep_applied(&self, proxies: &[Proxy]) -> Result<(), FolderError> {
        self.write(&self.applied(), &serde_json::to_vec(proxies)?)
    }

    /// Returns the Vips of the configuration that a former speaker wrote, if they are known.
    pub fn read_applied(&self) -> Option<Vec<Proxy>> {
        let content = fs::read(self.applied()).ok()?;
        serde_json::from_slice(&content).ok()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn nobody_else_enters_the_folder() {
        let path = std::env::temp_dir().join(format!("thuban-haproxy-folder-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o777)).unwrap();
        let folder = Folder::new(path.clone()).unwrap();
        folder.write(&folder.config(), b"global\n").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let modes = [&path, &path.join(CERTIFICATES), &folder.config()].map(|path| mode(path));
        fs::remove_dir_all(&path).unwrap();
        assert_eq!(modes, [0o700, 0o700, 0o600]);
    }
}
