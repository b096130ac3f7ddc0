//! Tests that lead operators on purpose to states that chance seldom reaches. Two lead at a time, and one of them gives
//! back the number of a VPC whose rows a droplet keeps because of the other one. One dies after it removed a role's
//! tables and before it lets the role's object go. One has two roles on one droplet, because there is no other droplet.
//! Other tests cover what takes time or many objects: less need that lasts, many objects at once, an Endpoint that pods
//! have in turn.

mod announced;
mod late;

mod bandwidth;
mod denied;
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
mod service_ranges;
mod stripped;
mod told;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
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

/// The first VNI that is given out.
const VNI: Vni = Vni::MIN;
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

fn has_rows(state: &State, droplet: &str) -> bool {
    let rows = &state.droplets[droplet].tables.rows;
    rows.keys().any(|slot| slot.vni() == Some(VNI))
}

fn has_pod(state: &State, droplet: &str) -> bool {
    let rows = &state.droplets[droplet].tables.rows;
    rows.keys().any(|slot| matches!(slot, Slot::Local(VNI, _)))
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
    has(state, Kind::VniClaim, &VNI.to_string())
}

fn bounces(state: &State, droplet: &str) -> bool {
    let rows = &state.droplets[droplet].tables.rows;
    rows.keys().any(|slot| matches!(slot, Slot::Bouncer(VNI, _)))
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
    simulation.with(|state| {
        let vpc = json!({
            "metadata": {},
            "spec": {"cidrs": ["10.0.0.0/16"], "dividers": 1, "allowedNamespaces": {}},
        });
        let network = json!({
            "metadata": {},
            "spec": {"vpc": "red", "cidrs": ["10.0.1.0/24"], "bouncers": bouncers, "allowedNamespaces": {}},
        });
        let _ = state.store.create(Kind::Vpc, "", "red", vpc);
        let _ = state.store.create(Kind::Network, "", "red-1", network);
    });
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
        let preconditions = Preconditions::default();
        let _ = state.store.delete(kind, namespace, name, &preconditions, false);
        state.note(|| format!("{kind:?} {name} is deleted"));
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

#[test]
fn deleted_bouncer_with_tables_serves_under_next_leader() {
    for seed in 1..=5 {
        check("bouncers", seed, async |simulation| {
            let first = begin_in_use(simulation, 2).await;
            let droplet = {
                let state = &mut *simulation.lock();
                state.faults.is_steady = true;
                state.faults.late_ack = 1000;
                let bouncer = state.store.value(Kind::Bouncer, "", "red-1-b1");
                text(bouncer.expect("a second bouncer"), "/status/droplet").to_owned()
            };
            delete(simulation, Kind::Network, "", "red-1");
            delete(simulation, Kind::Bouncer, "", "red-1-b1");
            until(simulation, "its tables are gone", |state| {
                !bounces(state, &droplet)
            })
            .await;
            first.crash();
            delete(simulation, Kind::Bouncer, "", "red-1-b0");
            simulation.lock().faults.late_ack = 0;
            let is_there = |state: &State| has(state, Kind::Bouncer, "red-1-b1");
            until(simulation, "its object is still there", is_there).await;
            let next = operators::start(simulation);
            until(simulation, "all droplets follow the next", |state| {
                let mut droplets = state.droplets.values();
                droplets.all(|droplet| droplet.follows(next.epoch))
            })
            .await;
            until(simulation, "the bouncer's object is gone", |state| {
                !is_there(state)
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn bouncer_leaves_only_if_next_leader_will_know_another() {
    for seed in 1..=5 {
        check("substitute", seed, async |simulation| {
            let only = begin_in_use(simulation, 1).await;
            simulation.lock().faults.late_ack = 1000;
            delete(simulation, Kind::Bouncer, "", "red-1-b0");
            let field = |state: &State, name: &str, field: &str| {
                let bouncer = state.store.value(Kind::Bouncer, "", name);
                bouncer.and_then(|bouncer| bouncer.pointer(field).cloned())
            };
            let is_early = AtomicBool::new(false);
            until(simulation, "it is made again", |state| {
                let leaves = field(state, "red-1-b0", "/status/leaving").is_some();
                let is_known = field(state, "red-1-b1", "/status/droplet").is_some();
                is_early.fetch_or(leaves && !is_known, Relaxed);
                let serves = field(state, "red-1-b0", "/status/phase") == Some("Provisioned".into());
                serves && field(state, "red-1-b0", "/metadata/deletionTimestamp").is_none()
            })
            .await;
            if is_early.into_inner() {
                simulation
                    .lock()
                    .violation("it left before another was known".into());
            }
            simulation.lock().faults.late_ack = 0;
            end_everything(simulation).await;
            only.crash();
        });
    }
}

#[test]
fn bouncers_sharing_a_droplet_separate_when_another_returns() {
    for seed in 1..=5 {
        check("shared", seed, async |simulation| {
            let only = begin(simulation, 2).await;
            let at = |state: &State, name: &str| {
                let bouncer = state.store.value(Kind::Bouncer, "", name);
                bouncer.map(|bouncer| text(bouncer, "/status/droplet").to_owned())
            };
            let is_shared = |state: &State| at(state, "red-1-b0") == at(state, "red-1-b1");
            let says_spread = |state: &State| {
                let network = state.store.value(Kind::Network, "", "red-1");
                network.is_some_and(|network| network["status"].to_string().contains("DropletsShared"))
            };
            // From then on droplets are judged.
            sleep(Duration::from_mins(1)).await;
            let reach = |name: &str, is_reachable: bool| {
                let droplets = &mut simulation.lock().droplets;
                let droplet = droplets.get_mut(name).expect("a droplet");
                droplet.is_reachable = is_reachable;
                droplet.report(Report::Break);
            };
            for name in ["red-1-b0", "red-1-b1"] {
                until(simulation, "they are apart", |state| !is_shared(state)).await;
                let droplet = at(&simulation.lock(), name).expect("a bouncer");
                reach(&droplet, false);
                until(
                    simulation,
                    "they share the droplet that is left, and the network says so",
                    |state| is_shared(state) && says_spread(state),
                )
                .await;
                reach(&droplet, true);
            }
            until(simulation, "they are apart again", |state| {
                !is_shared(state) && !says_spread(state)
            })
            .await;
            only.crash();
        });
    }
}

#[test]
fn a_bouncer_goes_though_an_endpoint_outlives_its_network() {
    for seed in 1..=5 {
        check("orphan", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            let other = second(simulation, &first).await;
            other.deafen([Kind::Network]);
            delete(simulation, Kind::Network, "", "red-1");
            until(simulation, "the network is gone", |state| {
                !has(state, Kind::Network, "red-1")
            })
            .await;
            first.crash();
            simulation.with(|state| {
                for (name, node) in [("p", "n0"), ("q", "n1")] {
                    add_pod(state, "east", name, node, &json!({"thuban.dev/network": "red-1"}));
                }
            });
            until(
                simulation,
                "its pods have addresses and its bouncer is deleted",
                |state| {
                    let endpoints = state.store.values(Kind::Endpoint);
                    let served = endpoints.filter(|endpoint| !addresses(endpoint).is_empty());
                    let mut bouncers = state.store.values(Kind::Bouncer);
                    served.count() == 2 && bouncers.any(|bouncer| is_deleting(bouncer))
                },
            )
            .await;
            other.deafen([]);
            until(simulation, "no bouncer is left", |state| {
                state.store.values(Kind::Bouncer).next().is_none()
            })
            .await;
            convergence::end_faults(simulation).await;
            delete(simulation, Kind::Pod, "east", "p");
            delete(simulation, Kind::Pod, "east", "q");
            delete(simulation, Kind::Vpc, "", "red");
            until_gone(simulation).await;
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
fn a_bouncer_goes_after_five_minutes_of_less_need() {
    for seed in 1..=3 {
        check("scale-in", seed, async |simulation| {
            begin_in_use(simulation, 1).await;
            simulation.with(|state| {
                let scaling = json!({"maxBouncers": 2, "endpointsPerBouncer": 1});
                let scale = |network: &mut Value| network["spec"]["autoscale"] = scaling;
                state.store.edit(Kind::Network, "", "red-1", scale);
            });
            let has_two = |state: &State| is_provisioned(state, Kind::Bouncer, "", "red-1-b1");
            until(simulation, "each endpoint has a bouncer", has_two).await;
            let leave = async |pod: &str| {
                delete(simulation, Kind::Pod, "east", pod);
                until(simulation, "one endpoint is left", |state| {
                    state.store.values(Kind::Endpoint).count() == 1
                })
                .await;
            };
            let stay_for = async |seconds| {
                sleep(Duration::from_secs(seconds)).await;
                if !has_two(&simulation.lock()) {
                    let what = format!("the second bouncer went within {seconds} s");
                    simulation.lock().violation(what);
                }
            };
            leave("q").await;
            stay_for(240).await;
            // The need returns, and the time starts again.
            pod_on(simulation, "r", "n1").await;
            stay_for(30).await;
            leave("r").await;
            stay_for(290).await;
            until(simulation, "the second bouncer is gone", |state| {
                !has(state, Kind::Bouncer, "red-1-b1")
            })
            .await;
            end_everything(simulation).await;
        });
    }
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
