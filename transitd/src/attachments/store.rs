//! One file an attachment: `{"sha256": …, "attachment": {…}}`, written to a temporary file, synced, renamed, directory synced.
//!
//! Invariant: a file under its final name is whole or its checksum says that it is not. A torn file is put aside
//! under `<name>.torn` and named in the log; it never stops the daemon.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::{Attachment, AttachmentId, hex};

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
    #[error("{path}: checksum mismatch, the file is torn")]
    Checksum { path: PathBuf },
    #[error("cannot encode the attachment")]
    Encode(#[source] serde_json::Error),
}

/// The directory of attachment files.
#[derive(Clone, Debug)]
pub struct Store {
    directory: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct Document {
    sha256: String,
    attachment: Box<RawValue>,
}

impl Store {
    pub fn open(directory: PathBuf) -> Result<Self, StoreError> {
        fs::create_dir_all(&directory).map_err(io("create", &directory))?;
        Ok(Self { directory })
    }

    /// All whole attachments, and an error for each file that is not one.
    pub fn load(&self) -> Result<(Vec<Attachment>, Vec<StoreError>), StoreError> {
        let (mut attachments, mut errors) = (Vec::new(), Vec::new());
        for entry in fs::read_dir(&self.directory).map_err(io("read", &self.directory))? {
            let path = entry.map_err(io("read", &self.directory))?.path();
            match path.extension().and_then(|e| e.to_str()) {
                Some("json") => match read(&path) {
                    Ok(attachment) => attachments.push(attachment),
                    Err(error) => {
                        let aside = path.with_extension("torn");
                        if let Err(source) = fs::rename(&path, &aside) {
                            errors.push(StoreError::Io {
                                action: "put aside",
                                path: path.clone(),
                                source,
                            });
                        }
                        errors.push(error);
                    }
                },
                // Left by a crash before the rename: that ADD never succeeded.
                Some("tmp") => fs::remove_file(&path).map_err(io("remove", &path))?,
                _ => {}
            }
        }
        Ok((attachments, errors))
    }

    pub fn write(&self, attachment: &Attachment) -> Result<(), StoreError> {
        let body = serde_json::to_string(attachment).map_err(StoreError::Encode)?;
        let sha256 = hex(&Sha256::digest(&body));
        let document = Document {
            sha256,
            attachment: RawValue::from_string(body).map_err(StoreError::Encode)?,
        };
        let text = serde_json::to_string(&document).map_err(StoreError::Encode)?;
        let path = self.path(&attachment.id);
        replace_file(&path, text.as_bytes(), 0o600).map_err(io("write", &path))
    }

    /// Removing what is not there is success.
    pub fn remove(&self, id: &AttachmentId) -> Result<(), StoreError> {
        let path = self.path(id);
        match fs::remove_file(&path) {
            // Not synced: a file that a power cut brings back is of another boot, and believed no more.
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

fn read(path: &Path) -> Result<Attachment, StoreError> {
    let decode = |source| StoreError::Decode {
        path: path.to_owned(),
        source,
    };
    let text = fs::read(path).map_err(io("read", path))?;
    let document: Document = serde_json::from_slice(&text).map_err(decode)?;
    if hex(&Sha256::digest(document.attachment.get())) != document.sha256 {
        return Err(StoreError::Checksum {
            path: path.to_owned(),
        });
    }
    serde_json::from_str(document.attachment.get()).map_err(decode)
}

fn io<'a>(action: &'static str, path: &'a Path) -> impl FnOnce(std::io::Error) -> StoreError + use<'a> {
    move |source| StoreError::Io {
        action,
        path: path.to_owned(),
        source,
    }
}

/// Writes a file so that readers, also after a crash, see the old content or the new one.
pub fn replace_file(path: &Path, content: &[u8], mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let _ = fs::remove_file(&temporary);
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    drop(file);
    fs::rename(&temporary, path)?;
    path.parent().map_or(Ok(()), sync_directory)
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
    }
    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_is_written_is_loaded_and_what_is_removed_is_gone() {
        let directory = Directory::new("roundtrip");
        let store = Store::open(directory.0.clone()).unwrap();
        store.write(&attachment("a", 1)).unwrap();
        store.write(&attachment("b", 2)).unwrap();
        store.remove(&attachment("b", 2).id).unwrap();
        store.remove(&attachment("b", 2).id).unwrap();
        let (loaded, errors) = store.load().unwrap();
        assert_eq!((loaded, errors.len()), (vec![attachment("a", 1)], 0));
    }

    #[test]
    fn a_torn_file_is_named_put_aside_and_does_not_hide_the_others() {
        let directory = Directory::new("torn");
        let store = Store::open(directory.0.clone()).unwrap();
        store.write(&attachment("a", 1)).unwrap();
        store.write(&attachment("b", 2)).unwrap();
        let path = directory.0.join("b_eth0.json");
        let whole = fs::read(&path).unwrap();
        for (content, torn) in [(&whole[..whole.len() / 2], "cut"), (b"".as_slice(), "empty")] {
            fs::write(&path, content).unwrap();
            let (loaded, errors) = store.load().unwrap();
            assert_eq!(loaded, vec![attachment("a", 1)], "{torn}");
            assert!(errors[0].to_string().contains("b_eth0.json"), "{errors:?}");
        }
        fs::write(
            &path,
            String::from_utf8(whole).unwrap().replace("10.0.1.5", "10.0.1.6"),
        )
        .unwrap();
        let (loaded, errors) = store.load().unwrap();
        assert_eq!(loaded.len(), 1);
        assert!(matches!(&errors[..], [StoreError::Checksum { .. }]), "{errors:?}");
        assert!(directory.0.join("b_eth0.torn").exists() && !path.exists());
    }
}
