//! A file that only this boot of this node believes: a line with the checksum, then JSON. It needs no sync, because
//! nothing in it holds after another boot.
//!
//! Invariant: if the content cannot be written, the file is removed, so that nobody believes what was true before. A
//! file that is torn, of another boot, of another node or of another form is removed.

use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tracing::warn;

use crate::attachments::hex;
use crate::attachments::store::Owner;

#[derive(Debug)]
pub struct BootFile<T> {
    path: PathBuf,
    owner: Owner,
    /// The text that the file holds.
    written: Mutex<Option<String>>,
    content: PhantomData<fn(T) -> T>,
}

#[derive(Serialize, Deserialize)]
struct Document<T> {
    node: String,
    boot_id: String,
    #[serde(flatten)]
    content: T,
}

impl<T: Serialize + DeserializeOwned> BootFile<T> {
    pub fn new(path: PathBuf, owner: Owner) -> Self {
        Self {
            path,
            owner,
            written: Mutex::default(),
            content: PhantomData,
        }
    }

    /// Returns what an earlier transitd of this boot kept. A missing file is no failure.
    pub fn load(&self) -> Option<T> {
        let text = std::fs::read_to_string(&self.path).ok()?;
        if let Some(document) = decode::<T>(&text)
            && document.node == self.owner.node
            && document.boot_id == self.owner.boot_id
        {
            return Some(document.content);
        }
        warn!(
            path = %self.path.display(),
            "a file of another boot, node or version, or a torn one: it is not believed"
        );
        self.forget();
        None
    }

    /// Stores what `content` returns, and nothing else. Of two calls at once, the second one calls `content` after the
    /// first one is done.
    pub fn keep(&self, content: impl FnOnce() -> T) {
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let document = Document {
            node: self.owner.node.clone(),
            boot_id: self.owner.boot_id.clone(),
            content: content(),
        };
        let Ok(body) = serde_json::to_string(&document) else {
            *written = None;
            return self.forget();
        };
        if written.as_ref() == Some(&body) {
            return;
        }
        let text = format!("{}\n{body}", hex(&Sha256::digest(&body)));
        let temporary = self.path.with_extension("tmp");
        let done = std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, &self.path));
        if let Err(error) = done {
            warn!(
                path = %self.path.display(),
                error = &error as &dyn std::error::Error,
                "a file is not kept: after a restart transitd knows nothing of it until the operator's rows are here"
            );
            let _ = std::fs::remove_file(&temporary);
            *written = None;
            return self.forget();
        }
        *written = Some(body);
    }

    fn forget(&self) {
        if let Err(error) = std::fs::remove_file(&self.path)
            && error.kind() != std::io::ErrorKind::NotFound
        {
            warn!(
                path = %self.path.display(),
                error = &error as &dyn std::error::Error,
                "a file that is not believed cannot be removed"
            );
        }
    }
}

fn decode<T: DeserializeOwned>(text: &str) -> Option<Document<T>> {
    let (sum, body) = text.split_once('\n')?;
    if hex(&Sha256::digest(body)) != sum {
        return None;
    }
    serde_json::from_str(body).ok()
}
