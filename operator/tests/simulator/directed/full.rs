//! Tests of droplets whose tables are full: rows are sent again, objects say what they wait for, and roles go to
//! droplets with room.

use std::time::Duration;

use serde_json::{Value, json};
use thuban_rows::Kind as Row;
use tokio::time::sleep;

use super::conditions::until_pod_says;
use super::{begin, check, delete, end_everything, pod_on, until};
use crate::cluster::add_pod;
use crate::kind::Kind;
use crate::simulation::{Simulation, State};
use crate::store::text;

const NODES: [&str; 2] = ["n0", "n1"];

/// Lets a droplet have room for so many rows of a kind, beside those that it has.
fn leave_room(simulation: &Simulation, droplet: &str, kind: Row, more: usize) {
    simulation.with(|state| {
        let tables = &mut state.droplets.get_mut(droplet).expect("a droplet").tables;
        let used = tables.rows.keys().filter(|slot| slot.kind() == kind).count();
        tables.room.insert(kind, used + more);
    });
}

fn add(simulation: &Simulation, pod: &str, node: &str) {
    simulation.with(|state| {
        add_pod(state, "east", pod, node, &json!({"thuban.dev/network": "red-1"}));
    });
}

fn bouncer(state: &State) -> Option<&Value> {
    state
        .store
        .value(Kind::Bouncer, "", "red-1-b0")
        .map(AsRef::as_ref)
}

fn serves_on(state: &State, droplet: &str) -> bool {
    bouncer(state).is_some_and(|bouncer| text(bouncer, "/status/droplet") == droplet)
}

/// Whether the bouncer says in its condition what this droplet has no room for.
fn bouncer_says(state: &State, droplet: &str) -> bool {
    let conditions = bouncer(state).and_then(|bouncer| bouncer.pointer("/status/conditions")?.as_array());
    conditions.into_iter().flatten().any(|condition| {
        let message = text(condition, "/message");
        text(condition, "/reason") == "TableFull"
            && message.contains(droplet)
            && message.contains("of kind bouncer")
    })
}

fn times_full(simulation: &Simulation, droplet: &str) -> usize {
    simulation.lock().droplets[droplet].tables.times_full
}

#[test]
fn a_bouncer_without_room_moves_to_a_droplet_with_room() {
    for seed in 1..=6 {
        check("full-bouncer", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "p", "n0").await;
            until_pod_says(simulation, "p", "Acknowledged").await;
            let [full, other] = if serves_on(&simulation.lock(), "n0") {
                NODES
            } else {
                ["n1", "n0"]
            };
            leave_room(simulation, full, Row::Bouncer, 0);
            add(simulation, "q", "n1");
            until_pod_says(simulation, "q", "Acknowledged").await;
            until(simulation, "the bouncer serves elsewhere", |state| {
                serves_on(state, other)
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn rows_are_sent_again_until_a_full_table_has_room() {
    for seed in 1..=6 {
        check("full-home", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "p", "n0").await;
            until_pod_says(simulation, "p", "Acknowledged").await;
            leave_room(simulation, "n0", Row::Local, 0);
            add(simulation, "q", "n0");
            until_pod_says(simulation, "q", "TableFull").await;
            sleep(Duration::from_mins(20)).await;
            let times = times_full(simulation, "n0");
            // After 10, 20, 40, 80, 160 and then 300 s each.
            if !(7..=11).contains(&times) {
                simulation
                    .lock()
                    .violation(format!("the row was sent {times} times"));
            }
            leave_room(simulation, "n0", Row::Local, 1);
            sleep(Duration::from_mins(4)).await;
            until_pod_says(simulation, "q", "Acknowledged").await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_bouncer_without_room_anywhere_says_so_and_stays() {
    for seed in 1..=6 {
        check("full-everywhere", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "p", "n0").await;
            until_pod_says(simulation, "p", "Acknowledged").await;
            for node in NODES {
                simulation.with(|state| {
                    let tables = &mut state.droplets.get_mut(node).expect("a droplet").tables;
                    tables.room.insert(Row::Bouncer, 1);
                });
            }
            add(simulation, "q", "n1");
            until_pod_says(simulation, "q", "TableFull").await;
            until(simulation, "the bouncer says so", |state| {
                NODES.iter().any(|node| bouncer_says(state, node))
            })
            .await;
            // It does not go back and forth between them.
            sleep(Duration::from_mins(20)).await;
            let times = NODES.map(|node| times_full(simulation, node));
            if times.iter().any(|times| *times > 15) {
                simulation
                    .lock()
                    .violation(format!("rows were sent {times:?} times"));
            }
            until_pod_says(simulation, "q", "TableFull").await;
            // Its row makes room for the other one.
            delete(simulation, Kind::Pod, "east", "p");
            sleep(Duration::from_mins(5)).await;
            until_pod_says(simulation, "q", "Acknowledged").await;
            until(simulation, "the bouncer says nothing of it any more", |state| {
                !NODES.iter().any(|node| bouncer_says(state, node))
            })
            .await;
            end_everything(simulation).await;
        });
    }
}
