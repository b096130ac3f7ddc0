//! Tests of objects that ask for one range at the same time: the API server stores what the first one has only after
//! the second one was judged.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use super::{begin, check, delete, end_everything, has, until};
use crate::kind::Kind;
use crate::simulation::{Simulation, State};
use crate::store::{condition, text};

/// How late the first status is stored: within the second in which both objects are made.
const LATE: Duration = Duration::from_millis(400);

fn network(state: &mut State, name: &str, range: &str) {
    let network = json!({
        "metadata": {},
        "spec": {"vpc": "red", "cidrs": [range], "bouncers": 1, "allowedNamespaces": {}},
    });
    let _ = state.store.create(Kind::Network, "", name, network);
}

fn widen(state: &mut State, kind: Kind, name: &str, range: &str) {
    state.store.edit(kind, "", name, |object| {
        let ranges = object["spec"]["cidrs"].as_array_mut().expect("ranges");
        ranges.push(range.into());
    });
}

fn has_in_force(state: &State, kind: Kind, name: &str, range: &str) -> bool {
    let object = state.store.value(kind, "", name);
    let ranges = object.and_then(|object| object.pointer("/status/cidrs")?.as_array());
    ranges.is_some_and(|ranges| ranges.contains(&range.into()))
}

/// Returns the reason of the condition `Accepted`.
fn accepted(state: &State, kind: Kind, name: &str) -> String {
    let object = state.store.value(kind, "", name);
    let accepted = object.and_then(|object| condition(object, "Accepted"));
    accepted.map_or_else(String::new, |accepted: &Value| {
        text(accepted, "/reason").to_owned()
    })
}

/// Lets the first object ask at the beginning of a second, and the second one while the first one's status is on its
/// way.
async fn ask_both(
    simulation: &Arc<Simulation>,
    kind: Kind,
    first: impl FnOnce(&mut State),
    second: impl FnOnce(&mut State),
) {
    let into_second = simulation.lock().elapsed().subsec_millis();
    sleep(Duration::from_millis(1010 - u64::from(into_second))).await;
    simulation.with(|state| {
        state.late_status = Some((kind, LATE));
        first(state);
    });
    until(simulation, "the first status is on its way", |state| {
        state.late_status.is_none()
    })
    .await;
    simulation.with(second);
}

#[test]
fn of_two_new_networks_with_one_range_one_is_refused() {
    for seed in 1..=8 {
        check("overlapping", seed, async |simulation| {
            begin(simulation, 1).await;
            // The world is quiet after this time.
            sleep(Duration::from_secs(20)).await;
            let range = "10.0.2.0/24";
            ask_both(
                simulation,
                Kind::Network,
                |state| network(state, "red-z", range),
                |state| network(state, "red-a", range),
            )
            .await;
            until(simulation, "one has the range, the other says so", |state| {
                has_in_force(state, Kind::Network, "red-z", range)
                    && accepted(state, Kind::Network, "red-a") == "RangeOverlaps"
            })
            .await;
            delete(simulation, Kind::Network, "", "red-z");
            until(simulation, "the other one has it then", |state| {
                !has(state, Kind::Network, "red-z") && has_in_force(state, Kind::Network, "red-a", range)
            })
            .await;
            delete(simulation, Kind::Network, "", "red-a");
            end_everything(simulation).await;
        });
    }
}

#[test]
fn of_two_networks_that_append_one_range_one_is_refused() {
    for seed in 1..=8 {
        check("appended", seed, async |simulation| {
            begin(simulation, 1).await;
            simulation.with(|state| network(state, "red-2", "10.0.2.0/24"));
            until(simulation, "both networks are in force", |state| {
                has_in_force(state, Kind::Network, "red-2", "10.0.2.0/24")
            })
            .await;
            // The world is quiet after this time.
            sleep(Duration::from_secs(20)).await;
            let range = "10.0.9.0/24";
            ask_both(
                simulation,
                Kind::Network,
                |state| widen(state, Kind::Network, "red-2", range),
                |state| widen(state, Kind::Network, "red-1", range),
            )
            .await;
            until(simulation, "one has the range, the other says so", |state| {
                has_in_force(state, Kind::Network, "red-2", range)
                    && accepted(state, Kind::Network, "red-1") == "RangeOverlaps"
            })
            .await;
            // What was in force serves on.
            until(simulation, "the other one keeps its own", |state| {
                has_in_force(state, Kind::Network, "red-1", "10.0.1.0/24")
            })
            .await;
            delete(simulation, Kind::Network, "", "red-2");
            end_everything(simulation).await;
        });
    }
}

#[test]
fn default_vpc_and_a_new_vpc_do_not_get_the_same_range() {
    for seed in 1..=8 {
        check("default-vpc", seed, async |simulation| {
            begin(simulation, 1).await;
            let vpc = |range: &str| json!({"metadata": {}, "spec": {"cidrs": [range], "dividers": 1}});
            simulation.with(|state| {
                let _ = state.store.create(Kind::Vpc, "", "default", vpc("10.244.0.0/24"));
            });
            until(simulation, "the VPC is in force", |state| {
                has_in_force(state, Kind::Vpc, "default", "10.244.0.0/24")
            })
            .await;
            sleep(Duration::from_secs(20)).await;
            let range = "10.7.0.0/16";
            ask_both(
                simulation,
                Kind::Vpc,
                |state| drop(state.store.create(Kind::Vpc, "", "blue", vpc(range))),
                |state| widen(state, Kind::Vpc, "default", range),
            )
            .await;
            until(simulation, "one has the range, the other says so", |state| {
                has_in_force(state, Kind::Vpc, "blue", range)
                    && accepted(state, Kind::Vpc, "default") == "RangeRefused"
            })
            .await;
            delete(simulation, Kind::Vpc, "", "blue");
            end_everything(simulation).await;
        });
    }
}

#[test]
fn what_is_in_force_becomes_ready_whatever_is_asked_later() {
    for seed in 1..=8 {
        check("refused-early", seed, async |simulation| {
            begin(simulation, 1).await;
            // Roles don't work at once.
            simulation.lock().faults.late_ack = 1000;
            let objects = [
                (Kind::Network, "red-2", "10.0.2.0/24", "10.0.1.0/24"),
                (Kind::Vpc, "blue", "10.9.0.0/16", "127.0.0.0/8"),
            ];
            simulation.with(|state| {
                network(state, "red-2", objects[0].2);
                let vpc = json!({"metadata": {}, "spec": {"cidrs": [objects[1].2], "dividers": 1}});
                let _ = state.store.create(Kind::Vpc, "", "blue", vpc);
            });
            for (kind, name, range, refused) in objects {
                until(simulation, "it is in force", |state| {
                    has_in_force(state, kind, name, range)
                })
                .await;
                simulation.with(|state| widen(state, kind, name, refused));
                until(simulation, "the new range is refused", |state| {
                    accepted(state, kind, name).starts_with("Range")
                })
                .await;
            }
            simulation.lock().faults.late_ack = 0;
            for (kind, name, ..) in objects {
                until(simulation, "the old range is served", |state| {
                    let object = state.store.value(kind, "", name);
                    object.is_some_and(|object| text(object, "/status/phase") == "Provisioned")
                })
                .await;
                delete(simulation, kind, "", name);
            }
            end_everything(simulation).await;
        });
    }
}
