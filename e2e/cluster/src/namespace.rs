//! Threads in network namespaces.

use std::{os::fd::AsFd, thread};

use anyhow::{Context, Result, anyhow};
use nix::sched::{CloneFlags, setns};

/// Moves the calling thread into a network namespace, for good.
pub fn enter(namespace: impl AsFd) -> Result<()> {
    setns(namespace, CloneFlags::CLONE_NEWNET).context("setns")
}

/// Runs `work` on a thread of its own in a network namespace.
pub fn inside<T: Send>(namespace: impl AsFd + Send, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(move || {
            enter(namespace)?;
            work()
        });
        thread
            .join()
            .map_err(|_| anyhow!("a thread in a network namespace panicked"))?
    })
}
