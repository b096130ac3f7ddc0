//! One list+watch of a kind: fills its store and hands every change on, re-lists included.

use std::collections::HashSet;

use futures::StreamExt;
use kube::Api;
use kube::runtime::reflector::{ObjectRef, store::Writer};
use kube::runtime::{WatchStreamExt, watcher};
use tracing::warn;

use super::objects::Object;

/// A change of one object, after its store shows it.
pub enum Change<K: Object> {
    Applied(K),
    Gone(ObjectRef<K>),
}

/// Watches until the process ends. A watch that breaks is backed off and taken up again.
pub async fn watch<K>(api: Api<K>, mut writer: Writer<K>, mut handle: impl FnMut(Change<K>))
where
    K: Object + 'static,
{
    let mut known: HashSet<ObjectRef<K>> = HashSet::new();
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
                for gone in known.difference(&now) {
                    handle(Change::Gone(gone.clone()));
                }
                known = now;
                for object in listed.drain(..) {
                    handle(Change::Applied(object));
                }
            }
            watcher::Event::Apply(object) => {
                known.insert(ObjectRef::from_obj(&object));
                handle(Change::Applied(object));
            }
            watcher::Event::Delete(object) => {
                let reference = ObjectRef::from_obj(&object);
                known.remove(&reference);
                handle(Change::Gone(reference));
            }
        }
    }
}
