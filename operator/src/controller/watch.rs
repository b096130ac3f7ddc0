//! One list+watch of a kind: fills its store and hands every change on, re-lists included.

use std::collections::{HashMap, HashSet};

use futures::StreamExt;
use kube::Api;
use kube::runtime::reflector::{ObjectRef, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use tokio::sync::oneshot;
use tracing::warn;

use super::objects::Object;

/// A change of one object, after its store shows it.
pub enum Change<K: Object> {
    Applied(K),
    Gone(ObjectRef<K>),
}

/// Watches until the process ends. A watch that breaks is backed off and taken up again. `filled` is told once all
/// that was there at the start has been handled.
pub async fn watch<K>(
    api: Api<K>,
    mut writer: Writer<K>,
    filled: oneshot::Sender<()>,
    mut handle: impl FnMut(Change<K>),
) where
    K: Object + 'static,
{
    let mut filled = Some(filled);
    let mut known: HashMap<ObjectRef<K>, Option<String>> = HashMap::new();
    let mut listed: Vec<K> = Vec::new();
    let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                warn!(kind = %K::kind(&()), %error, "watch broke, trying again");
                continue;
            }
        };
        writer.apply_watcher_event(&event);
        match event {
            watcher::Event::Init => listed.clear(),
            watcher::Event::InitApply(object) => listed.push(object),
            watcher::Event::InitDone => {
                let now: HashSet<_> = listed.iter().map(ObjectRef::from_obj).collect();
                for gone in known.keys().filter(|reference| !now.contains(*reference)) {
                    handle(Change::Gone(gone.clone()));
                }
                known.retain(|reference, _| now.contains(reference));
                for object in listed.drain(..) {
                    apply(&mut known, object, &mut handle);
                }
                if let Some(filled) = filled.take() {
                    let _ = filled.send(());
                }
            }
            watcher::Event::Apply(object) => apply(&mut known, object, &mut handle),
            watcher::Event::Delete(object) => {
                let reference = ObjectRef::from_obj(&object);
                known.remove(&reference);
                handle(Change::Gone(reference));
            }
        }
    }
}

/// An object made again under its name while the watch was away is another one: the old one went.
fn apply<K: Object>(
    known: &mut HashMap<ObjectRef<K>, Option<String>>,
    object: K,
    handle: &mut impl FnMut(Change<K>),
) {
    let reference = ObjectRef::from_obj(&object);
    let uid = object.meta().uid.clone();
    if known
        .insert(reference.clone(), uid.clone())
        .is_some_and(|old| old != uid)
    {
        handle(Change::Gone(reference));
    }
    handle(Change::Applied(object));
}
