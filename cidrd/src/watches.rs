//! Stores of objects that watches keep current.

use std::fmt::Debug;
use std::pin::pin;

use futures::{Stream, StreamExt, TryStreamExt, stream};
use kube::runtime::reflector::{Store, store};
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt, reflector, watcher};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tracing::warn;

/// The tasks of watches: none ends.
pub type Watches = JoinSet<()>;

/// Watches a kind, and returns the store of its objects.
pub fn watched<K>(api: Api<K>, watches: &mut Watches) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    watched_by(api, watches, &watch::Sender::new(0))
}

/// Does the same, and raises a number at each change.
pub fn watched_by<K>(api: Api<K>, watches: &mut Watches, changes: &watch::Sender<u64>) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    watched_with(api, watcher::Config::default(), watches, changes)
}

/// Does the same for the objects that the configuration selects.
pub fn watched_with<K>(
    api: Api<K>,
    config: watcher::Config,
    watches: &mut Watches,
    changes: &watch::Sender<u64>,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let (reader, writer) = store();
    let events = watcher(api, config).default_backoff();
    watches.spawn(follow(reflector(writer, events), changes.clone()));
    reader
}

/// Returns the objects that the events of a watch bring, deleted ones too. A list comes when it has ended: a store that
/// the watch fills has the objects of a list only then.
pub fn stored<K>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
) -> impl Stream<Item = watcher::Result<K>> {
    let mut listed = Vec::new();
    let objects = events.map_ok(move |event| {
        let objects = match event {
            Event::Apply(object) | Event::Delete(object) => vec![object],
            Event::Init => {
                listed.clear();
                Vec::new()
            }
            Event::InitApply(object) => {
                listed.push(object);
                Vec::new()
            }
            Event::InitDone => std::mem::take(&mut listed),
        };
        stream::iter(objects.into_iter().map(Ok::<K, watcher::Error>))
    });
    objects.try_flatten()
}

async fn follow<T>(events: impl Stream<Item = Result<T, watcher::Error>>, changes: watch::Sender<u64>) {
    let mut events = pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(_) => changes.send_modify(|number| *number += 1),
            Err(error) => warn!(%error, "watch broke, trying again"),
        }
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::ResourceExt;

    use super::*;

    #[tokio::test]
    async fn an_object_comes_once_the_store_has_it() {
        let object = |name: &str, value: &str| {
            let mut object = ConfigMap::default();
            object.metadata.name = Some(name.to_owned());
            object.data = Some([("value".to_owned(), value.to_owned())].into());
            object
        };
        let list = |value: &str| {
            [
                Event::Init,
                Event::InitApply(object("a", value)),
                Event::InitApply(object("b", value)),
                Event::InitDone,
            ]
        };
        let later = [Event::Apply(object("c", "2")), Event::Delete(object("a", "2"))];
        let events = list("1").into_iter().chain(list("2")).chain(later);
        let (reader, writer) = store();
        let events = stream::iter(events.map(Ok::<_, watcher::Error>)).reflect(writer);
        let mut objects = pin!(stored(events));
        let mut come = Vec::new();
        while let Some(object) = objects.next().await {
            let object = object.unwrap();
            let known = reader.find(|known| known.name_any() == object.name_any());
            assert_eq!(known.is_some(), come.len() < 5, "only the last event is an end");
            if let Some(known) = known {
                assert_eq!(*known, object);
            }
            come.push(object.name_any());
        }
        assert_eq!(come, ["a", "b", "a", "b", "c", "a"]);
    }
}
