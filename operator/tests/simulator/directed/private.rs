//! A network's `spec.egress` reaches every droplet that has the network's row.

use serde_json::{Value, json};
use thuban_proto::transit::row::Row;

use super::{begin, check, end_everything, pod_on, says, until};
use crate::kind::Kind;
use crate::simulation::State;

/// Returns what each droplet's row of a network says, where there is one.
fn private(state: &State) -> Vec<bool> {
    let rows = state
        .droplets
        .values()
        .flat_map(|droplet| droplet.tables.rows.values());
    let networks = rows.filter_map(|row| match &row.row {
        Some(Row::Network(row)) => Some(row.private),
        _ => None,
    });
    networks.collect()
}

#[test]
fn a_networks_egress_is_told_and_taken_back() {
    check("private", 1, async |simulation| {
        begin(simulation, 1).await;
        pod_on(simulation, "p", "n0").await;
        until(simulation, "the pod is served", |state| {
            says(state, "p", "Acknowledged")
        })
        .await;
        for (egress, is_private) in [
            (json!(false), true),
            (json!(true), false),
            (json!(false), true),
            (Value::Null, false),
        ] {
            simulation.with(|state| {
                state.store.edit(Kind::Network, "", "red-1", |network| {
                    network["spec"]["egress"] = egress;
                });
            });
            until(simulation, "all droplets know it", |state| {
                let private = private(state);
                !private.is_empty() && private.iter().all(|private| *private == is_private)
            })
            .await;
        }
        end_everything(simulation).await;
    });
}
