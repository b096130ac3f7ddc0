//! Events report each step to people. They are written beside the workflows, in order and one at a time, so that a
//! burst of steps does not keep the API server busy with events.
//!
//! Invariant: no workflow of endpoints or roles waits for an event. Events are lost if the process ends first, or if
//! there are too many to remember: conditions say the same for as long as it is true.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::ObjectMeta;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::{Api, Client, Resource, ResourceExt};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinSet;
use tracing::warn;

use crate::controller::runtime::objects::{Object, WriteError, bounded, create};

/// The most events that may wait to be written.
const MAX_QUEUED: usize = 4096;
/// How many events one recorder writes before a fresh one replaces it. A recorder keeps each event for minutes, to
/// count repetitions instead of writing them.
const REMEMBERED: usize = 256;
/// The longest note in bytes: Kubernetes accepts notes of 1,024 bytes.
const MAX_NOTE: usize = 1000;

const ACTION: &str = "Reconcile";

struct Told {
    event: Event,
    object: ObjectReference,
}

pub struct Events {
    queue: Sender<Told>,
    client: Client,
    reporter: Reporter,
}

impl Events {
    /// Starts a task that writes events.
    pub fn start(client: Client, tasks: &mut JoinSet<()>) -> Self {
        let reporter = Reporter {
            controller: "thuban-operator".into(),
            instance: std::env::var("POD_NAME").ok(),
        };
        let (sender, receiver) = channel(MAX_QUEUED);
        tasks.spawn(publish(client.clone(), reporter.clone(), receiver));
        Self {
            queue: sender,
            client,
            reporter,
        }
    }

    /// Reports to people what happened to an object.
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
        self.tell(object, None, (is_warning, ACTION), reason, note);
    }

    /// Writes a warning about an action. Warnings that differ in it are told apart, and others of the same reason are
    /// counted.
    pub fn warn_of<K: Resource<DynamicType = ()>>(&self, object: &K, action: &str, reason: &str, note: &str) {
        self.warn_about(object.object_ref(&()), action, reason, note);
    }

    /// Does the same.
    pub fn warn_about(&self, object: ObjectReference, action: &str, reason: &str, note: &str) {
        self.tell(object, None, (true, action), reason, note);
    }

    /// Writes an event in which a droplet or a role takes part: events that differ in it are told apart.
    pub fn event_with<K: Resource<DynamicType = ()>>(
        &self,
        object: &K,
        related: ObjectReference,
        reason: &str,
        note: &str,
    ) {
        self.tell(
            object.object_ref(&()),
            Some(related),
            (false, ACTION),
            reason,
            note,
        );
    }

    /// Writes a warning that no other operator and no later leader repeats while the API server remembers it: its name
    /// is `<kind>-<uid>.<key>` in lower case, and a name is accepted once. Returns true when this call wrote it, false
    /// when it was already there.
    pub async fn warn_once<K: Object>(
        &self,
        object: &K,
        key: &str,
        reason: &str,
        note: &str,
    ) -> Result<bool, WriteError> {
        let namespace = object.namespace().unwrap_or_else(|| "default".to_owned());
        let uid = object.uid().unwrap_or_default();
        let name = format!("{}-{uid}.{key}", K::kind(&()).to_lowercase());
        let controller = &self.reporter.controller;
        let event = v1::Event {
            metadata: ObjectMeta {
                name: Some(name),
                namespace: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some(ACTION.to_owned()),
            event_time: Some(MicroTime(Timestamp::now())),
            note: Some(note.chars().take(MAX_NOTE).collect()),
            reason: Some(reason.to_owned()),
            regarding: Some(object.object_ref(&())),
            reporting_controller: Some(controller.clone()),
            reporting_instance: Some(self.reporter.instance.as_ref().unwrap_or(controller).clone()),
            type_: Some("Warning".to_owned()),
            ..v1::Event::default()
        };
        match create(&Api::namespaced(self.client.clone(), &namespace), &event).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn tell(
        &self,
        object: ObjectReference,
        secondary: Option<ObjectReference>,
        (is_warning, action): (bool, &str),
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
            note: Some(note.chars().take(MAX_NOTE).collect()),
            action: action.to_owned(),
            secondary,
        };
        if self.queue.try_send(Told { event, object }).is_err() {
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
