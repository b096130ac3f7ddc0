//! The bench's own watches of objects, beside the operator's.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use futures::StreamExt;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, Object, PostParams},
    runtime::{WatchStreamExt, watcher},
};
use serde::{Deserialize, de::DeserializeOwned};
use thuban_api::{Droplet, Endpoint, Network, Phase, PodRef, Vpc};
use tokio::task::JoinSet;

use super::{
    hollow::Book,
    track::{Step, pod_number},
};

/// The names of the objects that exist and are Provisioned, and when they became so.
#[derive(Debug, Default)]
pub struct Seen {
    provisioned: Mutex<HashMap<String, Instant>>,
    there: Mutex<HashSet<String>>,
}

impl Seen {
    fn apply(&self, name: String, is_provisioned: bool) {
        if is_provisioned {
            let mut provisioned = self.provisioned.lock().unwrap_or_else(PoisonError::into_inner);
            provisioned.entry(name.clone()).or_insert_with(Instant::now);
        }
        let mut there = self.there.lock().unwrap_or_else(PoisonError::into_inner);
        there.insert(name);
    }

    fn remove(&self, name: &str) {
        let mut provisioned = self.provisioned.lock().unwrap_or_else(PoisonError::into_inner);
        provisioned.remove(name);
        let mut there = self.there.lock().unwrap_or_else(PoisonError::into_inner);
        there.remove(name);
    }

    /// Returns how many are Provisioned.
    pub fn count(&self) -> usize {
        let provisioned = self.provisioned.lock().unwrap_or_else(PoisonError::into_inner);
        provisioned.len()
    }

    /// Returns how many of these exist at all.
    pub fn there(&self, names: &[String]) -> usize {
        let there = self.there.lock().unwrap_or_else(PoisonError::into_inner);
        names.iter().filter(|name| there.contains(*name)).count()
    }

    /// Returns when the last of these became Provisioned, once all are.
    pub fn all(&self, names: &[String]) -> Option<Instant> {
        let provisioned = self.provisioned.lock().unwrap_or_else(PoisonError::into_inner);
        let times: Option<Vec<Instant>> = names.iter().map(|name| provisioned.get(name).copied()).collect();
        times?.into_iter().max()
    }
}

#[derive(Debug, Default)]
pub struct Watches {
    pub vpcs: Arc<Seen>,
    pub networks: Arc<Seen>,
    pub droplets: Arc<Seen>,
    pub probes: Arc<Probes>,
}

/// The fields that the bench reads, and no others, because there are many objects.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SlimSpec {
    pod_ref: Option<PodRef>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct SlimStatus {
    #[serde(default)]
    phase: Phase,
}

type Slim = Object<SlimSpec, SlimStatus>;

impl Watches {
    /// Starts the watches; they end with the tasks.
    pub fn start(client: &Client, book: &Arc<Book>, tasks: &mut JoinSet<()>) -> Self {
        let watches = Self::default();
        let all = || client.clone();
        phases(
            Api::<Vpc>::all(all()),
            &watches.vpcs,
            |vpc| vpc.status.as_ref().map(|status| status.phase),
            tasks,
        );
        phases(
            Api::<Network>::all(all()),
            &watches.networks,
            |network| network.status.as_ref().map(|status| status.phase),
            tasks,
        );
        phases(
            Api::<Droplet>::all(all()),
            &watches.droplets,
            |droplet| droplet.status.as_ref().map(|status| status.phase),
            tasks,
        );
        let resource = ApiResource::erase::<Endpoint>(&());
        let book = Arc::clone(book);
        let note = move |endpoint: &Slim, is_gone: bool| {
            let pod = endpoint.spec.pod_ref.as_ref();
            let Some(number) = pod.and_then(|pod| pod_number(&pod.name)) else {
                return;
            };
            if is_gone {
                book.track.note(number, Step::Gone);
            } else if endpoint.status.as_ref().map(|status| status.phase) == Some(Phase::Provisioned) {
                book.track.note(number, Step::Provisioned);
            }
        };
        tasks.spawn(watch(Api::<Slim>::all_with(all(), &resource), note));
        let probes = Arc::clone(&watches.probes);
        let see = move |map: &ConfigMap, is_gone: bool| {
            if !is_gone {
                probes.see(&map.name_any());
            }
        };
        tasks.spawn(watch(Api::namespaced(all(), PROBES), see));
        watches
    }
}

fn phases<K>(
    api: Api<K>,
    seen: &Arc<Seen>,
    phase: impl Fn(&K) -> Option<Phase> + Send + 'static,
    tasks: &mut JoinSet<()>,
) where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let seen = Arc::clone(seen);
    tasks.spawn(watch(api, move |object: &K, is_gone| {
        let name = object.name_any();
        if is_gone {
            seen.remove(&name);
        } else {
            seen.apply(name, phase(object) == Some(Phase::Provisioned));
        }
    }));
}

/// Hands on every object that comes or changes, and every object that goes while the watch lasts.
async fn watch<K>(api: Api<K>, mut handle: impl FnMut(&K, bool) + Send)
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object)) => handle(&object, false),
            Ok(watcher::Event::Delete(object)) => handle(&object, true),
            Ok(watcher::Event::Init | watcher::Event::InitDone) | Err(_) => {}
        }
    }
}

/// Namespace of the probes.
pub const PROBES: &str = "thuban-scale";
const EVERY: Duration = Duration::from_millis(100);

/// ConfigMaps that have nothing to do with Thuban: they measure how long the API server alone takes from a create to a
/// watch.
#[derive(Debug, Default)]
pub struct Probes {
    sent: Mutex<HashMap<String, Instant>>,
    took: Mutex<Vec<f64>>,
    made: AtomicU64,
}

impl Probes {
    fn see(&self, name: &str) {
        let sent = self
            .sent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(name);
        if let Some(sent) = sent {
            let mut took = self.took.lock().unwrap_or_else(PoisonError::into_inner);
            took.push(sent.elapsed().as_secs_f64() * 1000.0);
        }
    }

    /// Returns the milliseconds of each probe since the last call.
    pub fn take(&self) -> Vec<f64> {
        std::mem::take(&mut *self.took.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends probes until it is dropped.
    pub async fn send(&self, client: Client) {
        let api: Api<ConfigMap> = Api::namespaced(client, PROBES);
        let mut interval = tokio::time::interval(EVERY);
        interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            let mut map = ConfigMap::default();
            let name = format!("probe-{}", self.made.fetch_add(1, Ordering::Relaxed));
            map.metadata.name = Some(name.clone());
            self.sent
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .insert(name, Instant::now());
            let _ = api.create(&PostParams::default(), &map).await;
        }
    }
}
