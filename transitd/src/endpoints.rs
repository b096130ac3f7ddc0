//! The endpoints that the operator placed on this droplet, kept in a file for a transitd that starts while the
//! operator is away: it can then serve the ADDs of their pods.
//!
//! Invariant: before the removal of an endpoint is acknowledged, the file is without it, because its address may then
//! be given to another endpoint.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use thuban_proto::transit::{Program, row, row_key};
use thuban_rows::LocalEndpoint;

use crate::attachments::store::Owner;
use crate::boot_file::BootFile;

#[derive(Debug)]
pub struct Endpoints(BootFile<Content>);

#[derive(Debug, Serialize, Deserialize)]
struct Content {
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
        Self(BootFile::new(path, owner))
    }

    /// Returns the endpoints that an earlier transitd of this boot kept.
    pub fn load(&self) -> Vec<LocalEndpoint> {
        self.0.load().map(|content| content.endpoints).unwrap_or_default()
    }

    /// Stores these endpoints and no others.
    pub fn keep(&self, endpoints: Vec<LocalEndpoint>) {
        self.0.keep(|| Content { endpoints });
    }
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
        own.keep(vec![endpoint("p"), endpoint("q")]);
        own.keep(vec![endpoint("p")]);
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
        kept.keep(vec![endpoint("p"), endpoint("q")]);
        std::fs::create_dir(path.with_extension("tmp")).unwrap();
        kept.keep(vec![endpoint("p")]);
        assert!(!path.exists(), "else q would be believed");
        std::fs::remove_dir(path.with_extension("tmp")).unwrap();
        kept.keep(vec![endpoint("p")]);
        assert_eq!(kept.load(), [endpoint("p")]);
        std::fs::remove_file(&path).unwrap();
    }
}
