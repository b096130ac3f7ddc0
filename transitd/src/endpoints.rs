//! The endpoints that the operator placed on this droplet, kept in a file for a transitd that starts while the operator is
//! away: it can serve the ADDs of their pods.
//!
//! Invariant: before the removal of an endpoint is acknowledged the file is without it, for then its address may be given to
//! somebody else. The file needs no sync, because only a restart within the same boot believes it; one that is torn, of
//! another boot or of another node is removed.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use thuban_proto::transit::{Program, row, row_key};
use thuban_rows::LocalEndpoint;
use tracing::warn;

use crate::attachments::hex;
use crate::attachments::store::Owner;

#[derive(Debug)]
pub struct Endpoints {
    path: PathBuf,
    owner: Owner,
    /// What the file holds.
    written: Mutex<Option<String>>,
}

#[derive(Serialize, Deserialize)]
struct Document {
    node: String,
    boot_id: String,
    endpoints: Vec<LocalEndpoint>,
}

/// Whether a message may change endpoints of this droplet.
pub fn concern(program: &Program) -> bool {
    let upserts = program.upserts.iter().filter_map(|row| row.row.as_ref());
    let deletes = program.deletes.iter().filter_map(|key| key.key.as_ref());
    program.snapshot
        || upserts.into_iter().any(|row| matches!(row, row::Row::Local(_)))
        || deletes
            .into_iter()
            .any(|key| matches!(key, row_key::Key::Local(_)))
}

impl Endpoints {
    pub fn new(path: PathBuf, owner: Owner) -> Self {
        Self {
            path,
            owner,
            written: Mutex::default(),
        }
    }

    /// What an earlier transitd of this boot kept; nothing is no failure.
    pub fn load(&self) -> Vec<LocalEndpoint> {
        let Ok(text) = std::fs::read_to_string(&self.path) else {
            return Vec::new();
        };
        if let Some(document) = decode(&text)
            && document.node == self.owner.node
            && document.boot_id == self.owner.boot_id
        {
            return document.endpoints;
        }
        warn!(
            path = %self.path.display(),
            "endpoints of another boot or node, or a torn file of them: it is not believed"
        );
        self.forget();
        Vec::new()
    }

    /// Keeps these and no others. What cannot be written is not kept.
    pub fn keep<'a>(&self, endpoints: impl Iterator<Item = &'a LocalEndpoint>) {
        let document = Document {
            node: self.owner.node.clone(),
            boot_id: self.owner.boot_id.clone(),
            endpoints: endpoints.cloned().collect(),
        };
        let Ok(body) = serde_json::to_string(&document) else {
            return self.forget();
        };
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        if written.as_ref() == Some(&body) {
            return;
        }
        let text = format!("{}\n{body}", hex(&Sha256::digest(&body)));
        let temporary = self.path.with_extension("tmp");
        let done = std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, &self.path));
        if let Err(error) = done {
            warn!(
                error = &error as &dyn std::error::Error,
                "endpoints are not kept: without the operator a restart would serve no ADD"
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
                "a file of endpoints that are not believed cannot be removed"
            );
        }
    }
}

fn decode(text: &str) -> Option<Document> {
    let (sum, body) = text.split_once('\n')?;
    if hex(&Sha256::digest(body)) != sum {
        return None;
    }
    serde_json::from_str(body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(node: &str, boot_id: &str) -> Owner {
        let (node, boot_id) = (node.into(), boot_id.into());
        Owner { node, boot_id }
    }

    fn endpoint(pod: &str) -> LocalEndpoint {
        LocalEndpoint {
            pod_uid: pod.into(),
            ..thuban_rows::builders::local()
        }
    }

    #[test]
    fn endpoints_load_only_if_intact_and_of_same_node_and_boot() {
        let path = std::env::temp_dir().join(format!("thuban-endpoints-{}", std::process::id()));
        let kept = |owner: Owner| Endpoints::new(path.clone(), owner);
        let own = kept(owner("a", "boot"));
        assert_eq!(own.load(), []);
        own.keep([endpoint("p"), endpoint("q")].iter());
        own.keep([endpoint("p")].iter());
        assert_eq!(kept(owner("a", "boot")).load(), [endpoint("p")]);
        let text = std::fs::read_to_string(&path).unwrap();
        for (other, content) in [
            (owner("a", "next"), text.clone()),
            (owner("b", "boot"), text.clone()),
            (owner("a", "boot"), text.replace("10.0.1.5", "10.0.1.6")),
            (owner("a", "boot"), text[..text.len() / 2].to_owned()),
            (owner("a", "boot"), String::new()),
        ] {
            std::fs::write(&path, &content).unwrap();
            assert_eq!(kept(other).load(), [], "{content}");
            assert!(!path.exists());
        }
    }

    #[test]
    fn what_cannot_be_written_is_forgotten() {
        let path = std::env::temp_dir().join(format!("thuban-unwritten-{}", std::process::id()));
        let kept = Endpoints::new(path.clone(), owner("a", "boot"));
        kept.keep([endpoint("p"), endpoint("q")].iter());
        std::fs::create_dir(path.with_extension("tmp")).unwrap();
        kept.keep([endpoint("p")].iter());
        assert!(!path.exists(), "else q would be believed");
        std::fs::remove_dir(path.with_extension("tmp")).unwrap();
        kept.keep([endpoint("p")].iter());
        assert_eq!(kept.load(), [endpoint("p")]);
        std::fs::remove_file(&path).unwrap();
    }
}
