//! Events tell a person each step. They are written beside the workflows, in order and one at a time, so that a burst of
//! steps does not have the API server busy with telling of them.
//!
//! Invariant: no workflow waits for an event. What is not told when this process ends, or is too much to remember, stays
//! untold: conditions say the same for as long as it is true.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Client, Resource};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinSet;
use tracing::warn;

use super::objects::bounded;

/// Events that may wait to be written.
const MOST: usize = 4096;
/// A recorder keeps each event for minutes, to count repetitions instead of writing them: after so many, a fresh one.
const REMEMBERED: usize = 256;
/// Kubernetes takes notes of 1,024 bytes.
const LONGEST_NOTE: usize = 1000;

struct Told {
    event: Event,
    object: ObjectReference,
}

pub struct Events(Sender<Told>);

impl Events {
    /// Writes events by a task of its own.
    pub fn start(client: Client, tasks: &mut JoinSet<()>) -> Self {
        let reporter = Reporter {
            controller: "thuban-operator".into(),
            instance: std::env::var("POD_NAME").ok(),
        };
        let (sender, receiver) = channel(MOST);
        tasks.spawn(publish(client, reporter, receiver));
        Self(sender)
    }

    /// Tells people what happened to an object.
    pub fn event<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        is_warning: bool,
        reason: &str,
        note: &str,
    ) {
        self.event_about(object.object_ref(&()), is_warning, reason, note);
    }

    pub fn event_about(&self, object: ObjectReference, is_warning: bool, reason: &str, note: &str) {
        self.tell(object, None, is_warning, reason, note);
    }

    /// An event in which a droplet or a role takes part: events that differ in it are told apart.
    pub fn event_with<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        related: ObjectReference,
        reason: &str,
        note: &str,
    ) {
        self.tell(object.object_ref(&()), Some(related), false, reason, note);
    }

    fn tell(
        &self,
        object: ObjectReference,
        secondary: Option<ObjectReference>,
        is_warning: bool,
        reason: &str,
        note: &str,
    ) {
        let event = Event {
            type_: if is_warning {
                EventType::Warning
            } else {
                EventType::Normal
            },
            reason: reason.to_owned(),
            note: Some(note.chars().take(LONGEST_NOTE).collect()),
            action: "Reconcile".into(),
            secondary,
        };
        if self.0.try_send(Told { event, object }).is_err() {
            warn!(reason, note, "event is not told: too many wait");
        }
    }
}

async fn publish(client: Client, reporter: Reporter, mut told: Receiver<Told>) {
    loop {
        let recorder = Recorder::new(client.clone(), reporter.clone());
        for _ in 0..REMEMBERED {
            let Some(Told { event, object }) = told.recv().await else {
                return;
            };
            if let Err(error) = bounded(recorder.publish(&event, &object)).await {
                warn!(reason = event.reason, %error, "event could not be written");
            }
        }
    }
}
