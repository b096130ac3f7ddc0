//! DELs that the plugin left while transitd was away: one file each, done and removed here.
//!
//! Invariant: a spooled DEL takes apart only what was there when the runtime asked for it: not an attachment of the same
//! name that was asked for later. Done twice it does nothing. A file that is none of the plugin's is removed and named.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message;
use thuban_proto::cni::SpooledDel;
use tracing::{info, warn};

use super::del;
use crate::attachments::AttachmentId;
use crate::metrics::{self, Reclaimed};
use crate::node::Node;

/// The name of the spool in the state directory.
pub const DIRECTORY: &str = "spool";

/// All that wait.
pub async fn drain(node: &Arc<Node>) {
    let directory = node.settings.state_dir.join(DIRECTORY);
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) => {
            if error.kind() != std::io::ErrorKind::NotFound {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "spooled DELs cannot be read"
                );
            }
            return;
        }
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "del") {
            let id = read(&path).and_then(|del| AttachmentId::new(&del.container_id, &del.ifname).ok());
            match id {
                Some(id) if file(node, &id) == path => drain_one(node, &id).await,
                _ if path.exists() => {
                    warn!(path = %path.display(), "not a spooled DEL, it is removed");
                    remove(&path);
                }
                _ => {}
            }
        }
    }
}

/// How many wait.
pub fn waiting(node: &Node) -> usize {
    let entries = std::fs::read_dir(node.settings.state_dir.join(DIRECTORY));
    entries.map_or(0, |entries| {
        let paths = entries.flatten().map(|entry| entry.path());
        paths
            .filter(|path| path.extension().is_some_and(|e| e == "del"))
            .count()
    })
}

/// Removes what plugins that were killed left half-written: nobody was told that those DELs are done. Once at start: a
/// plugin that writes just then fails, and its runtime repeats the DEL.
pub fn sweep(node: &Node) {
    let Ok(entries) = std::fs::read_dir(node.settings.state_dir.join(DIRECTORY)) else {
        return;
    };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "tmp") {
            remove(&path);
        }
    }
}

/// The one that waits for this attachment, if any.
pub async fn drain_one(node: &Arc<Node>, id: &AttachmentId) {
    let path = file(node, id);
    if !path.exists() {
        return;
    }
    let _lock = node.lock(id).await;
    // Only now: until here another one may have done it.
    let Some(del) = read(&path) else { return };
    let held = node.state().attachments.get(id).map(|held| held.asked_at);
    if del.boot_id == node.boot_id && held.is_none_or(|added_at| added_at <= del.asked_at) {
        if let Err(error) = del::remove_locked(node, id).await {
            warn!(
                container_id = id.container_id,
                error = &error as &dyn std::error::Error,
                "a spooled DEL failed, it is tried again"
            );
            return;
        }
        metrics::reclaims(Reclaimed::SpooledDel, 1);
        info!(container_id = id.container_id, "spooled DEL done");
    } else {
        info!(
            container_id = id.container_id,
            "a spooled DEL is older than what there is now"
        );
    }
    remove(&path);
}

fn file(node: &Node, id: &AttachmentId) -> PathBuf {
    let name = format!("{}_{}.del", id.container_id, id.ifname);
    node.settings.state_dir.join(DIRECTORY).join(name)
}

/// Done again after a crash it does no harm, so the directory needs no sync.
fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        warn!(
            path = %path.display(),
            error = &error as &dyn std::error::Error,
            "a spooled DEL's file cannot be removed"
        );
    }
}

fn read(path: &Path) -> Option<SpooledDel> {
    SpooledDel::decode(&*std::fs::read(path).ok()?).ok()
}
