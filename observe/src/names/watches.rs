//! Watches of all objects that have to do with names. Objects are read and let go: only [`Names`] stay in memory.

use std::collections::HashSet;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock};

use futures::StreamExt;
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde::de::DeserializeOwned;
use thuban_api::{Bouncer, Divider, Droplet, Endpoint, Network, Vpc};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tracing::warn;

use super::Names;
use super::objects::Named;

/// How many kinds are watched.
const KINDS: usize = 6;

/// Names that watches keep current.
pub type SharedNames = Arc<RwLock<Names>>;

/// Watches all kinds. Returns when the objects that there are have been read. None of the tasks ends.
pub async fn watch(client: &Client, names: &SharedNames, tasks: &mut JoinSet<()>) {
    let (listed, mut heard) = mpsc::channel(KINDS);
    tasks.spawn(follow::<Vpc>(client.clone(), names.clone(), listed.clone()));
    tasks.spawn(follow::<Network>(client.clone(), names.clone(), listed.clone()));
    tasks.spawn(follow::<Divider>(client.clone(), names.clone(), listed.clone()));
    tasks.spawn(follow::<Bouncer>(client.clone(), names.clone(), listed.clone()));
    tasks.spawn(follow::<Droplet>(client.clone(), names.clone(), listed.clone()));
    tasks.spawn(follow::<Endpoint>(client.clone(), names.clone(), listed));
    for _ in 0..KINDS {
        // None comes only when all tasks have ended, which the caller sees.
        let _ = heard.recv().await;
    }
}

/// Follows one kind, and says when its objects have been read for the first time.
async fn follow<K>(client: Client, names: SharedNames, listed: mpsc::Sender<()>)
where
    K: Named + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    let mut events = pin!(watcher(Api::<K>::all(client), watcher::Config::default()).default_backoff());
    let mut listing = Listing::default();
    let mut listed = Some(listed);
    while let Some(event) = events.next().await {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                warn!(kind = %K::kind(&()), %error, "watch broke, trying again");
                continue;
            }
        };
        let is_listed = listing.apply(event, &mut names.write().unwrap_or_else(PoisonError::into_inner));
        if is_listed && let Some(listed) = listed.take() {
            let _ = listed.send(()).await;
        }
    }
}

/// The keys that a list has had so far.
#[derive(Debug, Default)]
struct Listing(HashSet<String>);

impl Listing {
    /// Notes an event. Returns whether a list has ended.
    fn apply<K: Named>(&mut self, event: Event<K>, names: &mut Names) -> bool {
        match event {
            Event::Apply(object) => object.set(names),
            Event::Delete(object) => K::remove(&object.key(), names),
            Event::Init => self.0.clear(),
            Event::InitApply(object) => {
                self.0.insert(object.key());
                object.set(names);
            }
            Event::InitDone => {
                let seen = std::mem::take(&mut self.0);
                for key in K::keys(names) {
                    if !seen.contains(&*key) {
                        K::remove(&key, names);
                    }
                }
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn droplet(name: &str, address: &str) -> Droplet {
        serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Droplet", "metadata": {"name": name},
            "spec": {"node": name, "ip": address, "interface": "eth0", "mtu": 1500},
            "status": {"address": address},
        }))
        .unwrap()
    }

    #[test]
    fn what_a_new_list_lacks_is_forgotten() {
        let mut names = Names::default();
        let mut listing = Listing::default();
        let mut apply = |event| listing.apply(event, &mut names);
        assert!(!apply(Event::Init));
        assert!(!apply(Event::InitApply(droplet("a", "192.0.2.1"))));
        assert!(!apply(Event::InitApply(droplet("b", "192.0.2.2"))));
        assert!(apply(Event::<Droplet>::InitDone));
        assert!(!apply(Event::Apply(droplet("c", "192.0.2.3"))));
        assert!(!apply(Event::Init));
        assert!(!apply(Event::InitApply(droplet("b", "192.0.2.2"))));
        assert!(apply(Event::InitDone));
        let left: Vec<String> = names.droplets().map(ToString::to_string).collect();
        assert_eq!(left, ["b"]);
        assert!(names.droplet("192.0.2.1".parse().unwrap()).is_none());
    }
}
