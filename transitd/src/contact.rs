//! When this node last heard of the operator, kept for a transitd that starts while the operator is away.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::attachments::store::Owner;
use crate::boot_file::BootFile;

#[derive(Debug)]
pub struct Contact(BootFile<Content>);

#[derive(Debug, Serialize, Deserialize)]
struct Content {
    /// When the operator was heard, nanoseconds since boot.
    heard: u64,
}

impl Contact {
    pub fn new(path: PathBuf, owner: Owner) -> Self {
        Self(BootFile::new(path, owner))
    }

    pub fn load(&self) -> Option<u64> {
        self.0.load().map(|content| content.heard)
    }

    pub fn keep(&self, heard: Option<u64>) {
        if let Some(heard) = heard {
            self.0.keep(|| Content { heard });
        }
    }
}
