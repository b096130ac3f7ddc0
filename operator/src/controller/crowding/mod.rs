//! Tells the scheduler on which nodes a network is crowded out: other VPCs have all of its free addresses there. The
//! pod of transitd on such a node has a label of the network, and pods of the network keep off such pods.
//!
//! Invariant: labels follow from the world alone, so that the next leader puts right what this one left. A label is
//! written at most once in [`LOOK`] a node.

mod moves;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::{Network, system_namespace};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::controller::context::Context;
use crate::controller::runtime::objects::{WriteError, update};
use crate::model::allocation::{Family, free, ip_claim_name};
use crate::model::cached::Pod;
use crate::model::crowding::{Crowded, crowded_out, labels_of, networks_of};
use crate::model::ranges::in_force;
use crate::model::validation::parse;
use crate::model::world::World;
use crate::rate_limit::RateLimit;
use moves::Moves;

/// How often is looked where networks are crowded out.
const LOOK: Duration = Duration::from_secs(2);
/// A look that takes long is followed by a pause that is so many times as long, up to a limit: many networks may have
/// equal ranges, and other tasks run meanwhile.
const PAUSE_OF_LOOK: u32 = 20;
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How many free addresses are looked at while the world is locked.
const ADDRESSES_AT_ONCE: usize = 4;
/// How long nothing is written after the API server refused a write: a right may be missing until the next version of
/// the manifests is there.
const ERROR_PAUSE: Duration = Duration::from_secs(30);
/// The most pods of transitd that are labelled a second, and at once after a rest.
const LABELLED_A_SECOND: u32 = 20;
const LABELLED_AT_ONCE: u32 = 100;
/// A network with more free addresses is crowded out nowhere: no node has so many pods.
const MAX_FREE: u64 = 1024;
/// The label and the name by which pods of transitd are found.
const TRANSITD: (&str, &str) = ("app.kubernetes.io/name", "transitd");

struct Crowding {
    moves: Moves,
    rate: RateLimit,
    /// Whether a pod may have a label: else no pod is looked at while no network is crowded out.
    has_labels: bool,
    /// The node whose pod was labelled last. The next look begins behind it, so that nodes whose networks come and go
    /// don't keep others waiting.
    last: String,
    pause: Duration,
}

/// Keeps labels up to date, and moves pods, for as long as the process leads.
pub async fn keep(context: Arc<Context>) {
    let mut crowding = Crowding {
        moves: Moves::default(),
        rate: RateLimit::new(LABELLED_A_SECOND, LABELLED_AT_ONCE),
        has_labels: true,
        last: String::new(),
        pause: LOOK,
    };
    loop {
        sleep(crowding.pause).await;
        if let Err(error) = crowding.look(&context).await {
            warn!(%error, "the scheduler is not told where networks are full");
            sleep(ERROR_PAUSE).await;
        }
    }
}

impl Crowding {
    async fn look(&mut self, context: &Context) -> Result<(), WriteError> {
        let begun = Instant::now();
        let crowded = crowded(context).await;
        self.pause = (begun.elapsed() * PAUSE_OF_LOOK).clamp(LOOK, LONGEST_PAUSE);
        if crowded.is_empty() && !self.has_labels {
            return Ok(());
        }
        let mut told = Crowded::new();
        self.has_labels = false;
        let mut pods = transitd_pods(context);
        let next = pods.partition_point(|(node, _)| *node <= self.last);
        pods.rotate_left(next);
        for (node, pod) in pods {
            let known = known(&pod);
            let wanted = crowded.get(&node).cloned().unwrap_or_default();
            self.has_labels |= !known.is_empty() || !wanted.is_empty();
            if known != wanted && self.rate.take() {
                self.last.clone_from(&node);
                tell(&pod, &node, &known, &wanted, context).await?;
            }
            told.insert(node, known.intersection(&wanted).cloned().collect());
        }
        self.moves.move_refused(&told, context).await
    }
}

/// Returns where networks are crowded out.
async fn crowded(context: &Context) -> Crowded {
    let mut crowded = Crowded::new();
    let most = context.hub.read(World::most_on_a_droplet) as u64;
    for network in context.stores.networks.state() {
        // Other tasks do not wait for all networks.
        yield_now().await;
        for droplet in droplets_without_room(&network, most, context) {
            crowded.entry(droplet).or_default().insert(network.name_any());
        }
    }
    crowded
}

/// Returns the droplets where other VPCs have all free addresses of the network, of one of its families. `most`: the
/// most endpoints on a droplet. With more free addresses than that, there is none.
fn droplets_without_room(network: &Network, most: u64, context: &Context) -> BTreeSet<String> {
    let name = network.name_any();
    let ranges = parse(in_force(network)).unwrap_or_default();
    let is_claimed = |address| {
        let claim = ip_claim_name(&network.spec.vpc, address);
        context.stores.ip_claims.get(&ObjectRef::new(&claim)).is_some()
    };
    let mut droplets = BTreeSet::new();
    for family in Family::ALL {
        let ranges = family.ranges(&ranges);
        let all = ranges
            .iter()
            .fold(0, |all: u64, range| all.saturating_add(range.capacity()));
        if all.saturating_sub(context.index.claimed(&name)) > MAX_FREE.min(most) {
            continue;
        }
        let free = free(&ranges, context.index.floor(&name, family), is_claimed);
        droplets.extend(using_all(free.map(|(address, _)| address), context));
    }
    droplets
}

/// Returns the droplets that use all of these addresses. The addresses are found while the world is not locked: claimed
/// ones may lie between them.
fn using_all(mut addresses: impl Iterator<Item = IpAddr>, context: &Context) -> BTreeSet<String> {
    let mut using: Option<BTreeSet<String>> = None;
    loop {
        let some: Vec<IpAddr> = addresses.by_ref().take(ADDRESSES_AT_ONCE).collect();
        if some.is_empty() {
            return using.unwrap_or_default();
        }
        let using_some: BTreeSet<String> = context.hub.read(|world| {
            let droplets = crowded_out(some, |address| world.droplets_using(address));
            droplets.into_iter().map(str::to_owned).collect()
        });
        let both = match using {
            Some(using) => &using & &using_some,
            None => using_some,
        };
        if both.is_empty() {
            return both;
        }
        using = Some(both);
    }
}

/// Returns the pods of transitd, each with its node, in the order of the nodes.
fn transitd_pods(context: &Context) -> Vec<(String, Arc<Pod>)> {
    let pods = context.stores.pods.state().into_iter();
    let pods = pods.filter(|pod| {
        let profile = pod.profile.as_ref();
        let name = profile.and_then(|profile| profile.labels.get(TRANSITD.0));
        pod.metadata.namespace.as_deref() == Some(system_namespace())
            && name.is_some_and(|name| name == TRANSITD.1)
            && pod.is_alive()
    });
    let on_nodes = pods.filter_map(|pod| Some((pod.spec.as_ref()?.node_name.clone()?, pod)));
    let mut on_nodes: Vec<(String, Arc<Pod>)> = on_nodes.collect();
    on_nodes.sort_by(|(one, _), (other, _)| one.cmp(other));
    on_nodes
}

/// Returns the networks of which the pod has the label.
fn known(pod: &Pod) -> BTreeSet<String> {
    let profile = pod.profile.as_ref();
    profile
        .map(|profile| networks_of(&profile.labels))
        .unwrap_or_default()
}

/// Labels the pod of transitd on a node.
async fn tell(
    pod: &Pod,
    node: &str,
    known: &BTreeSet<String>,
    wanted: &BTreeSet<String>,
    context: &Context,
) -> Result<(), WriteError> {
    let pods: Api<Pod> = Api::namespaced(context.client.clone(), system_namespace());
    let (mut old, mut new) = (pod.clone(), pod.clone());
    old.metadata.labels = Some(labels_of(known));
    new.metadata.labels = Some(labels_of(wanted));
    match update(&pods, &old, &new).await {
        Ok(_) => {
            let networks = wanted.iter().cloned().collect::<Vec<_>>().join(", ");
            info!(
                node,
                networks, "other VPCs have all free addresses of these networks"
            );
            Ok(())
        }
        // The next look sees what the pod has become.
        Err(error) if error.is_conflict() || error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}
