//! Checks convergence: when faults stop, everything becomes right within a bound, and then nothing is written any more.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use thuban_operator::model::rows::PackedRow;
use thuban_proto::transit::Row;

use crate::cluster::{has_living_pod, is_alive};
use crate::droplet::Manner;
use crate::invariants::{addresses, first_address, pod_uid, serving, vpc_of};
use crate::kind::Kind;
use crate::operators;
use crate::policies;
use crate::services::{self, is_scaled};
use crate::simulation::{Simulation, State};
use crate::store::{is_deleting, text};
use crate::tables::{Slot, address, slot_of_row};
use crate::walk;

/// How long after the end of faults everything must be right.
const BOUND: Duration = Duration::from_mins(5);
/// How long nothing is written then.
const QUIET: Duration = Duration::from_mins(10);

/// Ends all faults, and waits.
pub async fn end_faults(simulation: &Arc<Simulation>) {
    let has_leader = {
        let state = &mut *simulation.lock();
        state.faults = state.faults.ended();
        state.is_fair = true;
        state.full.clear();
        state.note(|| "faults stop".into());
        for droplet in state.droplets.values_mut() {
            droplet.is_reachable = true;
            droplet.is_on = true;
            droplet.manner = Manner::Honest;
        }
        let youngest = state.epoch;
        let alive: Vec<_> = state.living().cloned().collect();
        for operator in &alive {
            operator.crash_after(-1);
            if operator.epoch != youngest {
                operator.crash();
            }
        }
        alive.iter().any(|operator| operator.epoch == youngest)
    };
    if !has_leader {
        operators::start(simulation);
    }
    simulation.stir();
    if !converge(simulation).await {
        return;
    }
    // Pods have come to rest, and slices say so.
    simulation.with(|state| {
        let mut random = state.random.fork();
        services::follow(state, &mut random);
    });
    if !converge(simulation).await {
        return;
    }
    if !stay_quiet(simulation, "at rest").await {
        return;
    }
    // An operator that starts again sees the same, wants the same rows, and has nothing to do.
    let is_restarted = simulation.lock().random.permille(250);
    if is_restarted {
        let old: Vec<_> = simulation.lock().operators.clone();
        for operator in &old {
            operator.crash();
        }
        operators::start(simulation);
        if converge(simulation).await {
            stay_quiet(simulation, "after a restart").await;
        }
    }
}

async fn converge(simulation: &Arc<Simulation>) -> bool {
    let start = tokio::time::Instant::now();
    loop {
        tokio::time::sleep(Duration::from_secs(3)).await;
        if simulation.is_broken() {
            return false;
        }
        let Err(reason) = verdict(&simulation.lock()) else {
            let state = &mut *simulation.lock();
            state.note(|| format!("converged in {} s", start.elapsed().as_secs()));
            return true;
        };
        if start.elapsed() > BOUND {
            simulation
                .lock()
                .violation(format!("not converged after {BOUND:?}: {reason}"));
            return false;
        }
    }
}

async fn stay_quiet(simulation: &Arc<Simulation>, when: &str) -> bool {
    // A request that was slow before may have left a claim, which is released in its time; then numbers in statuses
    // follow.
    tokio::time::sleep(Duration::from_secs(90)).await;
    let since = simulation.lock().elapsed();
    tokio::time::sleep(QUIET).await;
    let state = &mut *simulation.lock();
    let writes: Vec<String> = state
        .operators
        .iter()
        .flat_map(|operator| operator.writes_since(since))
        .collect();
    if !writes.is_empty() {
        state.violation(format!(
            "{when} the operator goes on writing: {}",
            writes.join(", ")
        ));
    }
    if let Err(reason) = verdict(state) {
        state.violation(format!("{when} it came apart again: {reason}"));
    }
    state.violations.is_empty()
}

fn all(state: &State, kind: Kind) -> impl Iterator<Item = (&str, &Value)> {
    state
        .store
        .all(kind)
        .map(|((_, _, name), object)| (name.as_str(), &*object.value))
}

pub fn is_provisioned(object: &Value) -> bool {
    text(object, "/status/phase") == "Provisioned"
}

fn verdict(state: &State) -> Result<(), String> {
    let mut pods = state.store.values(Kind::Pod);
    if let Some(pod) = pods.find(|pod| is_deleting(pod)) {
        return Err(format!("pod {} is still ending", text(pod, "/metadata/name")));
    }
    let mut droplets = all(state, Kind::Droplet);
    if let Some((name, _)) = droplets.find(|(name, _)| !state.droplets.contains_key(*name)) {
        return Err(format!("droplet {name} outlives its node"));
    }
    parents(state)?;
    endpoints(state)?;
    claims(state)?;
    roles(state)?;
    programs(state)?;
    services::verdict(state)?;
    policies::verdict(state)?;
    walk::everything(state)
}

/// Whether nothing of a network is in force, because another network has a range that it asks for.
fn is_refused(state: &State, name: &str, network: &Value) -> bool {
    let ranges = |network: &Value, path| -> Vec<Value> {
        let ranges = network.pointer(path).and_then(Value::as_array);
        ranges.cloned().unwrap_or_default()
    };
    let asked = ranges(network, "/spec/cidrs");
    let mut others = all(state, Kind::Network).filter(|(other, _)| *other != name);
    ranges(network, "/status/cidrs").is_empty()
        && others.any(|(_, other)| {
            let held = ranges(other, "/status/cidrs");
            text(other, "/spec/vpc") == text(network, "/spec/vpc")
                && asked.iter().any(|asked| held.contains(asked))
        })
}

/// Checks that networks and VPCs work, or wait for objects that still live.
fn parents(state: &State) -> Result<(), String> {
    for (name, network) in all(state, Kind::Network) {
        if is_deleting(network) {
            let is_used = all(state, Kind::Endpoint).any(|(_, endpoint)| {
                text(endpoint, "/spec/network") == name
                    && !addresses(endpoint).is_empty()
                    && !is_scaled(endpoint)
            });
            if !is_used {
                return Err(format!("network {name} is deleted, but doesn't go"));
            }
        } else if !is_provisioned(network)
            && vpc_lives(state, text(network, "/spec/vpc"))
            && !is_refused(state, name, network)
        {
            return Err(format!("network {name} is not Provisioned"));
        }
    }
    for (name, vpc) in all(state, Kind::Vpc) {
        let is_used = all(state, Kind::Network).any(|(_, network)| {
            text(network, "/spec/vpc") == name && network.pointer("/status/cidrs/0").is_some()
        });
        if is_deleting(vpc) && !is_used {
            return Err(format!("VPC {name} is deleted, but doesn't go"));
        }
        if !is_deleting(vpc) && !is_provisioned(vpc) {
            return Err(format!("VPC {name} is not Provisioned"));
        }
    }
    Ok(())
}

fn vpc_lives(state: &State, vpc: &str) -> bool {
    state
        .store
        .value(Kind::Vpc, "", vpc)
        .is_some_and(|vpc| !is_deleting(vpc))
}

/// Whether a new pod of the namespace gets an address there.
pub fn is_open(state: &State, namespace: &str, network: &str) -> bool {
    let Some(network) = state
        .store
        .value(Kind::Network, "", network)
        .filter(|network| is_provisioned(network))
    else {
        return false;
    };
    let Some(vpc) = state.store.value(Kind::Vpc, "", text(network, "/spec/vpc")) else {
        return false;
    };
    // A VPC that goes takes nobody.
    if is_deleting(vpc) {
        return false;
    }
    let Some(space) = state.store.value(Kind::Namespace, "", namespace) else {
        return false;
    };
    let selects = |of: &Value| {
        if text(of, "/metadata/name") == "default" {
            return true;
        }
        let Some(selector) = of.pointer("/spec/allowedNamespaces") else {
            return false;
        };
        let labels = selector.pointer("/matchLabels").and_then(Value::as_object);
        labels
            .into_iter()
            .flatten()
            .all(|(key, value)| space["metadata"]["labels"].get(key) == Some(value))
    };
    !is_deleting(network) && selects(network) && selects(vpc)
}

fn endpoints(state: &State) -> Result<(), String> {
    let mut by_pod: BTreeMap<&str, (&str, &Value)> = BTreeMap::new();
    for (name, endpoint) in all(state, Kind::Endpoint).filter(|(_, endpoint)| !is_scaled(endpoint)) {
        let uid = pod_uid(endpoint);
        let lives = has_living_pod(state, endpoint);
        let is_users = text(endpoint, "/spec/podRef/uid").is_empty();
        let is_free = is_users && uid.is_empty() && !is_deleting(endpoint);
        if !lives && !is_free {
            return Err(format!("endpoint {name} outlives its pod"));
        }
        if is_provisioned(endpoint) && text(endpoint, "/status/vpc").is_empty() {
            return Err(format!("endpoint {name} does not say which VPC it is in"));
        }
        if !uid.is_empty() && by_pod.insert(uid, (name, endpoint)).is_some() {
            return Err(format!("pod {uid} has two endpoints"));
        }
    }
    for pod in state.store.values(Kind::Pod) {
        let (uid, name) = (text(pod, "/metadata/uid"), text(pod, "/metadata/name"));
        let node = text(pod, "/spec/nodeName");
        if !is_alive(pod) || is_deleting(pod) || !state.droplets.contains_key(node) {
            continue;
        }
        let found = by_pod.get(uid);
        let is_attached = state.droplets[node].attachments.contains_key(uid);
        // An operator that saw the end of the network late may have let the endpoint in: no droplet has its row.
        let is_served = |endpoint: &Value| {
            let network = text(endpoint, "/spec/network");
            is_provisioned(endpoint) && state.store.get(Kind::Network, "", network).is_some()
        };
        if found.is_some_and(|(_, endpoint)| is_served(endpoint)) && !is_attached {
            return Err(format!("pod {name} is Provisioned, but not attached"));
        }
        has_its_address(state, node, pod, found.map(|(_, endpoint)| *endpoint))?;
        let annotation = |name: &str| pod["metadata"]["annotations"].get(name).and_then(Value::as_str);
        let namespace = text(pod, "/metadata/namespace");
        if let Some(named) = annotation("thuban.dev/endpoint") {
            users_endpoint(state, namespace, named)?;
            continue;
        }
        let network = annotation("thuban.dev/network").unwrap_or("default");
        if let Some((_, endpoint)) = found
            && is_deleting(endpoint)
            && addresses(endpoint).is_empty()
        {
            return Err(format!("endpoint of pod {name} is deleted, but doesn't go"));
        }
        // An address that the pod chose may be another's.
        let is_choosy = annotation("thuban.dev/ip").is_some();
        let is_provisioned = found.is_some_and(|(_, endpoint)| is_provisioned(endpoint));
        if is_open(state, namespace, network) && !is_choosy && !is_provisioned {
            let conditions = found.and_then(|(_, endpoint)| endpoint.pointer("/status/conditions"));
            let said = conditions.map(ToString::to_string).unwrap_or_default();
            return Err(format!(
                "pod {name} in {network} has no Provisioned endpoint: {said}"
            ));
        }
    }
    Ok(())
}

/// Checks that a pod's Endpoint has the address that the pod has.
fn has_its_address(state: &State, node: &str, pod: &Value, endpoint: Option<&Value>) -> Result<(), String> {
    let attachments = &state.droplets[node].attachments;
    let (Some(attachment), Some(endpoint)) = (attachments.get(text(pod, "/metadata/uid")), endpoint) else {
        return Ok(());
    };
    let has = address(&attachment.address);
    if first_address(endpoint).is_some_and(|told| told != has) {
        let (name, told) = (text(pod, "/metadata/name"), addresses(endpoint));
        return Err(format!(
            "pod {name} has the address {has}, and its Endpoint {told:?}"
        ));
    }
    Ok(())
}

/// Checks that a pod has the Endpoint, if any pod wants it.
fn users_endpoint(state: &State, namespace: &str, name: &str) -> Result<(), String> {
    let Some(endpoint) = state.store.value(Kind::Endpoint, namespace, name) else {
        return Ok(());
    };
    let is_usable = is_open(state, namespace, text(endpoint, "/spec/network"));
    if is_usable && !is_deleting(endpoint) && !is_provisioned(endpoint) {
        return Err(format!(
            "endpoint {name} of a user is wanted by a pod, but not Provisioned"
        ));
    }
    Ok(())
}

fn claims(state: &State) -> Result<(), String> {
    let mut wanted: Vec<String> = Vec::new();
    // Endpoints whose network is not there keep the addresses that were claimed for them.
    let mut open: Vec<(&str, &str)> = Vec::new();
    for (name, endpoint) in all(state, Kind::Endpoint).filter(|(_, endpoint)| !is_scaled(endpoint)) {
        let network = state
            .store
            .value(Kind::Network, "", text(endpoint, "/spec/network"));
        if network.is_none() || addresses(endpoint).is_empty() {
            open.push((text(endpoint, "/metadata/namespace"), name));
            continue;
        }
        let vpc = vpc_of(state, endpoint);
        wanted.extend(
            addresses(endpoint)
                .iter()
                .map(|address| format!("{vpc}/{address}")),
        );
    }
    let mut claimed: Vec<String> = Vec::new();
    for (name, claim) in all(state, Kind::IpClaim) {
        if claim.pointer("/status/releasedAt").is_some() {
            let owner = text(claim, "/spec/endpointName");
            return Err(format!("claim {name} of {owner} is released, but doesn't go"));
        }
        let owner = (
            text(claim, "/spec/endpointNamespace"),
            text(claim, "/spec/endpointName"),
        );
        if open.contains(&owner) {
            continue;
        }
        claimed.push(format!(
            "{}/{}",
            text(claim, "/spec/vpc"),
            text(claim, "/spec/address")
        ));
    }
    wanted.sort();
    claimed.sort();
    if wanted != claimed {
        return Err(format!("addresses {wanted:?}, but claims {claimed:?}"));
    }
    let numbers = state.store.names(Kind::VniClaim);
    let mut used: Vec<String> = all(state, Kind::Vpc)
        .filter_map(|(_, vpc)| vpc.pointer("/status/vni").map(ToString::to_string))
        .collect();
    used.sort();
    if numbers != used {
        return Err(format!("VNIs {used:?}, but claims {numbers:?}"));
    }
    Ok(())
}

fn roles(state: &State) -> Result<(), String> {
    for (kind, parent_kind, field, count) in [
        (Kind::Divider, Kind::Vpc, "/spec/vpc", "/spec/dividers"),
        (Kind::Bouncer, Kind::Network, "/spec/network", "/spec/bouncers"),
    ] {
        for (name, role) in all(state, kind) {
            let parent = text(role, field);
            let Some(parent) = state.store.value(parent_kind, "", parent) else {
                return Err(format!("{kind:?} {name} outlives {parent}"));
            };
            // The last role of a parent that is in use serves on.
            let siblings = all(state, kind)
                .filter(|(_, other)| text(other, field) == text(role, field))
                .count();
            if is_deleting(role) && !is_deleting(parent) && siblings > 1 {
                return Err(format!("{kind:?} {name} is deleted, but doesn't go"));
            }
            // A bouncer that was made while its VPC went, or before its network was refused, has nothing to serve.
            let is_idle = |network| {
                !vpc_lives(state, text(role, "/spec/vpc"))
                    || is_refused(state, text(role, "/spec/network"), network)
            };
            if kind == Kind::Bouncer && is_idle(parent) {
                continue;
            }
            if !is_deleting(parent) && !is_provisioned(role) {
                return Err(format!("{kind:?} {name} is not Provisioned: {role}"));
            }
            // A parent that is deleted replaces no roles.
            if is_deleting(role) && is_deleting(parent) {
                continue;
            }
            let droplet = text(role, "/spec/droplet");
            if serving(role) != droplet {
                return Err(format!(
                    "{kind:?} {name} is on its way from {} to {droplet}",
                    serving(role)
                ));
            }
            if !state.droplets.contains_key(droplet) {
                return Err(format!("{kind:?} {name} is on {droplet:?}, which is no droplet"));
            }
            spread(state, kind, field, (name, role))?;
        }
        for (name, parent) in all(state, parent_kind) {
            let least = parent.pointer(count).and_then(Value::as_u64).unwrap_or(1) as usize;
            let there = all(state, kind)
                .filter(|(_, role)| text(role, field) == name)
                .count();
            // There is none that would share a droplet from the start.
            let is_limited = (1..least).contains(&there) && !has_place(state, (kind, field), name);
            if !is_deleting(parent) && is_provisioned(parent) && there != least && !is_limited {
                return Err(format!("{parent_kind:?} {name} has {there} of {least} roles"));
            }
        }
    }
    Ok(())
}

/// Whether a droplet may get one more role of the parent.
fn has_place(state: &State, (kind, field): (Kind, &str), parent: &str) -> bool {
    let own = all(state, kind).filter(|(_, role)| text(role, field) == parent);
    let taken: Vec<&str> = own.map(|(_, role)| text(role, "/spec/droplet")).collect();
    let mut droplets = state.droplets.keys();
    droplets
        .any(|name| is_placeable(state, name) && !is_cordoned(state, name) && !taken.contains(&name.as_str()))
}

/// Checks that the role's droplet has no sibling of it, and is not cordoned, while another droplet is free.
fn spread(state: &State, kind: Kind, field: &str, (name, role): (&str, &Value)) -> Result<(), String> {
    let droplet = text(role, "/spec/droplet");
    let serves = |role: &Value| is_provisioned(role) && !is_deleting(role);
    if !serves(role) {
        return Ok(());
    }
    let siblings: Vec<(&str, &Value)> = all(state, kind)
        .filter(|(other, sibling)| *other != name && text(sibling, field) == text(role, field))
        .collect();
    let twin = siblings
        .iter()
        .find(|(_, sibling)| text(sibling, "/spec/droplet") == droplet && serves(sibling));
    if twin.is_none() && !is_cordoned(state, droplet) {
        return Ok(());
    }
    let has_sibling = |name: &str| {
        let mut droplets = siblings.iter().map(|(_, sibling)| text(sibling, "/spec/droplet"));
        droplets.any(|droplet| droplet == name)
    };
    let mut free = state.droplets.keys().filter(|name| {
        *name != droplet && is_placeable(state, name) && !is_cordoned(state, name) && !has_sibling(name)
    });
    let Some(free) = free.next() else {
        return Ok(());
    };
    let why = twin.map_or("is cordoned".into(), |(twin, _)| format!("has {twin}"));
    Err(format!(
        "{kind:?} {name} is on {droplet}, which {why}, but {free} is free"
    ))
}

fn is_cordoned(state: &State, node: &str) -> bool {
    let node = state.store.value(Kind::Node, "", node);
    node.is_some_and(|node| node.pointer("/spec/unschedulable") == Some(&true.into()))
}

/// Whether the operator has found the droplet to be its Node's.
pub fn is_accepted(state: &State, name: &str) -> bool {
    let droplet = state.store.value(Kind::Droplet, "", name);
    let conditions = droplet.and_then(|droplet| droplet.pointer("/status/conditions")?.as_array());
    conditions
        .into_iter()
        .flatten()
        .any(|condition| text(condition, "/type") == "Accepted" && text(condition, "/status") == "True")
}

/// Whether the droplet was accepted, its Node is there, and it has a stream and all that came by it.
fn is_placeable(state: &State, name: &str) -> bool {
    let follows = state
        .leaders()
        .any(|leader| state.droplets[name].follows(leader.epoch));
    is_accepted(state, name) && follows && state.store.get(Kind::Node, "", name).is_some()
}

/// Checks that every droplet holds exactly the rows that its leader wants.
fn programs(state: &State) -> Result<(), String> {
    let Some(hub) = state.leaders().next().and_then(|operator| operator.hub()) else {
        return Err("no operator leads".into());
    };
    for droplet in state.droplets.values() {
        if droplet.stream.is_none() || !droplet.is_applied {
            return Err(format!("{} has no stream", droplet.name));
        }
        let wanted: BTreeMap<Slot, Row> = hub
            .read(|world| world.program(&droplet.name))
            .values()
            .map(PackedRow::unpack)
            .map(|row| (slot_of_row(&row), row))
            .filter(|(slot, _)| droplet.kinds.contains(slot.kind()))
            .collect();
        if wanted != droplet.tables.rows {
            let more = droplet.tables.rows.keys().find(|slot| !wanted.contains_key(slot));
            let less = wanted
                .iter()
                .find(|(slot, row)| droplet.tables.rows.get(*slot) != Some(row));
            return Err(format!(
                "{} lacks {less:?} and has {more:?} too much",
                droplet.name
            ));
        }
    }
    Ok(())
}
