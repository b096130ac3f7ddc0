//! Stores DELs that transitd was not there for: one file each. transitd does them when it is back.
//!
//! Invariant: a DEL that was reported as done is either done or in a synced file under its final name. A repeated DEL
//! replaces its file. There are never more than [`MAXIMUM`] files.

use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use prost::Message;
use thuban_proto::cni::{DelRequest, SpooledDel};

use crate::clock;
use crate::error::PluginError;
use crate::file;

/// The most DELs that wait: many times the pods of a node.
const MAXIMUM: usize = 1024;

/// Stores a DEL. `asked_at`: when the runtime asked, so that a later ADD of the same attachment is not undone.
pub fn keep(directory: &Path, request: DelRequest, asked_at: std::time::Duration) -> Result<(), PluginError> {
    let failed = |action, path: &Path| {
        let path = path.to_owned();
        move |source| PluginError::Spool { action, path, source }
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
        .map_err(failed("make", directory))?;
    let path = directory.join(format!("{}_{}.del", request.container_id, request.ifname));
    if !path.exists() {
        let count = fs::read_dir(directory)
            .map_err(failed("read", directory))?
            .count();
        if count >= MAXIMUM {
            return Err(PluginError::SpoolFull {
                count,
                path: directory.to_owned(),
            });
        }
    }
    let DelRequest {
        container_id,
        netns,
        ifname,
    } = request;
    let del = SpooledDel {
        container_id,
        ifname,
        netns,
        boot_id: clock::boot_id(),
        asked_at: asked_at.as_nanos() as u64,
    };
    file::replace(&path, &del.encode_to_vec()).map_err(failed("write", &path))
}
