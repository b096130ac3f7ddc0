//! Tests of what a restore of etcd must not do: give what running pods have to others.

use std::net::IpAddr;
use std::sync::Arc;

use serde_json::json;

use super::{add_vpc, begin, check, says, until};
use crate::cluster::add_pod;
use crate::convergence;
use crate::directed::stripped::cut_off;
use crate::operators;
use crate::restore::{back_up, restore};
use crate::schedule::NAMESPACES;
use crate::simulation::{Simulation, State};
use crate::tables::address;

const EAST: &str = NAMESPACES[0];

/// Makes a VPC and its network, with the addresses that `red` has, and a pod there.
fn add_tenant(simulation: &Simulation, vpc: &str, pod: &str, node: &str) {
    simulation.with(|state| {
        add_vpc(state, vpc, 1);
        add_pod(
            state,
            EAST,
            pod,
            node,
            &json!({"thuban.dev/network": format!("{vpc}-1")}),
        );
    });
}

/// Returns the VNI and the address of a node's only pod.
fn attached(state: &State, node: &str) -> Option<(u32, IpAddr)> {
    let mut attachments = state.droplets[node].attachments.values();
    attachments
        .next()
        .map(|attachment| (attachment.vni, address(&attachment.address)))
}

async fn until_attached(simulation: &Arc<Simulation>, node: &str) {
    until(simulation, "its pod is attached", |state| {
        attached(state, node).is_some()
    })
    .await;
}

#[test]
fn the_number_of_a_vpc_that_a_restore_takes_is_no_others() {
    for seed in 1..=6 {
        check("restored-number", seed, async |simulation| {
            begin(simulation, 1).await;
            simulation.with(back_up);
            add_tenant(simulation, "blue", "p", "n1");
            until_attached(simulation, "n1").await;
            // Its rows of the lost VPC stay, and nobody hears of them.
            cut_off(simulation, "n1", true);
            restore(simulation);
            operators::start(simulation);
            // The lost VPC may be made again, too.
            add_tenant(simulation, ["blue", "green"][seed as usize % 2], "q", "n0");
            until_attached(simulation, "n0").await;
            let numbers = ["n0", "n1"].map(|node| attached(&simulation.lock(), node).map(|(vni, _)| vni));
            if numbers[0] == numbers[1] {
                simulation.lock().violation(format!("both VPCs have {numbers:?}"));
            }
            cut_off(simulation, "n1", false);
            convergence::end_faults(simulation).await;
        });
    }
}

#[test]
fn a_pod_keeps_its_address_though_the_restored_state_lacks_it() {
    for seed in 1..=6 {
        check("restored-address", seed, async |simulation| {
            begin(simulation, 1).await;
            simulation.with(|state| {
                add_pod(state, EAST, "p", "n0", &json!({"thuban.dev/network": "red-1"}));
                back_up(state);
            });
            until_attached(simulation, "n0").await;
            let before = attached(&simulation.lock(), "n0");
            restore(simulation);
            operators::start(simulation);
            simulation.with(|state| {
                add_pod(state, EAST, "q", "n1", &json!({"thuban.dev/network": "red-1"}));
            });
            until_attached(simulation, "n1").await;
            until(simulation, "the first has an Endpoint again", |state| {
                says(state, "p", "Acknowledged")
            })
            .await;
            let state = &mut *simulation.lock();
            let (after, other) = (attached(state, "n0"), attached(state, "n1"));
            if after != before || other == before {
                state.violation(format!(
                    "{before:?} became {after:?}, and the other has {other:?}"
                ));
            }
        });
    }
}
