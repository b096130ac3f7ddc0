//! Tests of the Leases in which droplets' heartbeats are: they go with their Nodes.

use std::sync::Arc;

use super::{begin, check, end_everything, until};
use crate::cluster::{add_node, remove_node};
use crate::simulation::{Simulation, State};
use crate::store::text;

async fn until_owned(simulation: &Arc<Simulation>, nodes: &[&str]) {
    let is_owned = |state: &State, node: &str| {
        let owners = state.heartbeats.get(node);
        owners.is_some_and(|owners| text(owners, "/0/kind") == "Node" && text(owners, "/0/name") == node)
    };
    until(simulation, "their Nodes own the heartbeats", |state| {
        nodes.iter().all(|node| is_owned(state, node))
    })
    .await;
}

#[test]
fn heartbeats_go_with_their_nodes() {
    for seed in 1..=4 {
        check("heartbeats", seed, async |simulation| {
            begin(simulation, 1).await;
            until_owned(simulation, &["n0", "n1"]).await;
            add_node(simulation, 2);
            until_owned(simulation, &["n2"]).await;
            // One has its owner when its Node goes; the other one is left from before.
            add_node(simulation, 3);
            simulation.with(|state| {
                remove_node(state, "n2");
                remove_node(state, "n3");
            });
            until(simulation, "those of the two that stay are left", |state| {
                state.heartbeats.keys().eq(["n0", "n1"])
            })
            .await;
            end_everything(simulation).await;
        });
    }
}
