//! Warnings to people, as events of the objects concerned.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource, ResourceExt};
use tokio::time::Instant;
use tracing::warn;

/// How soon the same warning is told again: Kubernetes forgets events after an hour.
const REPEAT: Duration = Duration::from_mins(10);
/// The longest note in characters: Kubernetes accepts notes of 1,024 bytes.
const LONGEST_NOTE: usize = 1000;

pub struct Warnings {
    client: Client,
    /// By the objects' UIDs and the reasons.
    told: Mutex<HashMap<String, (String, Instant)>>,
}

impl Warnings {
    pub fn new(client: Client) -> Self {
        Self {
            client,
            told: Mutex::default(),
        }
    }

    /// Tells what is wrong with an object, once in a while.
    pub async fn tell<K>(&self, object: &K, reason: &str, note: &str)
    where
        K: Resource<DynamicType = ()>,
    {
        let key = format!("{}/{reason}", object.uid().unwrap_or_default());
        let is_new = {
            let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
            is_new(&mut told, key, note, Instant::now())
        };
        if !is_new {
            return;
        }
        let event = Event {
            type_: EventType::Warning,
            reason: reason.to_owned(),
            note: Some(note.chars().take(LONGEST_NOTE).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        let reporter = Reporter {
            controller: "thuban-lbaasd".to_owned(),
            instance: None,
        };
        // A recorder that has told an event of this reason repeats the former note.
        let recorder = Recorder::new(self.client.clone(), reporter);
        if let Err(error) = recorder.publish(&event, &object.object_ref(&())).await {
            warn!(reason, %error, "event could not be written");
        }
    }
}

/// Notes a warning. Returns whether it is to be told now.
fn is_new(told: &mut HashMap<String, (String, Instant)>, key: String, note: &str, now: Instant) -> bool {
    told.retain(|_, (_, since)| now.duration_since(*since) < REPEAT);
    if told.get(&key).is_some_and(|(known, _)| known == note) {
        return false;
    }
    told.insert(key, (note.to_owned(), now));
    true
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tokio::time::Instant;

    use super::{REPEAT, is_new};

    #[test]
    fn a_warning_is_told_again_if_new_or_after_a_while() {
        let mut told = HashMap::new();
        let now = Instant::now();
        let mut tell = |uid: &str, note, at| is_new(&mut told, uid.to_owned(), note, at);
        assert!(tell("s1", "wrong", now));
        assert!(!tell("s1", "wrong", now + REPEAT / 2));
        assert!(tell("s2", "wrong", now + REPEAT / 2), "another Service");
        assert!(tell("s1", "worse", now + REPEAT / 2));
        assert!(tell("s1", "worse", now + REPEAT * 2));
    }
}
