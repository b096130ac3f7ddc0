//! Stores of objects that watches keep current.

use std::fmt::Debug;
use std::pin::pin;

use futures::{Stream, StreamExt};
use kube::runtime::reflector::{Store, store};
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

async fn follow<T>(events: impl Stream<Item = Result<T, watcher::Error>>, changes: watch::Sender<u64>) {
    let mut events = pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(_) => changes.send_modify(|number| *number += 1),
            Err(error) => warn!(%error, "watch broke, trying again"),
        }
    }
}
