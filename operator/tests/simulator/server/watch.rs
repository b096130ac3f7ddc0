//! An open watch: what its client hears, how late, and when it breaks.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::{Instant, sleep, sleep_until};

use super::{Broken, Connection};
use crate::kind::Kind;
use crate::signal::Signal;
use crate::store::{EventKind, GONE};

/// An open watch.
pub(super) struct Watch {
    pub(super) connection: Connection,
    pub(super) kind: Kind,
    pub(super) version: u64,
    pub(super) changed: Arc<Signal>,
    pub(super) is_stale: bool,
    pub(super) until: Instant,
    pub(super) is_over: bool,
}

impl Watch {
    /// Returns the next lines of events, or the end.
    pub(super) async fn next(&mut self) -> Option<Result<Bytes, Broken>> {
        if self.is_over {
            return None;
        }
        loop {
            self.connection.operator.hears(self.kind).await;
            self.connection.halt_if_dead().await;
            let last = self.changed.get();
            let delay = {
                let state = &mut *self.connection.simulation.lock();
                if self.version < state.store.compacted
                    && !state.store.events_after(self.kind, self.version).is_empty()
                {
                    self.is_over = true;
                    let line = format!("{{\"type\":\"ERROR\",\"object\":{}}}\n", GONE.status());
                    return Some(Ok(line.into()));
                }
                if last > self.version {
                    let is_stale = self.is_stale && !state.is_fair;
                    Some(state.random.millis(0, if is_stale { 8000 } else { 10 }))
                } else {
                    None
                }
            };
            let Some(delay) = delay else {
                tokio::select! {
                    biased;
                    _ = self.changed.other_than(last) => continue,
                    () = sleep_until(self.until) => return None,
                }
            };
            sleep(delay).await;
            self.connection.halt_if_dead().await;
            let state = &mut *self.connection.simulation.lock();
            let chance = state.faults.dropped_watch;
            if state.random.permille(chance) {
                self.is_over = true;
                return state.random.permille(500).then(|| Err("connection reset".into()));
            }
            let mut lines = Vec::new();
            for event in state.store.events_after(self.kind, self.version) {
                lines.extend_from_slice(b"{\"type\":\"");
                lines.extend_from_slice(match event.kind {
                    EventKind::Added => b"ADDED",
                    EventKind::Modified => b"MODIFIED",
                    EventKind::Deleted => b"DELETED",
                });
                lines.extend_from_slice(b"\",\"object\":");
                lines.extend_from_slice(&event.object);
                lines.extend_from_slice(b"}\n");
                self.version = event.version;
            }
            return Some(Ok(lines.into()));
        }
    }
}
