//! Moves pods that came to a node before the scheduler knew that their network is crowded out there: the pod is
//! evicted, and its controller makes another one.
//!
//! Invariant: only pods of which nothing has started are evicted, and only if the next one keeps off the node.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1;
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions};
use kube::api::PostParams;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use serde_json::Value;
use thuban_api::{ConditionStatus, Endpoint, PodRef, condition};
use tokio::time::Instant;
use tracing::info;

use crate::controller::context::Context;
use crate::controller::endpoint::status::pod_reference;
use crate::controller::runtime::objects::{WriteError, bounded, failed, get};
use crate::model::crowding::{Crowded, is_movable, label};
use crate::model::endpoint::{EndpointKind, droplet_of, has_addresses, name_of, pod_of};
use crate::rate_limit::RateLimit;

/// The reason of an Endpoint that other VPCs leave no address, and of the events.
const REASON: &str = "AddressInUseOnNode";
/// The action of the events: they are told apart from the endpoint's own.
const ACTION: &str = "Move";
/// How long a pod has been refused before it is moved: an address may come free meanwhile. A pod that can't be moved is
/// tried again after twice the time, and so on, so that it does not take the turn of others.
const REFUSED_TIME: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_mins(10);
/// The most pods that are moved a second, and at once after a rest.
const MOVED_A_SECOND: u32 = 1;
const MOVED_AT_ONCE: u32 = 20;

pub struct Moves {
    /// When refused pods are to be moved, by UID.
    turns: BTreeMap<String, Turn>,
    rate: RateLimit,
}

/// When a pod is to be moved.
struct Turn {
    at: Instant,
    /// The time before it.
    pause: Duration,
}

impl Default for Moves {
    fn default() -> Self {
        Self {
            turns: BTreeMap::new(),
            rate: RateLimit::new(MOVED_A_SECOND, MOVED_AT_ONCE),
        }
    }
}

/// A pod that has no address on its node.
struct Refused {
    namespace: String,
    pod: PodRef,
    node: String,
    network: String,
    endpoint: Arc<Endpoint>,
}

impl Moves {
    /// Moves pods that have been refused for some time on nodes of which the scheduler has been told.
    pub async fn move_refused(&mut self, told: &Crowded, context: &Context) -> Result<(), WriteError> {
        let refused = refused(told, context);
        let uids: BTreeSet<&str> = refused.iter().map(|refused| refused.pod.uid.as_str()).collect();
        self.turns.retain(|uid, _| uids.contains(uid.as_str()));
        let now = Instant::now();
        let turns = refused.iter().map(|refused| {
            let turn = self.turns.entry(refused.pod.uid.clone()).or_insert(Turn {
                at: now + REFUSED_TIME,
                pause: REFUSED_TIME,
            });
            (turn.at, refused)
        });
        let mut due: Vec<(Instant, &Refused)> = turns.filter(|(at, _)| *at <= now).collect();
        due.sort_by_key(|(at, _)| *at);
        for (_, refused) in due {
            if !self.rate.take() {
                break;
            }
            if let Some(turn) = self.turns.get_mut(&refused.pod.uid) {
                turn.pause = (turn.pause * 2).min(LONGEST_PAUSE);
                turn.at = now + turn.pause;
            }
            move_one(refused, context).await?;
        }
        Ok(())
    }
}

/// Returns the pods without an address on nodes where their network is crowded out.
fn refused(told: &Crowded, context: &Context) -> Vec<Refused> {
    let networks: BTreeSet<&String> = told.values().flatten().collect();
    let waiting = networks
        .into_iter()
        .flat_map(|network| context.index.waiting_of(network));
    let endpoints = waiting.filter_map(|(namespace, name)| {
        let key = ObjectRef::<Endpoint>::new(&name).within(&namespace);
        context.stores.endpoints.get(&key)
    });
    let refused = endpoints.filter(|endpoint| {
        let networks = told.get(droplet_of(endpoint));
        networks.is_some_and(|networks| networks.contains(&endpoint.spec.network)) && is_refused(endpoint)
    });
    let refused = refused.filter_map(|endpoint| {
        Some(Refused {
            namespace: name_of(&endpoint).0,
            pod: pod_of(&endpoint)?.clone(),
            node: droplet_of(&endpoint).to_owned(),
            network: endpoint.spec.network.clone(),
            endpoint,
        })
    });
    refused.collect()
}

/// Whether the operator found no address for the endpoint of a pod that asks for none.
fn is_refused(endpoint: &Endpoint) -> bool {
    let status = endpoint.status.as_ref();
    let ready = status.and_then(|status| condition::find(&status.conditions, "Ready"));
    EndpointKind::of(endpoint) == EndpointKind::Pod
        && endpoint.metadata.deletion_timestamp.is_none()
        && endpoint.spec.addresses.is_empty()
        && !has_addresses(endpoint)
        && ready.is_some_and(|ready| ready.status == ConditionStatus::False && ready.reason == REASON)
}

/// Evicts a pod if nothing of it has started and its controller makes another one elsewhere.
async fn move_one(refused: &Refused, context: &Context) -> Result<(), WriteError> {
    let pods: Api<v1::Pod> = Api::namespaced(context.client.clone(), &refused.namespace);
    let Some(pod) = get(&pods, &refused.pod.name).await? else {
        return Ok(());
    };
    let is_it = pod.metadata.uid.as_ref() == Some(&refused.pod.uid);
    if !is_it || !is_movable(&pod, &label(&refused.network)) {
        return Ok(());
    }
    match evict(&pods, &pod).await {
        Ok(()) => {}
        // The pod has changed or is gone, or a budget has no room for now.
        Err(error) if error.is_conflict() || error.is_not_found() || error.category() == "throttled" => {
            return Ok(());
        }
        Err(error) => return Err(error),
    }
    let (network, node) = (&refused.network, &refused.node);
    let note = format!(
        "other VPCs use all free addresses of network {network:?} on node {node}: the pod is deleted, so that its \
         controller makes another one, which the scheduler sends elsewhere"
    );
    let about = pod_reference(&refused.endpoint, &refused.pod.name, &refused.pod.uid);
    context.events.warn_about(about, ACTION, REASON, &note);
    info!(
        namespace = refused.namespace,
        pod = refused.pod.name,
        node,
        network,
        "pod moved"
    );
    Ok(())
}

/// Evicts exactly this version of this pod: kubelet may have started it meanwhile. kube's own method leaves the
/// preconditions out, because it misspells their field.
async fn evict(pods: &Api<v1::Pod>, pod: &v1::Pod) -> Result<(), WriteError> {
    let name = pod.name_any();
    let preconditions = Preconditions {
        uid: pod.metadata.uid.clone(),
        resource_version: pod.metadata.resource_version.clone(),
    };
    let eviction = Eviction {
        delete_options: Some(DeleteOptions {
            preconditions: Some(preconditions),
            ..DeleteOptions::default()
        }),
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: pod.metadata.namespace.clone(),
            ..ObjectMeta::default()
        },
    };
    let parameters = PostParams::default();
    let request = pods.create_subresource::<Eviction, Value>("eviction", &name, &parameters, &eviction);
    let answer = bounded(request).await;
    answer.map(drop).map_err(failed("evict", &name))
}
