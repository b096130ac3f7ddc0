//! The operator's part in a pod's trace: from the pod's binding to its Provisioned Endpoint. transitd's part is in the
//! same trace ([`thuban_telemetry::traces`]).
//!
//! Hooks are one call each, and do nothing while traces are off. A pod without a note is not traced: the operator has
//! seen its binding under another leadership, or too many pods wait.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use thuban_api::Endpoint;
use thuban_telemetry::traces::{Span, is_on};

use crate::model::endpoint::{droplet_of, holder_uid, name_of, pod_of};

/// The most pods with a note.
const MAX_PODS: usize = 4096;
/// How long a pod has a note. Pods that get no address would have theirs for ever.
const NOTED: Duration = Duration::from_hours(1);

static PODS: LazyLock<Mutex<Pods>> = LazyLock::new(Mutex::default);

/// Pods that are bound and have no network yet, by the UID that kubelet tells the CNI plugin.
#[derive(Debug, Default)]
struct Pods(HashMap<String, Note>);

#[derive(Clone, Copy, Debug)]
struct Note {
    bound: SystemTime,
    /// When droplets were first sent rows of its Endpoint
    sent: Option<SystemTime>,
}

impl Pods {
    fn bind(&mut self, uid: &str, now: SystemTime) {
        if self.0.contains_key(uid) {
            return;
        }
        if self.0.len() >= MAX_PODS {
            self.0
                .retain(|_, note| now.duration_since(note.bound).is_ok_and(|age| age < NOTED));
        }
        if self.0.len() < MAX_PODS {
            let note = Note {
                bound: now,
                sent: None,
            };
            self.0.insert(uid.to_owned(), note);
        }
    }
}

fn pods() -> MutexGuard<'static, Pods> {
    PODS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Notes that a pod is bound and has no Endpoint.
pub fn binds(uid: &str) {
    if is_on() {
        pods().bind(uid, SystemTime::now());
    }
}

/// Notes that droplets are sent the rows of a pod's Endpoint.
pub fn sends_rows(uid: &str) {
    if is_on()
        && let Some(note) = pods().0.get_mut(uid)
    {
        note.sent.get_or_insert_with(SystemTime::now);
    }
}

/// Begins a span of a pod that is noted. While traces are off, nobody asks for the UID.
pub fn begin<U: AsRef<str>>(uid: impl FnOnce() -> U, name: &'static str) -> Span {
    if !is_on() {
        return Span::none();
    }
    let uid = uid();
    let uid: &str = uid.as_ref();
    if pods().0.contains_key(uid) {
        Span::begin(uid, name)
    } else {
        Span::none()
    }
}

/// Notes that all droplets that an Endpoint waits for have acked its rows.
pub fn acked(endpoint: &Endpoint) {
    if !is_on() {
        return;
    }
    let uid = holder_uid(endpoint);
    let sent = pods().0.get_mut(&uid).and_then(|note| note.sent.take());
    if let Some(sent) = sent {
        Span::begin(&uid, "wait for acks").since(sent).end();
    }
}

/// Notes that an Endpoint is Provisioned: ends the trace's first span.
pub fn provisions(endpoint: &Endpoint) {
    if !is_on() {
        return;
    }
    let uid = holder_uid(endpoint);
    let Some(note) = pods().0.remove(&uid) else {
        return;
    };
    let pod = pod_of(endpoint).map(|pod| pod.name.as_str());
    Span::begin(&uid, "connect pod")
        .root()
        .since(note.bound)
        .with("k8s.namespace.name", &name_of(endpoint).0)
        .with("k8s.pod.name", pod.unwrap_or_default())
        .with("k8s.pod.uid", &uid)
        .with("k8s.node.name", droplet_of(endpoint))
        .with("thuban.network", &endpoint.spec.network)
        .end();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_asks_for_a_uid_while_traces_are_off() {
        let span = begin(|| -> String { panic!("no collector is set") }, "claim addresses");
        span.end();
    }

    #[test]
    fn notes_of_pods_are_bounded_and_the_first_counts() {
        let start = SystemTime::UNIX_EPOCH;
        let mut pods = Pods::default();
        for number in 0..MAX_PODS + 10 {
            pods.bind(&number.to_string(), start);
        }
        assert_eq!(pods.0.len(), MAX_PODS);
        pods.bind("0", start + NOTED / 2);
        assert_eq!(pods.0["0"].bound, start);
        pods.bind("late", start + NOTED / 2);
        assert!(!pods.0.contains_key("late"), "there is no room");
        pods.bind("later", start + NOTED);
        assert_eq!(pods.0.len(), 1, "old notes make room");
    }
}
