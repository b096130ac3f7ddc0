//! Numbers the requests of a node, so that each is higher than all before it, also after a restart or a reboot.
//!
//! A number has the number of the start in its upper bits. That is at least the time in seconds, so that a node whose
//! file was lost begins above requests that may still be under way.

use std::fs::{File, rename};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use thiserror::Error;

const FILE: &str = "generation";
/// Bits of the number that count requests of one start.
const COUNTED: u32 = 24;

#[derive(Debug, Error)]
pub enum SequenceError {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
}

/// The number of the last request.
#[derive(Debug)]
pub struct Sequence {
    folder: PathBuf,
    last: u64,
}

impl Sequence {
    /// Begins above all numbers of earlier starts. The folder must outlive reboots.
    pub fn begin(folder: &Path) -> Result<Self, SequenceError> {
        let path = folder.join(FILE);
        let before: u64 = match std::fs::read_to_string(&path) {
            // lbaasd says how high it must be if the file says nothing.
            Ok(text) => text.trim().parse().unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(source) => return Err(SequenceError::File { path, source }),
        };
        let mut begun = Self {
            folder: folder.to_path_buf(),
            last: 0,
        };
        begun.begin_generation(before.saturating_add(1).max(seconds()))?;
        Ok(begun)
    }

    /// Counts from the beginning of a generation, and keeps its number.
    fn begin_generation(&mut self, generation: u64) -> Result<(), SequenceError> {
        self.last = generation << COUNTED;
        let path = self.folder.join(FILE);
        let beside = path.with_extension("new");
        let write = || {
            let mut file = File::create(&beside)?;
            write!(file, "{generation}")?;
            file.sync_all()?;
            rename(&beside, &path)?;
            File::open(&self.folder)?.sync_all()
        };
        write().map_err(|source| SequenceError::File { path, source })
    }

    /// Begins above another number of this node, which it has forgotten, and above all that came with that.
    pub fn raise(&mut self, known: u64) -> Result<(), SequenceError> {
        if known <= self.last {
            return Ok(());
        }
        self.begin_generation(((known >> COUNTED) + 1).max(seconds()))
    }

    /// Returns the number of a new request.
    pub fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }
}

/// Returns the seconds since 1970.
fn seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::Sequence;

    #[test]
    fn numbers_grow_over_restarts() {
        let folder = std::env::temp_dir().join(format!("sequence-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut last = 0;
        for _ in 0..3 {
            let mut sequence = Sequence::begin(&folder).unwrap();
            for _ in 0..3 {
                let next = sequence.number();
                assert!(next > last);
                last = next;
            }
        }
        std::fs::write(folder.join("generation"), "x").unwrap();
        let mut sequence = Sequence::begin(&folder).unwrap();
        sequence.raise(last).unwrap();
        let raised = sequence.number();
        assert!(raised > last);
        assert!(Sequence::begin(&folder).unwrap().number() > raised);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
