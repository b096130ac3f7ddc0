//! A new bouncer is named to its users only once its droplet has the network's rows.

use std::time::Duration;

use serde_json::json;
use thuban_proto::transit::row::Row;
use tokio::time::sleep;

use super::{begin, check, end_everything, pod_on, says, until};
use crate::droplet::Manner;
use crate::kind::Kind;
use crate::simulation::State;
use crate::store::text;
use crate::tables::underlay;

/// Returns the droplet where the network's first bouncer serves, and the other one.
fn places(state: &State) -> (&'static str, &'static str) {
    let bouncer = state
        .store
        .value(Kind::Bouncer, "", "red-1-b0")
        .expect("a bouncer");
    if text(bouncer, "/status/droplet") == "n0" {
        ("n0", "n1")
    } else {
        ("n1", "n0")
    }
}

/// Whether a droplet's row of the network names another one as bouncer.
fn names(state: &State, droplet: &str, bouncer: &str) -> bool {
    let address = state.droplets[bouncer].address;
    let rows = state.droplets[droplet].tables.rows.values();
    let mut networks = rows.filter_map(|row| match &row.row {
        Some(Row::Network(row)) => Some(row),
        _ => None,
    });
    networks.any(|row| row.bouncers.iter().any(|bytes| underlay(bytes) == address))
}

#[test]
fn bouncer_is_named_to_nobody_before_its_droplet_acked() {
    for seed in 1..=5 {
        check("announced", seed, async |simulation| {
            begin(simulation, 1).await;
            let (first, second) = places(&simulation.lock());
            pod_on(simulation, "p", first).await;
            until(simulation, "the pod is served", |state| {
                says(state, "p", "Acknowledged")
            })
            .await;
            simulation.with(|state| {
                state.droplets.get_mut(second).expect("a droplet").manner = Manner::Mute;
                state.store.edit(Kind::Network, "", "red-1", |network| {
                    network["spec"]["bouncers"] = json!(2);
                });
            });
            until(simulation, "the second droplet has the pod's row", |state| {
                let mut slots = state.droplets[second].tables.rows.keys();
                slots.any(|slot| matches!(slot, crate::tables::Slot::Bouncer(..)))
            })
            .await;
            sleep(Duration::from_secs(3)).await;
            if names(&simulation.lock(), first, second) {
                let what = "a bouncer that acked nothing is named to its users";
                simulation.lock().violation(what.into());
            }
            simulation.with(|state| {
                state.droplets.get_mut(second).expect("a droplet").manner = Manner::Honest;
            });
            until(simulation, "it is named to its users", |state| {
                names(state, first, second)
            })
            .await;
            end_everything(simulation).await;
        });
    }
}
