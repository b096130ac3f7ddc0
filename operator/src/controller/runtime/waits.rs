//! Remembers what deleted objects wait for, and whether that was reported.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kube::ResourceExt;
use tokio::time::Instant;

use crate::controller::runtime::objects::Object;

/// How long a wait lasts before it is worth a write, because acks take milliseconds. It is also the shortest time
/// between two reports.
pub const CONDITION_DELAY: Duration = Duration::from_secs(5);

/// The waits of objects, by the objects' UIDs.
#[derive(Debug, Default)]
pub struct Waits(Mutex<HashMap<String, Wait>>);

#[derive(Debug)]
struct Wait {
    reason: &'static str,
    since: Instant,
    said: Option<Instant>,
}

impl Waits {
    fn waits(&self) -> MutexGuard<'_, HashMap<String, Wait>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the object has waited for this reason so long, and did not report it a moment ago.
    pub fn is_due(&self, uid: &str, reason: &'static str, patience: Duration) -> bool {
        let fresh = Wait {
            reason,
            since: Instant::now(),
            said: None,
        };
        let mut waits = self.waits();
        let wait = match waits.entry(uid.to_owned()) {
            Entry::Occupied(known) if known.get().reason == reason => known.into_mut(),
            other => other.insert_entry(fresh).into_mut(),
        };
        wait.since.elapsed() >= patience && wait.said.is_none_or(|said| said.elapsed() >= CONDITION_DELAY)
    }

    pub fn said(&self, uid: &str) {
        if let Some(wait) = self.waits().get_mut(uid) {
            wait.said = Some(Instant::now());
        }
    }

    /// Forgets the wait of an object that is gone.
    pub fn end<K: Object>(&self, object: &K) {
        self.waits().remove(&object.uid().unwrap_or_default());
    }
}
