//! Keeps what was granted in a file, so that a speaker that starts again goes on until the deadlines.
//!
//! Deadlines are by CLOCK_BOOTTIME. So the file of another boot says nothing.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use thiserror::Error;
use tracing::warn;

use crate::decide::Grant;

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const FILE: &str = "speaker.json";

#[derive(Debug, Error)]
pub enum DeadlinesError {
    #[error("reading {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("writing {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("encoding deadlines: {0}")]
    Encode(#[from] serde_json::Error),
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    boot_id: String,
    granted: BTreeMap<IpAddr, Grant>,
}

/// Returns the time since boot, including the time in which the machine slept.
pub fn now() -> Duration {
    // Without a clock, all deadlines are over.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::MAX, Into::into)
}

/// The file.
#[derive(Debug)]
pub struct Deadlines {
    path: PathBuf,
    boot_id: String,
    written: Option<BTreeMap<IpAddr, Grant>>,
}

impl Deadlines {
    pub fn new(folder: &Path) -> Result<Self, DeadlinesError> {
        let boot_id = std::fs::read_to_string(BOOT_ID).map_err(|source| DeadlinesError::Read {
            path: BOOT_ID.into(),
            source,
        })?;
        Ok(Self {
            path: folder.join(FILE),
            boot_id: boot_id.trim().to_owned(),
            written: None,
        })
    }

    /// Returns what was granted in this boot; nothing if that can't be read.
    pub fn read(&self) -> BTreeMap<IpAddr, Grant> {
        let content = match std::fs::read(&self.path) {
            Ok(content) => content,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return BTreeMap::new(),
            Err(error) => {
                warn!(path = %self.path.display(), %error, "deadlines can't be read");
                return BTreeMap::new();
            }
        };
        match serde_json::from_slice::<Content>(&content) {
            Ok(content) if content.boot_id == self.boot_id => content.granted,
            Ok(_) => BTreeMap::new(),
            Err(error) => {
                warn!(path = %self.path.display(), %error, "deadlines can't be read");
                BTreeMap::new()
            }
        }
    }

    /// Writes what is granted, unless it was written last. A reader finds the old content or the new.
    pub fn write(&mut self, granted: &BTreeMap<IpAddr, Grant>) -> Result<(), DeadlinesError> {
        if self.written.as_ref() == Some(granted) {
            return Ok(());
        }
        let content = serde_json::to_vec(&Content {
            boot_id: self.boot_id.clone(),
            granted: granted.clone(),
        })?;
        let beside = self.path.with_extension("new");
        let written = std::fs::write(&beside, content).and_then(|()| std::fs::rename(&beside, &self.path));
        written.map_err(|source| DeadlinesError::Write {
            path: self.path.clone(),
            source,
        })?;
        self.written = Some(granted.clone());
        Ok(())
    }

    /// Whether this process wrote a grant last.
    pub fn has(&self, address: IpAddr, grant: &Grant) -> bool {
        let written = self.written.as_ref();
        written.is_some_and(|written| written.get(&address) == Some(grant))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_counts_in_its_boot_only() {
        let folder = std::env::temp_dir().join(format!("speaker-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut deadlines = Deadlines::new(&folder).unwrap();
        assert_eq!(deadlines.read(), BTreeMap::new());
        let grant = Grant {
            uid: "a".to_owned(),
            deadline: Duration::from_millis(1500),
        };
        let granted = BTreeMap::from([("192.0.2.1".parse().unwrap(), grant)]);
        deadlines.write(&granted).unwrap();
        assert_eq!(deadlines.read(), granted);
        deadlines.boot_id = "another".to_owned();
        assert_eq!(deadlines.read(), BTreeMap::new());
        std::fs::write(folder.join(FILE), "{").unwrap();
        assert_eq!(deadlines.read(), BTreeMap::new());
        std::fs::remove_dir_all(folder).unwrap();
    }
}
