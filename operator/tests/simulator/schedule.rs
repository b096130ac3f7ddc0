//! Runs one schedule: a small world, random things that happen to it, then peace.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::chance;
use crate::cluster::{self, add_node, add_pod};
use crate::convergence;
use crate::droplet::{self, Manner, Report};
use crate::kind::Kind;
use crate::operators;
use crate::policies;
use crate::random::Random;
use crate::restore;
use crate::services;
use crate::simulation::{Simulation, State};
use crate::store::{Preconditions, is_deleting, text};

const VPCS: [&str; 3] = ["red", "blue", "green"];
pub const NAMESPACES: [&str; 2] = ["east", "west"];
const NODES: u8 = 4;
const MAX_PODS: usize = 8;
/// The longest time for which a watch brings nothing, milliseconds.
const MAX_DEAFNESS: u64 = 12_000;

/// Runs the schedule of a seed. Returns what went wrong, and what happened.
pub fn run(seed: u64) -> (Vec<String>, Vec<String>) {
    run_in_order(seed, 0)
}

/// Runs the schedule with another order of hash maps, and so of tasks of one instant, for each `order`.
pub fn run_in_order(seed: u64, order: u64) -> (Vec<String>, Vec<String>) {
    let happen = async |simulation: &Arc<Simulation>| {
        chaos(simulation).await;
        if !simulation.is_broken() {
            convergence::end_faults(simulation).await;
        }
    };
    chance::seeded(seed, order, || live(seed, happen))
}

/// Lets things happen to a world of its own, in virtual time.
pub fn within(seed: u64, happen: impl AsyncFnOnce(&Arc<Simulation>) + Send) -> (Vec<String>, Vec<String>) {
    chance::seeded(seed, 0, || live(seed, happen))
}

fn live(seed: u64, happen: impl AsyncFnOnce(&Arc<Simulation>)) -> (Vec<String>, Vec<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let simulation = Simulation::new(seed);
        tokio::spawn(cluster::collect(simulation.clone()));
        add_namespaces(&simulation);
        happen(&simulation).await;
        let state = &mut *simulation.lock();
        state.operators.iter().for_each(|operator| operator.crash());
        (std::mem::take(&mut state.violations), state.take_trace())
    })
}

fn add_namespaces(simulation: &Simulation) {
    for namespace in NAMESPACES {
        simulation.with(|state| {
            let labels = json!({"metadata": {"labels": {"name": namespace}}});
            let _ = state.store.create(Kind::Namespace, "", namespace, labels);
        });
    }
}

async fn chaos(simulation: &Arc<Simulation>) {
    let mut random = simulation.lock().random.fork();
    for number in 0..2 + random.below(2) as u8 {
        add_node(simulation, number);
    }
    simulation.with(|state| {
        add_vpc(state, &mut random);
        add_network(state, &mut random);
    });
    operators::start(simulation);
    let number = 10 + random.below(25);
    steps(simulation, &mut random, number).await;
    if simulation.is_broken() || !random.permille(300) {
        return;
    }
    if !simulation.lock().faults.is_steady && random.permille(500) {
        crowd(simulation, &mut random).await;
    }
    simulation.with(|state| tear_down(state, &mut random));
    // Returned numbers and addresses are given out again, with all faults going on.
    let number = random.below(10);
    steps(simulation, &mut random, number).await;
}

/// Starts another operator that leads too, and adds nodes that the first one does not know for a while.
async fn crowd(simulation: &Arc<Simulation>, random: &mut Random) {
    while simulation.lock().alive() < 2 {
        operators::start(simulation);
    }
    let time = random.millis(0, MAX_DEAFNESS);
    let first = simulation.lock().living().next().cloned();
    if let Some(first) = first {
        first.deafen([Kind::Node, Kind::Droplet]);
        tokio::spawn(async move {
            tokio::time::sleep(time).await;
            first.deafen([]);
        });
    }
    for number in 0..NODES {
        add_node(simulation, number);
    }
    simulation.with(|state| {
        add_vpc(state, random);
        add_network(state, random);
        new_pod(state, random);
    });
    let number = random.below(4);
    steps(simulation, random, number).await;
}

async fn steps(simulation: &Arc<Simulation>, random: &mut Random, number: u64) {
    for _ in 0..number {
        let (from, to) = if random.permille(150) {
            (1000, 20_000)
        } else {
            (0, 1500)
        };
        let time = random.millis(from, to);
        tokio::time::sleep(time).await;
        step(simulation, random);
        if simulation.is_broken() {
            return;
        }
        if simulation.lock().alive() == 0 && random.permille(600) {
            operators::start(simulation);
        }
    }
}

/// Deletes everything that users made, in any order.
fn tear_down(state: &mut State, random: &mut Random) {
    state.note(|| "users delete everything".into());
    let mut all: Vec<_> = [Kind::Pod, Kind::Network, Kind::Vpc]
        .into_iter()
        .flat_map(|kind| state.store.all(kind))
        .map(|(name, _)| name.clone())
        .filter(|(kind, _, name)| *kind == Kind::Pod || name != "default")
        .collect();
    while !all.is_empty() {
        let (kind, namespace, name) = all.swap_remove(random.below(all.len() as u64) as usize);
        let foreground = kind != Kind::Pod && random.permille(300);
        let _ = state
            .store
            .delete(kind, &namespace, &name, &Preconditions::default(), foreground);
    }
}

fn step(simulation: &Arc<Simulation>, random: &mut Random) {
    let is_steady = simulation.lock().faults.is_steady;
    if random.permille(150) {
        simulation.with(restore::back_up);
    }
    match random.below(150) {
        0..34 => simulation.with(|state| new_pod(state, random)),
        34..46 => simulation.with(|state| end_pod(state, random)),
        46..50 => simulation.with(|state| sandbox_again(state, random)),
        50..54 => simulation.with(|state| add_vpc(state, random)),
        54..60 => simulation.with(|state| add_network(state, random)),
        60..64 => simulation.with(|state| delete_parent(state, random)),
        64..67 => simulation.with(|state| delete_by_hand(state, random)),
        67..71 => add_node(simulation, random.below(u64::from(NODES)) as u8),
        71..76 => simulation.with(|state| with_droplet(state, random, break_stream)),
        76..80 => simulation.with(|state| subscribe(state, random)),
        80..86 => crash(simulation, random),
        86..88 => simulation.with(|state| state.store.compacted = state.store.version()),
        88..91 => simulation.with(|state| widen(state, random)),
        91..98 => simulation.with(|state| scale(state, random)),
        98..103 => simulation.with(|state| cordon(state, random)),
        103..107 => simulation.with(|state| users_endpoint(state, random)),
        146.. if !is_steady => restore::restore(simulation),
        143.. if !is_steady => simulation.with(|state| change_manner(state, random)),
        140..143 => simulation.with(|state| quota(state, random)),
        135.. => simulation.with(|state| policies::step(state, random)),
        120.. => simulation.with(|state| services::step(state, random)),
        _ if is_steady => {}
        107..109 => simulation.with(|state| lose_node(state, random)),
        109..111 => simulation
            .with(|state| with_droplet(state, random, |state, name| cluster::power(state, name, true))),
        111..112 => simulation
            .with(|state| with_droplet(state, random, |state, name| cluster::power(state, name, false))),
        112..117 => simulation.with(|state| with_droplet(state, random, toggle_reach)),
        _ => {
            if simulation.lock().alive() < 2 {
                operators::start(simulation);
            }
        }
    }
}

/// Uses up a namespace's quota of Endpoints, or raises it.
fn quota(state: &mut State, random: &mut Random) {
    let namespace = NAMESPACES[random.below(2) as usize];
    let is_full = !state.full.remove(namespace) && state.full.insert(namespace.to_owned());
    let verb = if is_full { "used up" } else { "raised" };
    state.note(|| format!("the quota of {namespace} is {verb}"));
}

/// Asks for more or fewer roles.
fn scale(state: &mut State, random: &mut Random) {
    let (kind, field) = if random.permille(600) {
        (Kind::Network, "bouncers")
    } else {
        (Kind::Vpc, "dividers")
    };
    let names = state.store.names(kind);
    let Some(name) = random.pick(&names).filter(|name| *name != "default") else {
        return;
    };
    let count = 1 + random.below(3);
    state.note(|| format!("{kind:?} {name} wants {count} {field}"));
    state
        .store
        .edit(kind, "", name, |parent| parent["spec"][field] = count.into());
}

fn cordon(state: &mut State, random: &mut Random) {
    let nodes = state.store.names(Kind::Node);
    let Some(name) = random.pick(&nodes) else { return };
    let is_cordoned = random.permille(600);
    state.note(|| format!("node {name} is {}cordoned", if is_cordoned { "" } else { "un" }));
    state.store.edit(Kind::Node, "", name, |node| {
        if is_cordoned {
            node["spec"]["unschedulable"] = true.into();
        } else if let Some(spec) = node["spec"].as_object_mut() {
            spec.remove("unschedulable");
        }
    });
}

/// Makes a user's Endpoint, or deletes one.
fn users_endpoint(state: &mut State, random: &mut Random) {
    let namespace = NAMESPACES[random.below(2) as usize];
    if random.permille(300) {
        let _ = state.store.delete(
            Kind::Endpoint,
            namespace,
            "service",
            &Preconditions::default(),
            false,
        );
        state.note(|| format!("a user deletes the endpoint of {namespace}"));
        return;
    }
    let networks = state.store.names(Kind::Network);
    let Some(network) = random.pick(&networks) else {
        return;
    };
    let endpoint = json!({"metadata": {}, "spec": {"type": "Simple", "vpc": "", "network": network}});
    if state
        .store
        .create(Kind::Endpoint, namespace, "service", endpoint)
        .is_ok()
    {
        state.note(|| format!("a user makes an endpoint of {network} in {namespace}"));
    }
}

fn with_droplet(state: &mut State, random: &mut Random, act: impl FnOnce(&mut State, &str)) {
    let names: Vec<String> = state.droplets.keys().cloned().collect();
    if let Some(name) = random.pick(&names) {
        act(state, name);
    }
}

fn break_stream(state: &mut State, name: &str) {
    state.note(|| format!("the stream of {name} breaks"));
    state.droplets[name].report(Report::Break);
}

fn toggle_reach(state: &mut State, name: &str) {
    let Some(droplet) = state.droplets.get_mut(name) else {
        return;
    };
    droplet.is_reachable = !droplet.is_reachable;
    let is_reachable = droplet.is_reachable;
    if !is_reachable {
        droplet.report(Report::Break);
    }
    state.note(|| format!("{name} is {}reachable", if is_reachable { "" } else { "not " }));
}

/// Makes a droplet ack late, or never, or normally again.
fn change_manner(state: &mut State, random: &mut Random) {
    let late = *random.pick(&Manner::LATE).expect("there are some");
    with_droplet(state, random, |state, name| {
        let Some(droplet) = state.droplets.get_mut(name) else {
            return;
        };
        droplet.manner = match droplet.manner {
            Manner::Honest => late,
            _ => Manner::Honest,
        };
        let manner = droplet.manner;
        state.note(|| format!("{name} is {manner:?}"));
    });
}

fn crash(simulation: &Arc<Simulation>, random: &mut Random) {
    let state = &mut *simulation.lock();
    let alive: Vec<_> = state.living().cloned().collect();
    if let Some(operator) = random.pick(&alive) {
        let writes = random.below(12);
        state.note(|| format!("{} will crash after {writes} writes", operator.id));
        if writes == 0 {
            operator.crash();
        } else {
            operator.crash_after(writes.cast_signed());
        }
    }
}

fn selector(random: &mut Random) -> Value {
    if random.permille(150) {
        json!({"matchLabels": {"name": NAMESPACES[random.below(2) as usize]}})
    } else {
        json!({})
    }
}

fn add_vpc(state: &mut State, random: &mut Random) {
    let name = VPCS[random.below(3) as usize];
    let vpc = json!({
        "metadata": {},
        "spec": {
            "cidrs": ["10.0.0.0/16"], "dividers": 1 + random.below(2),
            "allowedNamespaces": selector(random),
        },
    });
    if state.store.create(Kind::Vpc, "", name, vpc).is_ok() {
        state.note(|| format!("VPC {name} is created"));
    }
}

fn add_network(state: &mut State, random: &mut Random) {
    let vpcs = state.store.names(Kind::Vpc);
    let vpcs: Vec<_> = vpcs.into_iter().filter(|name| name != "default").collect();
    let Some(vpc) = random.pick(&vpcs).cloned() else {
        return;
    };
    let number = 1 + random.below(2);
    let name = format!("{vpc}-{number}");
    let network = json!({
        "metadata": {},
        "spec": {
            "vpc": vpc, "cidrs": [format!("10.0.{number}.0/24")], "bouncers": 1 + random.below(2),
            "allowedNamespaces": selector(random), "allowStaticIPs": true,
        },
    });
    if state.store.create(Kind::Network, "", &name, network).is_ok() {
        state.note(|| format!("network {name} is created"));
    }
}

/// Adds a range to a network: one of its own, or one that the VPC's other network may ask for too.
fn widen(state: &mut State, random: &mut Random) {
    let networks = state.store.names(Kind::Network);
    let Some(name) = random.pick(&networks).filter(|name| *name != "default") else {
        return;
    };
    let is_shared = random.permille(400);
    state.note(|| {
        format!(
            "network {name} asks for {} range",
            if is_shared { "a shared" } else { "another" }
        )
    });
    state.store.edit(Kind::Network, "", name, |network| {
        let first = text(network, "/spec/cidrs/0").to_owned();
        let third: u8 = first
            .split('.')
            .nth(2)
            .and_then(|part| part.parse().ok())
            .unwrap_or_default();
        let third = if is_shared { 200 } else { third + 100 };
        let more = Value::from(format!("10.0.{third}.0/24"));
        if let Some(cidrs) = network["spec"]["cidrs"].as_array_mut()
            && !cidrs.contains(&more)
        {
            cidrs.push(more);
        }
    });
}

fn delete_parent(state: &mut State, random: &mut Random) {
    let kind = if random.permille(600) {
        Kind::Network
    } else {
        Kind::Vpc
    };
    let names = state.store.names(kind);
    let Some(name) = random.pick(&names).filter(|name| *name != "default") else {
        return;
    };
    let foreground = random.permille(300);
    state.note(|| format!("{kind:?} {name} is deleted (foreground {foreground})"));
    let _ = state
        .store
        .delete(kind, "", name, &Preconditions::default(), foreground);
}

/// Deletes an object of the operator's own, as somebody might by hand.
fn delete_by_hand(state: &mut State, random: &mut Random) {
    let kind = [Kind::Endpoint, Kind::Bouncer, Kind::Divider][random.below(3) as usize];
    let all: Vec<_> = state.store.all(kind).map(|(name, _)| name.clone()).collect();
    let Some((_, namespace, name)) = random.pick(&all) else {
        return;
    };
    state.note(|| format!("{kind:?} {name} is deleted by hand"));
    let _ = state.store.delete_as_user(kind, namespace, name, false);
}

fn new_pod(state: &mut State, random: &mut Random) {
    let droplets: Vec<String> = state.droplets.keys().cloned().collect();
    let Some(node) = random.pick(&droplets).cloned() else {
        return;
    };
    if state.store.names(Kind::Pod).len() >= MAX_PODS {
        return;
    }
    let namespace = NAMESPACES[random.below(2) as usize];
    if state
        .store
        .value(Kind::Namespace, "", namespace)
        .is_none_or(|space| is_deleting(space))
    {
        return;
    }
    let mut networks = state.store.names(Kind::Network);
    if random.permille(30) {
        networks = vec!["nowhere".into()];
    }
    let Some(network) = random.pick(&networks) else {
        return;
    };
    let name = format!("p{}", random.below(10));
    add_pod(
        state,
        namespace,
        &name,
        &node,
        &json!({"thuban.dev/network": network}),
    );
}

fn end_pod(state: &mut State, random: &mut Random) {
    let pods: Vec<_> = state.store.all(Kind::Pod).map(|(name, _)| name.clone()).collect();
    let Some((kind, namespace, name)) = random.pick(&pods) else {
        return;
    };
    match random.below(10) {
        0..6 => {
            state.note(|| format!("pod {name} is deleted"));
            let _ = state
                .store
                .delete(*kind, namespace, name, &Preconditions::default(), false);
        }
        6..8 => {
            state.note(|| format!("pod {name} has finished"));
            state.store.edit(*kind, namespace, name, |pod| {
                pod["status"]["phase"] = "Succeeded".into();
            });
        }
        _ => {
            state.note(|| format!("pod {name} is deleted by force"));
            state.store.purge(*kind, namespace, name);
        }
    }
}

/// Makes the sandbox of a pod again: DEL, later ADD.
fn sandbox_again(state: &mut State, random: &mut Random) {
    let attached: Vec<(String, String)> = state
        .droplets
        .values()
        .flat_map(|droplet| {
            droplet
                .attachments
                .keys()
                .map(|uid| (droplet.name.clone(), uid.clone()))
        })
        .collect();
    if let Some((node, uid)) = random.pick(&attached) {
        state.note(|| format!("the sandbox of pod {uid} on {node} is made again"));
        cluster::detach(state, node, uid);
    }
}

fn lose_node(state: &mut State, random: &mut Random) {
    if state.droplets.len() < 3 {
        return;
    }
    with_droplet(state, random, cluster::remove_node);
}

fn subscribe(state: &mut State, random: &mut Random) {
    let held: Vec<_> = state
        .droplets
        .values()
        .flat_map(|droplet| droplet.attachments.values())
        .map(|attachment| (attachment.vni, crate::tables::address(&attachment.address)))
        .collect();
    let Some((vni, address)) = random.pick(&held).copied() else {
        return;
    };
    let wanted = random.permille(700);
    let number = random.next();
    with_droplet(state, random, |state, name| {
        let Some(droplet) = state.droplets.get_mut(name) else {
            return;
        };
        if wanted {
            droplet.subscriptions.insert((vni, address));
            droplet.report(Report::Subscribe(vni, address));
            droplet.report(droplet::load(vni, 0, number % 1000));
        } else if droplet.subscriptions.remove(&(vni, address)) {
            droplet.report(Report::Unsubscribe(vni, address));
        }
    });
}
