//! Runs the list and watch of a kind: fills its store and passes every change on, including the changes of a new list.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::runtime::reflector::{ObjectRef, store::Writer};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::DefaultBackoff;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use tokio::sync::oneshot;
use tracing::{info, warn};

use crate::controller::runtime::objects::Object;
use crate::controller::runtime::turns::Turns;

/// A change of one object, which its store already shows.
pub enum Change<K: Object> {
    Applied(K),
    /// The object is gone; this is its last known content.
    Gone(Arc<K>),
}

/// Whether the API server has a kind, and lets this operator read it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Serving {
    #[default]
    Expected,
    /// If not, there are no objects of it, until it does.
    Optional,
}

/// Lists that must be forbidden one after the other before the kind counts as one that the operator has no right to: an
/// API server that has just begun knows no rights for some seconds.
const FORBIDDEN_LISTS: u32 = 4;
/// The longest pause before a watch that broke is tried again.
const MAX_PAUSE: Duration = Duration::from_secs(5);

/// Whether the API server does not have the kind, or does not allow this operator to list it. `failed`: how many lists
/// have failed, this one among them.
fn is_not_served(error: &watcher::Error, failed: u32) -> bool {
    let watcher::Error::InitialListFailed(kube::Error::Api(status)) = error else {
        return false;
    };
    status.code == 404 || status.code == 403 && failed >= FORBIDDEN_LISTS
}

/// The pauses before a watch that broke is tried again: kube's, but shorter. Pods wait for an API server that is back,
/// and an operator has few watches.
#[derive(Default)]
struct Pauses(DefaultBackoff);

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(MAX_PAUSE))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.0.reset();
    }
}

/// Watches until the process ends. `strip` sees objects before any other code. A watch that breaks is resumed after a
/// pause. `filled` is signalled once all objects that existed at the start have been handled.
pub async fn watch<K>(
    api: Api<K>,
    serving: Serving,
    mut writer: Writer<K>,
    strip: fn(&mut K),
    filled: oneshot::Sender<()>,
    mut handle: impl FnMut(Change<K>),
) where
    K: Object + 'static,
{
    let mut filled = Some(filled);
    let reader = writer.as_reader();
    let mut listed: Vec<ObjectRef<K>> = Vec::new();
    let mut uids: HashSet<String> = HashSet::new();
    let mut failed = 0;
    let mut is_missing = false;
    let mut events = watcher(api, watcher::Config::default())
        .backoff(Pauses::default())
        .modify(strip)
        .boxed();
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                failed += 1;
                if serving == Serving::Optional && is_not_served(&error, failed) {
                    if let Some(filled) = filled.take() {
                        let kind = K::kind(&());
                        warn!(%kind, %error, "the API server does not serve this kind to the operator: it has no objects");
                        is_missing = true;
                        let _ = filled.send(());
                    }
                    continue;
                }
                warn!(kind = %K::kind(&()), %error, "watch broke, trying again");
                continue;
            }
        };
        match &event {
            watcher::Event::InitDone => {
                if std::mem::take(&mut is_missing) {
                    info!(kind = %K::kind(&()), "the API server serves this kind now");
                }
                let before = reader.state();
                writer.apply_watcher_event(&event);
                // The lists are taken with their capacity, because they are as large as the cluster.
                let uids = std::mem::take(&mut uids);
                let is_gone = |old: &Arc<K>| old.uid().is_none_or(|uid| !uids.contains(&uid));
                let mut turns = Turns::default();
                for gone in before.into_iter().filter(is_gone) {
                    handle(Change::Gone(gone));
                    turns.pass().await;
                }
                for object in std::mem::take(&mut listed) {
                    if let Some(object) = reader.get(&object) {
                        handle(Change::Applied((*object).clone()));
                    }
                    turns.pass().await;
                }
                if let Some(filled) = filled.take() {
                    let _ = filled.send(());
                }
                continue;
            }
            watcher::Event::Init => {
                listed.clear();
                uids.clear();
            }
            // The store gets the objects: a copy of all of them would be the most of the memory.
            watcher::Event::InitApply(object) => {
                listed.push(ObjectRef::from_obj(object));
                uids.extend(object.uid());
            }
            watcher::Event::Apply(_) | watcher::Event::Delete(_) => {}
        }
        // An object that was made again under its name while the watch was away is another object: the old one is gone.
        let old = match &event {
            watcher::Event::Apply(object) => {
                let old = reader.get(&ObjectRef::from_obj(object));
                old.filter(|old| old.uid() != object.uid())
            }
            _ => None,
        };
        writer.apply_watcher_event(&event);
        if let Some(old) = old {
            handle(Change::Gone(old));
        }
        match event {
            watcher::Event::Apply(object) => handle(Change::Applied(object)),
            watcher::Event::Delete(object) => handle(Change::Gone(Arc::new(object))),
            watcher::Event::Init | watcher::Event::InitApply(_) | watcher::Event::InitDone => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn a_kind_is_not_served_if_it_is_unknown_or_stays_forbidden() {
        let failed = |code| {
            let status = Status::failure("no", "").with_code(code);
            watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
        };
        assert!(is_not_served(&failed(404), 1));
        assert!(!is_not_served(&failed(403), FORBIDDEN_LISTS - 1));
        assert!(is_not_served(&failed(403), FORBIDDEN_LISTS));
        assert!(!is_not_served(&failed(500), 100));
        assert!(!is_not_served(&watcher::Error::NoResourceVersion, 100));
    }
}
