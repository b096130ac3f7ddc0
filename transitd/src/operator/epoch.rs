//! The highest epoch of an operator's leadership that this droplet obeyed; kept across restarts.
//!
//! Invariant: an epoch is written to disk before anything of it is applied. The stored epoch never goes down.

use std::path::PathBuf;

use thiserror::Error;

use crate::attachments::store::replace_file;

#[derive(Debug, Error)]
pub enum EpochError {
    #[error("cannot {operation} {path}")]
    Io {
        operation: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path}: expected a decimal number; if the file is damaged, remove it")]
    Decode {
        path: PathBuf,
        source: std::num::ParseIntError,
    },
    #[error("epoch {given} is lower than {highest}: this operator is not the leader any more")]
    Lower { given: u64, highest: u64 },
}

#[derive(Debug)]
pub struct Epoch {
    path: PathBuf,
    highest: u64,
}

impl Epoch {
    pub fn open(path: PathBuf) -> Result<Self, EpochError> {
        let highest = match std::fs::read_to_string(&path) {
            Ok(text) => text.trim().parse().map_err(|source| EpochError::Decode {
                path: path.clone(),
                source,
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => 0,
            Err(source) => {
                return Err(EpochError::Io {
                    operation: "read",
                    path,
                    source,
                });
            }
        };
        Ok(Self { path, highest })
    }

    pub fn highest(&self) -> u64 {
        self.highest
    }

    /// Admits an epoch. Must succeed before a program of that epoch is applied.
    pub fn admit(&mut self, given: u64) -> Result<(), EpochError> {
        if given < self.highest {
            return Err(EpochError::Lower {
                given,
                highest: self.highest,
            });
        }
        if given > self.highest {
            replace_file(&self.path, given.to_string().as_bytes(), 0o600).map_err(|source| {
                EpochError::Io {
                    operation: "write",
                    path: self.path.clone(),
                    source,
                }
            })?;
            self.highest = given;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lower_epoch_is_refused_also_after_a_restart() {
        let path = std::env::temp_dir().join(format!("thuban-epoch-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let mut epoch = Epoch::open(path.clone()).unwrap();
        epoch.admit(3).unwrap();
        epoch.admit(3).unwrap();
        assert!(matches!(
            epoch.admit(2),
            Err(EpochError::Lower { given: 2, highest: 3 })
        ));
        let mut again = Epoch::open(path.clone()).unwrap();
        assert!(again.admit(2).is_err());
        again.admit(4).unwrap();
        std::fs::write(&path, "x").unwrap();
        assert!(matches!(
            Epoch::open(path.clone()),
            Err(EpochError::Decode { .. })
        ));
        std::fs::remove_file(&path).unwrap();
    }
}
