//! Runs work inside a pod's network namespace, on a thread of its own that lives just for the call.
//!
//! Invariant: no tokio worker ever changes its namespace.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::sched::{CloneFlags, setns};
use nix::sys::statfs::fstatfs;

use super::NetlinkError;

/// statfs type of namespace files (linux/magic.h).
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// Opens a pod's network namespace; refuses other files and the node's own namespace.
pub fn open(path: &Path) -> Result<File, NetlinkError> {
    let failed = |source| NetlinkError::Namespace {
        path: path.to_owned(),
        source,
    };
    let file = File::open(path).map_err(failed)?;
    let kind = fstatfs(&file).map_err(|e| failed(e.into()))?.filesystem_type().0;
    let own = std::fs::metadata("/proc/thread-self/ns/net").map_err(failed)?;
    let given = file.metadata().map_err(failed)?;
    if kind != NSFS_MAGIC || (own.ino(), own.dev()) == (given.ino(), given.dev()) {
        return Err(NetlinkError::NotANamespace {
            path: path.to_owned(),
        });
    }
    Ok(file)
}

/// Opens the node's own namespace, where it has an end of a veth as pods have.
pub fn own() -> Result<File, NetlinkError> {
    let path = Path::new("/proc/thread-self/ns/net");
    File::open(path).map_err(|source| NetlinkError::Namespace {
        path: path.to_owned(),
        source,
    })
}

/// Whether the path still is a namespace. A leftover empty file is not one.
pub fn exists(path: &Path) -> bool {
    open(path).is_ok()
}

/// Runs `work` in the namespace, on a new thread with a small runtime.
pub async fn run<T, F>(namespace: File, path: &Path, work: F) -> Result<T, NetlinkError>
where
    T: Send + 'static,
    F: AsyncFnOnce() -> Result<T, NetlinkError> + Send + 'static,
{
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let name = path.to_owned();
    let body = move || {
        let result = enter(&namespace, &name).and_then(|()| {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|source| NetlinkError::Namespace {
                    path: name.clone(),
                    source,
                })?
                .block_on(work())
        });
        // The caller may have gone; the work is done nevertheless.
        let _ = sender.send(result);
    };
    std::thread::Builder::new()
        .name("pod-netns".into())
        .spawn(body)
        .map_err(|source| NetlinkError::Namespace {
            path: path.to_owned(),
            source,
        })?;
    receiver.await.map_err(|_| NetlinkError::Thread {
        path: path.to_owned(),
    })?
}

fn enter(namespace: &File, path: &Path) -> Result<(), NetlinkError> {
    setns(namespace, CloneFlags::CLONE_NEWNET).map_err(|error| NetlinkError::Namespace {
        path: path.to_owned(),
        source: error.into(),
    })
}
