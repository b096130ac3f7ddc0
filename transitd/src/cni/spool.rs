//! DELs that the plugin left while transitd was away: one file each, done and removed here.
//!
//! Invariant: a spooled DEL removes only an attachment that was there when the runtime asked for the DEL, not one of
//! the same name that was asked for later. A DEL that is done twice does nothing the second time. A file that the
//! plugin did not write is removed and logged.

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

/// Does all DELs that wait.
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

/// Returns how many DELs wait.
pub fn waiting(node: &Node) -> usize {
    let entries = std::fs::read_dir(node.settings.state_dir.join(DIRECTORY));
    entries.map_or(0, |entries| {
        let paths = entries.flatten().map(|entry| entry.path());
        paths
            .filter(|path| path.extension().is_some_and(|e| e == "del"))
            .count()
    })
}

/// Removes files that killed plugins left half-written: nobody was told that those DELs are done. Runs once at start.
/// A plugin that writes at that moment fails, and its runtime repeats the DEL.
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

/// Does the DEL that waits for this attachment, if any.
pub async fn drain_one(node: &Arc<Node>, id: &AttachmentId) {
    let path = file(node, id);
    if !path.exists() {
        return;
    }
    let _lock = node.lock(id).await;
    // The file is read only now: until here another task may have done the DEL.
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

/// Removes the file. A DEL that is done again after a crash does no harm, so the directory needs no sync.
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
