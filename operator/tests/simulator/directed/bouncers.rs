//! Tests of bouncers that leave, move or come back. An operator dies after it removed a bouncer's tables and before it
//! lets the object go. Two bouncers share the only droplet that is left. Packets are still on their way to a bouncer
//! that nobody uses any more.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use serde_json::{Value, json};
use thuban_proto::transit::row;
use tokio::time::{Instant, sleep};

use super::{
    begin, begin_in_use, bounces, check, delete, droplet_of, end_everything, has, is_provisioned, pod_on,
    second, until, until_gone,
};
use crate::cluster::add_pod;
use crate::convergence;
use crate::droplet::Report;
use crate::invariants::addresses;
use crate::kind::Kind;
use crate::operators;
use crate::simulation::{Simulation, State};
use crate::store::{is_deleting, text};
use crate::tables::underlay;

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

/// Whether any droplet sends packets of the network to a bouncer on `droplet`.
fn is_used(state: &State, droplet: &str) -> bool {
    let address = state.droplets[droplet].address;
    let mut rows = state
        .droplets
        .values()
        .flat_map(|other| other.tables.rows.values());
    rows.any(|row| match &row.row {
        Some(row::Row::Network(network)) => network
            .bouncers
            .iter()
            .any(|bouncer| underlay(bouncer) == address),
        _ => false,
    })
}

/// Checks that a bouncer keeps its tables for a while after the last droplet has ceased to use it: packets may still
/// wait in queues.
async fn check_late_packets(simulation: &Arc<Simulation>, droplet: &str) {
    until(simulation, "no droplet uses the bouncer", |state| {
        !is_used(state, droplet)
    })
    .await;
    let unused = Instant::now();
    until(simulation, "its tables are gone", |state| {
        !bounces(state, droplet)
    })
    .await;
    if unused.elapsed() < Duration::from_millis(990) {
        let what = format!("the tables went {:?} after the last user", unused.elapsed());
        simulation.lock().violation(what);
    }
}

#[test]
fn a_bouncer_that_moves_serves_packets_on_their_way() {
    for seed in 1..=5 {
        check("moved", seed, async |simulation| {
            begin_in_use(simulation, 1).await;
            let droplet = droplet_of(simulation, Kind::Bouncer, "red-1-b0");
            simulation.with(|state| {
                let cordon = |node: &mut Value| node["spec"]["unschedulable"] = true.into();
                state.store.edit(Kind::Node, "", &droplet, cordon);
            });
            check_late_packets(simulation, &droplet).await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_bouncer_that_leaves_serves_packets_on_their_way() {
    for seed in 1..=5 {
        check("left", seed, async |simulation| {
            begin_in_use(simulation, 2).await;
            let droplet = droplet_of(simulation, Kind::Bouncer, "red-1-b1");
            simulation.with(|state| {
                let scale = |network: &mut Value| network["spec"]["bouncers"] = 1.into();
                state.store.edit(Kind::Network, "", "red-1", scale);
            });
            check_late_packets(simulation, &droplet).await;
            end_everything(simulation).await;
        });
    }
}
