//! One file an attachment: `{"version": 2, "node": …, "sha256": …, "attachment": {…}}`, written to a temporary file,
//! synced, renamed, directory synced. The checksum is of the attachment's text.
//!
//! Invariant: a file under its final name is whole, of this node, and about the attachment that its name says. Any
//! other file is not believed: it is renamed to `<name>.torn` and logged, and neither stops the daemon nor hides
//! another file. An attachment that was made in another boot is gone with that boot, and so is its file. Files of
//! version 1, which had no `version` and no `node`, are written anew when they are read.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::{Attachment, AttachmentId, hex};

/// The version of the files that are written.
const VERSION: u32 = 2;

#[derive(Debug, Error)]
pub enum StoreError {
    #[error("cannot {action} {path}")]
    Io {
        action: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path}: not an attachment file")]
    Decode {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("{path}: version {version}, expected 1 to {VERSION}: a later transitd wrote it")]
    Version { path: PathBuf, version: u32 },
    #[error("{path}: checksum mismatch, the file is torn")]
    Checksum { path: PathBuf },
    #[error("{path}: of node {node}, expected {expected}")]
    Node {
        path: PathBuf,
        node: String,
        expected: String,
    },
    #[error("{path}: its content is of another attachment or interface than its name")]
    Name { path: PathBuf },
    #[error("cannot encode the attachment")]
    Encode(#[source] serde_json::Error),
}

impl StoreError {
    /// Returns the error's reason in one word, for metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Io { .. } => "io",
            Self::Decode { .. } => "decode",
            Self::Version { .. } => "version",
            Self::Checksum { .. } => "checksum",
            Self::Node { .. } => "node",
            Self::Name { .. } => "name",
            Self::Encode(_) => "encode",
        }
    }
}

/// The node and the boot whose files are believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    pub node: String,
    pub boot_id: String,
}

/// The directory of attachment files.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
    owner: Owner,
}

/// The result of reading the files at start.
#[derive(Debug, Default)]
pub struct Loaded {
    pub attachments: Vec<Attachment>,
    /// How many were removed, because the node was booted since.
    pub of_other_boots: usize,
    /// One error for each file that is not believed.
    pub errors: Vec<StoreError>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    #[serde(default = "first")]
    version: u32,
    /// The node; none in version 1.
    #[serde(default)]
    node: Option<String>,
    sha256: String,
    attachment: Box<RawValue>,
}

fn first() -> u32 {
    1
}

impl Store {
    pub fn open(directory: PathBuf, owner: Owner) -> Result<Self, StoreError> {
        fs::create_dir_all(&directory).map_err(io("create", &directory))?;
        Ok(Self { directory, owner })
    }

    /// Loads the files that are whole and of this node and boot, and clears the others away.
    pub fn load(&self) -> Result<Loaded, StoreError> {
        let mut loaded = Loaded::default();
        for path in files(&self.directory)? {
            match path.extension().and_then(|e| e.to_str()) {
                Some("json") => self.take(&path, &mut loaded)?,
                // A crash before the rename left the file: that ADD never succeeded.
                Some("tmp") => fs::remove_file(&path).map_err(io("remove", &path))?,
                _ => {}
            }
        }
        Ok(loaded)
    }

    fn take(&self, path: &Path, loaded: &mut Loaded) -> Result<(), StoreError> {
        match read(path).and_then(|(version, node, attachment)| {
            self.check(path, node)?;
            Ok((version, attachment))
        }) {
            Ok((_, attachment)) if attachment.boot_id != self.owner.boot_id => {
                // Nothing of it outlived the reboot, and interface indexes start again.
                self.remove(&attachment.id)?;
                loaded.of_other_boots += 1;
            }
            Ok((version, attachment)) => {
                if version != VERSION
                    && let Err(error) = self.write(&attachment)
                {
                    // The file of version 1 is good as it is; a full disk must not cost the pod its network.
                    tracing::warn!(
                        path = %path.display(),
                        error = &error as &dyn std::error::Error,
                        "an attachment file of an earlier version could not be written anew"
                    );
                }
                loaded.attachments.push(attachment);
            }
            Err(error) => {
                if let Err(source) = fs::rename(path, path.with_extension("torn")) {
                    let path = path.to_owned();
                    loaded.errors.push(StoreError::Io {
                        action: "put aside",
                        path,
                        source,
                    });
                }
                loaded.errors.push(error);
            }
        }
        Ok(())
    }

    fn check(&self, path: &Path, node: Option<String>) -> Result<(), StoreError> {
        match node {
            Some(node) if node != self.owner.node => Err(StoreError::Node {
                path: path.to_owned(),
                node,
                expected: self.owner.node.clone(),
            }),
            _ => Ok(()),
        }
    }

    pub fn write(&self, attachment: &Attachment) -> Result<(), StoreError> {
        let body = serde_json::to_string(attachment).map_err(StoreError::Encode)?;
        let sha256 = hex(&Sha256::digest(&body));
        let document = Document {
            version: VERSION,
            node: Some(self.owner.node.clone()),
            sha256,
            attachment: RawValue::from_string(body).map_err(StoreError::Encode)?,
        };
        let text = serde_json::to_string(&document).map_err(StoreError::Encode)?;
        let path = self.path(&attachment.id);
        replace_file(&path, text.as_bytes(), 0o600).map_err(io("write", &path))
    }

    /// Removes an attachment's file. A missing file is success.
    pub fn remove(&self, id: &AttachmentId) -> Result<(), StoreError> {
        let path = self.path(id);
        match fs::remove_file(&path) {
            // The removal is not synced: a file that a power cut brings back is of another boot, and not believed.
            Ok(()) => Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(StoreError::Io {
                action: "remove",
                path,
                source,
            }),
        }
    }

    fn path(&self, id: &AttachmentId) -> PathBuf {
        self.directory.join(id.file_name())
    }
}

/// Returns all whole attachments of a directory, of any node and boot. Changes nothing, so it may run beside a daemon.
pub fn observe(directory: &Path) -> Result<Vec<Attachment>, StoreError> {
    let whole = |path: &PathBuf| Some(read(path).ok()?.2);
    Ok(files(directory)?
        .iter()
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .filter_map(whole)
        .collect())
}

fn files(directory: &Path) -> Result<Vec<PathBuf>, StoreError> {
    fs::read_dir(directory)
        .and_then(|entries| entries.map(|entry| Ok(entry?.path())).collect())
        .map_err(io("read", directory))
}

/// Returns the file's version, its node, and its attachment.
fn read(path: &Path) -> Result<(u32, Option<String>, Attachment), StoreError> {
    let decode = |source| StoreError::Decode {
        path: path.to_owned(),
        source,
    };
    let text = fs::read(path).map_err(io("read", path))?;
    let document: Document = serde_json::from_slice(&text).map_err(decode)?;
    let path = || path.to_owned();
    if !(1..=VERSION).contains(&document.version) {
        let version = document.version;
        return Err(StoreError::Version {
            path: path(),
            version,
        });
    }
    if hex(&Sha256::digest(document.attachment.get())) != document.sha256 {
        return Err(StoreError::Checksum { path: path() });
    }
    let attachment: Attachment = serde_json::from_str(document.attachment.get()).map_err(decode)?;
    let valid =
        attachment.is_host() || AttachmentId::new(&attachment.id.container_id, &attachment.id.ifname).is_ok();
    let is_named = path().file_name().and_then(|name| name.to_str()) == Some(&attachment.id.file_name());
    if !valid || !is_named || attachment.host_interface != attachment.id.host_interface() {
        return Err(StoreError::Name { path: path() });
    }
    Ok((document.version, document.node, attachment))
}

fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> StoreError + use<'a> {
    move |source| StoreError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Writes a file so that readers, also after a crash, see the old content or the new one. A failure leaves nothing.
pub fn replace_file(path: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let _ = fs::remove_file(&temporary);
    let written = create(&temporary, content, mode).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written?;
    path.parent().map_or(Ok(()), sync_directory)
}

fn create(path: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

fn sync_directory(directory: &Path) -> std::io::Result<()> {
    File::open(directory)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::super::tests::attachment;
    use super::*;

    struct Directory(PathBuf);
    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("thuban-store-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Self(path)
        }
        fn store(&self) -> Store {
            let owner = Owner {
                node: "node-a".into(),
                boot_id: "boot".into(),
            };
            Store::open(self.0.clone(), owner).unwrap()
        }
    }
    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_is_written_is_loaded_and_what_is_removed_is_gone() {
        let directory = Directory::new("roundtrip");
        let store = directory.store();
        store.write(&attachment("a", 1)).unwrap();
        store.write(&attachment("b", 2)).unwrap();
        store.remove(&attachment("b", 2).id).unwrap();
        store.remove(&attachment("b", 2).id).unwrap();
        let loaded = store.load().unwrap();
        assert_eq!(
            (loaded.attachments, loaded.errors.len()),
            (vec![attachment("a", 1)], 0)
        );
        assert_eq!(loaded.of_other_boots, 0);
    }

    #[test]
    fn invalid_file_is_named_and_put_aside_and_hides_no_other() {
        let directory = Directory::new("torn");
        let store = directory.store();
        store.write(&attachment("a", 1)).unwrap();
        store.write(&attachment("b", 2)).unwrap();
        let path = directory.0.join("b_eth0.json");
        let whole = fs::read_to_string(&path).unwrap();
        let other = fs::read_to_string(directory.0.join("a_eth0.json")).unwrap();
        for (content, reason) in [
            (whole[..whole.len() / 2].to_owned(), "decode"),
            (String::new(), "decode"),
            (whole.replace("10.0.1.5", "10.0.1.6"), "checksum"),
            (whole.replace(r#""version":2"#, r#""version":3"#), "version"),
            (whole.replace(r#""version":2"#, r#""version":0"#), "version"),
            (whole.replace("node-a", "node-b"), "node"),
            (other, "name"),
        ] {
            fs::write(&path, content).unwrap();
            let loaded = store.load().unwrap();
            assert_eq!(loaded.attachments, vec![attachment("a", 1)], "{reason}");
            let [error] = &loaded.errors[..] else {
                panic!("{reason}: {:?}", loaded.errors)
            };
            assert_eq!(error.reason(), reason);
            assert!(error.to_string().contains("b_eth0.json"), "{error}");
            assert!(directory.0.join("b_eth0.torn").exists() && !path.exists());
        }
    }

    #[test]
    fn a_bit_that_flips_is_seen_or_changes_nothing() {
        let directory = Directory::new("bits");
        let store = directory.store();
        store.write(&attachment("a", 1)).unwrap();
        let path = directory.0.join("a_eth0.json");
        let whole = fs::read(&path).unwrap();
        for bit in (0..whole.len() * 8).step_by(3) {
            let mut content = whole.clone();
            content[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, content).unwrap();
            let loaded = store.load().unwrap();
            let is_same = loaded.attachments == vec![attachment("a", 1)];
            assert!(
                is_same || (loaded.attachments.is_empty() && loaded.errors.len() == 1),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn after_another_boot_nothing_is_believed_and_the_files_go() {
        let directory = Directory::new("boot");
        let mut store = directory.store();
        store.write(&attachment("a", 1)).unwrap();
        store.owner.boot_id = "another".into();
        let loaded = store.load().unwrap();
        assert_eq!(
            (
                loaded.attachments.len(),
                loaded.of_other_boots,
                loaded.errors.len()
            ),
            (0, 1, 0)
        );
        assert_eq!(fs::read_dir(&directory.0).unwrap().count(), 0);
    }

    #[test]
    fn a_file_of_the_first_version_is_read_and_written_anew() {
        let directory = Directory::new("version");
        let store = directory.store();
        store.write(&attachment("a", 1)).unwrap();
        let path = directory.0.join("a_eth0.json");
        let new = fs::read_to_string(&path).unwrap();
        let old = new.replace(r#""version":2,"node":"node-a","#, "");
        assert_ne!(old, new);
        fs::write(&path, old).unwrap();
        assert_eq!(observe(&directory.0).unwrap().len(), 1);
        assert_ne!(
            fs::read_to_string(&path).unwrap(),
            new,
            "who observes changes nothing"
        );
        assert_eq!(store.load().unwrap().attachments, vec![attachment("a", 1)]);
        assert_eq!(fs::read_to_string(&path).unwrap(), new);
    }
}
