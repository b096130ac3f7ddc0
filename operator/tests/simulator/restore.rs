//! A restore of etcd: the objects are those of a backup again. Machines, tables and pods' sandboxes stay as they are.

use std::sync::Arc;

use crate::cluster::{register_node, remove_node};
use crate::invariants::{counts, key_of_end};
use crate::kind::Kind;
use crate::simulation::{Simulation, State};

/// Makes a backup, in the place of the last one.
pub fn back_up(state: &mut State) {
    state.note(|| "etcd is backed up".into());
    state.backup = Some(state.store.backup());
}

/// Restores the last backup, if there is one. The leading operator finds an older Lease and gives up, so no operator
/// outlives it.
pub fn restore(simulation: &Arc<Simulation>) {
    simulation.with(|state| {
        let Some(backup) = state.backup.clone() else {
            return;
        };
        state.note(|| "etcd is restored".into());
        state.operators.iter().for_each(|operator| operator.crash());
        state.store.restore(backup);
        claims_rest_anew(state);
        // The cloud's controller and kubelets bring the Nodes in line with the machines.
        let nodes = state.store.names(Kind::Node);
        for name in &nodes {
            if !state.droplets.contains_key(name) {
                remove_node(state, name);
            }
        }
        let machines = state.droplets.values();
        let machines: Vec<_> = machines
            .map(|machine| (machine.name.clone(), machine.address))
            .collect();
        for (name, address) in machines {
            if !nodes.contains(&name) {
                register_node(state, &name, address);
            }
        }
    });
    simulation.stir();
    simulation.collect.notify_one();
}

/// Notes for each claim without its Endpoint that its address begins to rest now: the next leader sees it so.
fn claims_rest_anew(state: &mut State) {
    let now = state.elapsed();
    let all = state.store.values(Kind::IpClaim);
    let free = all.filter(|claim| !counts(state, claim));
    state.ends = free.map(|claim| (key_of_end(claim), now)).collect();
}
