//! Tests that lead operators on purpose to states that chance seldom reaches. Here two lead at a time, and one of them
//! gives back the number of a VPC whose rows a droplet keeps because of the other one. Others need many objects at
//! once, or an Endpoint that pods have in turn. The modules have the rest.

mod announced;
mod late;

mod bandwidth;
mod bouncers;
mod conditions;
mod cost;
mod crowded;
mod denied;
mod drafts;
mod dropped;
mod forged;
mod full;
mod lanes;
mod lost;
mod overlapping;
mod pace;
mod policies;
mod policy_ids;
mod private;
mod readdressed;
mod reported;
mod resting;
mod restored;
mod service_addresses;
mod service_ranges;
mod stripped;
mod told;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::{Value, json};
use thuban_api::identifiers::Vni;
use thuban_rows::{Kind as Row, Kinds};
use tokio::time::{sleep, timeout};

use crate::cluster::{add_node, add_pod};
use crate::convergence;
use crate::droplet::Report;
use crate::invariants::addresses;
use crate::keep;
use crate::kind::Kind;
use crate::operators::{self, Operator};
use crate::schedule;
use crate::simulation::{Simulation, State};
use crate::store::{Preconditions, condition, is_deleting, text};
use crate::tables::Slot;

/// How long a test waits at most.
const WAIT_TIMEOUT: Duration = Duration::from_secs(200);
const LOOK: Duration = Duration::from_millis(1);

pub async fn until(simulation: &Arc<Simulation>, what: &str, is_so: impl Fn(&State) -> bool) {
    simulation.lock().note(|| format!("waiting until {what}"));
    let look = async {
        while !is_so(&simulation.lock()) {
            sleep(LOOK).await;
        }
    };
    if timeout(WAIT_TIMEOUT, look).await.is_err() {
        simulation.lock().violation(format!("it is not so that {what}"));
    }
}

/// Returns the first number that was given out: that of the VPC `red`, even after its end.
fn first_vni(state: &State) -> Vni {
    let events = state.store.events_after(Kind::VniClaim, 0);
    let claim: Value = serde_json::from_slice(&events[0].object).expect("an object");
    let vni = text(&claim, "/metadata/name").parse().ok();
    vni.and_then(Vni::new).expect("a VNI")
}

fn has_rows(state: &State, droplet: &str) -> bool {
    let rows = &state.droplets[droplet].tables.rows;
    rows.keys().any(|slot| slot.vni() == Some(first_vni(state)))
}

fn has_pod(state: &State, droplet: &str) -> bool {
    let rows = &state.droplets[droplet].tables.rows;
    rows.keys()
        .any(|slot| matches!(slot, Slot::Local(vni, _) if *vni == first_vni(state)))
}

pub fn has(state: &State, kind: Kind, name: &str) -> bool {
    state.store.get(kind, "", name).is_some()
}

/// Returns the droplet where a role serves.
fn droplet_of(simulation: &Simulation, kind: Kind, name: &str) -> String {
    let state = simulation.lock();
    let role = state.store.value(kind, "", name).expect("a role");
    text(role, "/status/droplet").to_owned()
}

fn is_claimed(state: &State) -> bool {
    has(state, Kind::VniClaim, &first_vni(state).to_string())
}

fn bounces(state: &State, droplet: &str) -> bool {
    let rows = &state.droplets[droplet].tables.rows;
    rows.keys()
        .any(|slot| matches!(slot, Slot::Bouncer(vni, _) if *vni == first_vni(state)))
}

/// Makes a VPC and its network `VPC-1`. All of them have the same addresses.
fn add_vpc(state: &mut State, name: &str, bouncers: u32) {
    let vpc = json!({
        "metadata": {},
        "spec": {"cidrs": ["10.0.0.0/16"], "dividers": 1, "allowedNamespaces": {}},
    });
    let network = json!({
        "metadata": {},
        "spec": {"vpc": name, "cidrs": ["10.0.1.0/24"], "bouncers": bouncers, "allowedNamespaces": {}},
    });
    let _ = state.store.create(Kind::Vpc, "", name, vpc);
    let _ = state
        .store
        .create(Kind::Network, "", &format!("{name}-1"), network);
}

/// Makes a world without faults: two nodes, a VPC and its network, and an operator that leads them.
pub async fn begin(simulation: &Arc<Simulation>, bouncers: u32) -> Arc<Operator> {
    {
        let state = &mut *simulation.lock();
        state.faults = state.faults.ended();
        state.faults.has_default = false;
        state.faults.is_steady = false;
    }
    for number in 0..2 {
        add_node(simulation, number);
    }
    simulation.with(|state| add_vpc(state, "red", bouncers));
    let first = operators::start(simulation);
    until(simulation, "all droplets follow it", |state| {
        state
            .droplets
            .values()
            .all(|droplet| droplet.follows(first.epoch))
    })
    .await;
    until(simulation, "the network is Provisioned", |state| {
        let network = state.store.value(Kind::Network, "", "red-1");
        network.is_some_and(|network| text(network, "/status/phase") == "Provisioned")
    })
    .await;
    first
}

/// Starts an operator that leads beside the first one, which keeps its droplets and gets no more.
pub async fn second(simulation: &Arc<Simulation>, first: &Operator) -> Arc<Operator> {
    first.is_full.store(true, Relaxed);
    let second = operators::start(simulation);
    until(simulation, "the second leads", |_| second.hub().is_some()).await;
    second
}

pub async fn pod_on(simulation: &Arc<Simulation>, name: &str, node: &str) {
    simulation.with(|state| {
        let annotations = json!({"thuban.dev/network": "red-1"});
        add_pod(state, "east", name, node, &annotations);
    });
    until(simulation, "its droplet has the pod's row", |state| {
        has_pod(state, node)
    })
    .await;
}

/// Makes the same world with a pod on each node.
async fn begin_in_use(simulation: &Arc<Simulation>, bouncers: u32) -> Arc<Operator> {
    let first = begin(simulation, bouncers).await;
    pod_on(simulation, "p", "n0").await;
    pod_on(simulation, "q", "n1").await;
    // The world is quiet after this time.
    sleep(Duration::from_secs(20)).await;
    first
}

pub async fn until_gone(simulation: &Arc<Simulation>) {
    let is_gone = |state: &State| !has(state, Kind::Vpc, "red");
    until(simulation, "the VPC is gone", is_gone).await;
}

pub fn delete(simulation: &Simulation, kind: Kind, namespace: &str, name: &str) {
    simulation.with(|state| {
        let _ = state.store.delete_as_user(kind, namespace, name, false);
        state.note(|| format!("{kind:?} {name} is deleted"));
    });
}

/// Deletes an object past the policies, as the end of its namespace does.
pub fn force(simulation: &Simulation, kind: Kind, namespace: &str, name: &str) {
    simulation.with(|state| {
        let nothing = Preconditions::default();
        let _ = state.store.delete(kind, namespace, name, &nothing, false);
        state.note(|| format!("{kind:?} {name} is deleted past the policies"));
    });
}

/// Deletes everything that users made.
pub fn delete_everything(simulation: &Simulation) {
    delete(simulation, Kind::Pod, "east", "p");
    delete(simulation, Kind::Pod, "east", "q");
    delete(simulation, Kind::Network, "", "red-1");
    delete(simulation, Kind::Vpc, "", "red");
}

/// Deletes everything that users made, and waits until it is gone.
pub async fn end_everything(simulation: &Arc<Simulation>) {
    delete_everything(simulation);
    until_gone(simulation).await;
}

/// Kills the first operator, so that the other one ends the VPC and gives its number back.
async fn end(simulation: &Arc<Simulation>, first: &Operator) {
    first.crash();
    until_gone(simulation).await;
    until(simulation, "its number is free", |state| !is_claimed(state)).await;
}

pub fn check(name: &str, seed: u64, scenario: impl AsyncFnOnce(&Arc<Simulation>) + Send) {
    let (violations, trace) = schedule::within(seed, scenario);
    if !violations.is_empty() {
        keep(format!("{name}-{seed}"), &trace);
    }
    assert!(violations.is_empty(), "seed {seed}: {}", violations.join("; "));
}

#[test]
fn vni_is_kept_while_droplet_of_another_leader_has_rows() {
    for seed in 1..=5 {
        check("joined", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            first.deafen([Kind::Droplet, Kind::Node]);
            let other = second(simulation, &first).await;
            add_node(simulation, 2);
            pod_on(simulation, "p", "n2").await;
            other.deafen(Kind::ALL);
            delete_everything(simulation);
            sleep(Duration::from_mins(2)).await;
            let is_kept = |state: &State| has_rows(state, "n2") && is_claimed(state);
            until(simulation, "the number is kept", is_kept).await;
            other.deafen([]);
            until(simulation, "the rows are gone", |state| !has_rows(state, "n2")).await;
            end(simulation, &first).await;
        });
    }
}

#[test]
fn a_number_rests_while_another_leader_may_bring_rows_of_it() {
    for seed in 1..=5 {
        check("rest", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            pod_on(simulation, "p", "n0").await;
            let other = second(simulation, &first).await;
            other.deafen(Kind::ALL);
            delete_everything(simulation);
            until(simulation, "the first has taken all rows away", |state| {
                state.droplets.keys().all(|name| !has_rows(state, name))
            })
            .await;
            first.misses_ends.store(true, Relaxed);
            simulation.lock().droplets["n0"].report(Report::Break);
            until(simulation, "the second has brought them again", |state| {
                has_rows(state, "n0")
            })
            .await;
            until_gone(simulation).await;
            // The stream's keepalive takes this long, and no watch is later.
            sleep(Duration::from_secs(15)).await;
            first.misses_ends.store(false, Relaxed);
            other.deafen([]);
            until(simulation, "the rows are gone", |state| !has_rows(state, "n0")).await;
            end(simulation, &first).await;
        });
    }
}

/// Replaces the transitd of a node by one that understands other rows.
fn exchange(simulation: &Simulation, node: &str, kinds: &Kinds) {
    simulation.with(|state| {
        if let Some(droplet) = state.droplets.get_mut(node) {
            droplet.kinds = kinds.clone();
            droplet.report(Report::Break);
        }
    });
}

/// Whether the endpoint of a pod has a condition with this reason.
fn says(state: &State, pod: &str, reason: &str) -> bool {
    let mut endpoints = state.store.values(Kind::Endpoint);
    let endpoint = endpoints.find(|endpoint| text(endpoint, "/spec/podRef/name") == pod);
    let ready = endpoint.and_then(|endpoint| condition(endpoint, "Ready"));
    ready.is_some_and(|ready| text(ready, "/reason") == reason)
}

#[test]
fn objects_wait_until_bouncers_understand_their_rows() {
    for seed in 1..=5 {
        check("outdated", seed, async |simulation| {
            begin(simulation, 1).await;
            let old: Kinds = Row::ALL
                .iter()
                .copied()
                .filter(|kind| *kind != Row::Bouncer)
                .collect();
            for node in ["n0", "n1"] {
                exchange(simulation, node, &old);
            }
            // The droplets have dialled again after this time.
            sleep(Duration::from_secs(20)).await;
            pod_on(simulation, "p", "n0").await;
            until(simulation, "its endpoint waits for an upgrade", |state| {
                says(state, "p", "WaitsForUpgrade")
            })
            .await;
            sleep(Duration::from_mins(2)).await;
            until(simulation, "it still does", |state| {
                says(state, "p", "WaitsForUpgrade")
            })
            .await;
            for node in ["n0", "n1"] {
                exchange(simulation, node, &Kinds::all());
            }
            until(simulation, "its endpoint is Provisioned", |state| {
                says(state, "p", "Acknowledged")
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

fn is_provisioned(state: &State, kind: Kind, namespace: &str, name: &str) -> bool {
    let object = state.store.value(kind, namespace, name);
    object.is_some_and(|object| convergence::is_provisioned(object) && !is_deleting(object))
}

#[test]
fn workflows_of_one_kind_run_side_by_side() {
    const VPCS: usize = 12;
    for seed in 1..=3 {
        check("side-by-side", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            simulation.lock().faults.slow_request = 1000;
            let names: Vec<String> = (0..VPCS).map(|number| format!("v{number}")).collect();
            simulation.with(|state| {
                for name in &names {
                    let vpc = json!({"metadata": {}, "spec": {"cidrs": ["10.0.0.0/16"], "dividers": 1}});
                    let _ = state.store.create(Kind::Vpc, "", name, vpc);
                }
            });
            until(simulation, "all VPCs are Provisioned", |state| {
                names
                    .iter()
                    .all(|name| is_provisioned(state, Kind::Vpc, "", name))
            })
            .await;
            let most = only.most_under_way(Kind::Vpc);
            if most < VPCS {
                let what = format!("of {VPCS} VPCs, {most} at most were written at the same time");
                simulation.lock().violation(what);
            }
        });
    }
}

/// Creates a user's Endpoint `db`.
fn endpoint_db(state: &mut State) {
    let spec = json!({"type": "Simple", "vpc": "", "network": "red-1"});
    let endpoint = json!({"metadata": {}, "spec": spec});
    let _ = state.store.create(Kind::Endpoint, "east", "db", endpoint);
}

/// Adds a pod that names it.
fn pod_of_db(simulation: &Simulation, name: &str, node: &str) {
    simulation.with(|state| {
        let annotations = json!({"thuban.dev/network": "red-1", "thuban.dev/endpoint": "db"});
        add_pod(state, "east", name, node, &annotations);
    });
}

#[test]
fn users_endpoint_is_in_init_until_its_next_pod_is_served() {
    for seed in 1..=3 {
        check("next-pod", seed, async |simulation| {
            begin(simulation, 1).await;
            simulation.with(endpoint_db);
            let is_at = |state: &State, droplet: &str| {
                let db = state.store.value(Kind::Endpoint, "east", "db");
                is_provisioned(state, Kind::Endpoint, "east", "db")
                    && db.is_some_and(|db| text(db, "/status/droplet") == droplet)
            };
            pod_of_db(simulation, "p", "n0");
            until(simulation, "the first pod has it", |state| is_at(state, "n0")).await;
            delete(simulation, Kind::Pod, "east", "p");
            until(simulation, "it is in Init without a pod", |state| {
                let db = state.store.value(Kind::Endpoint, "east", "db");
                db.is_some_and(|db| text(db, "/status/phase") == "Init" && !addresses(db).is_empty())
            })
            .await;
            pod_of_db(simulation, "q", "n1");
            until(simulation, "the second pod has it", |state| is_at(state, "n1")).await;
            // The third pod waits already when the second one goes.
            pod_of_db(simulation, "r", "n0");
            delete(simulation, Kind::Pod, "east", "q");
            until(simulation, "the third pod has it", |state| is_at(state, "n0")).await;
            let events = simulation.lock().store.events_after(Kind::Endpoint, 0).to_vec();
            let states = events.iter().map(|event| {
                let db: Value = serde_json::from_slice(&event.object).expect("an object");
                let part = |path| text(&db, path).to_owned();
                (part("/status/phase"), part("/status/droplet"))
            });
            let mut states: Vec<(String, String)> = states.collect();
            states.dedup();
            let end = states
                .iter()
                .rev()
                .take(3)
                .map(|(phase, at)| (phase.as_str(), at.as_str()));
            let end: Vec<_> = end.collect();
            if end != [("Provisioned", "n0"), ("Init", "n0"), ("Provisioned", "n1")] {
                simulation.lock().violation(format!("it went through {states:?}"));
            }
        });
    }
}
