//! Tests of a droplet that reports attachments which are not there: whose addresses it blocks, and for how long.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use serde_json::json;
use thuban_api::identifiers::mapped;
use thuban_proto::transit::Attachment;
use tokio::time::sleep;

use super::{begin, check, end_everything, first_vni, pod_on, says, until};
use crate::cluster::add_pod;
use crate::droplet::Report;
use crate::invariants::addresses;
use crate::kind::Kind;
use crate::schedule::NAMESPACES;
use crate::simulation::{Simulation, State};
use crate::store::text;

const EAST: &str = NAMESPACES[0];
/// The droplet that reports what is not there.
const THIEF: &str = "n1";

/// Makes the thief report that a pod has an address of the network.
fn forge(state: &State, number: u8, (name, uid): (&str, &str)) {
    let address = IpAddr::from(Ipv4Addr::new(10, 0, 1, number));
    let forged = Attachment {
        container_id: format!("forged-{number}"),
        ifname: "eth0".into(),
        pod_uid: uid.to_owned(),
        pod_namespace: EAST.to_owned(),
        pod_name: name.to_owned(),
        vni: first_vni(state).get(),
        address: mapped(address).to_vec(),
        ..Attachment::default()
    };
    state.droplets[THIEF].report(Report::Attached(forged));
}

fn uid_of(state: &State, pod: &str) -> String {
    let pod = state.store.value(Kind::Pod, EAST, pod).expect("a pod");
    text(pod, "/metadata/uid").to_owned()
}

fn is_attached(state: &State, node: &str) -> bool {
    !state.droplets[node].attachments.is_empty()
}

fn keep_kubelet_away(simulation: &Simulation, node: &str, is_away: bool) {
    let state = &mut *simulation.lock();
    state.droplets.get_mut(node).expect("a droplet").is_kubelet_away = is_away;
    simulation.stir();
}

#[test]
fn forged_attachments_block_a_networks_addresses_for_a_while() {
    for seed in 1..=4 {
        check("forged", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "q", "n0").await;
            simulation.with(|state| {
                let q = uid_of(state, "q");
                for number in 1..=254 {
                    // Some are of a pod that is bound to another node, the others of no pod.
                    let ghost = format!("ghost-{number}");
                    let pod = if number < 60 {
                        ("q", &*q)
                    } else {
                        (&*ghost, &*ghost)
                    };
                    forge(state, number, pod);
                }
            });
            sleep(Duration::from_mins(5)).await;
            pod_on(simulation, "p", "n0").await;
            until(simulation, "a new pod is served", |state| {
                says(state, "p", "Acknowledged")
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn the_address_of_a_bound_pod_is_kept_without_a_claim() {
    for seed in 1..=4 {
        check("unclaimed", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "q", THIEF).await;
            until(simulation, "its pod is attached", |state| {
                is_attached(state, THIEF)
            })
            .await;
            // As if etcd had lost the claims of some of its addresses.
            simulation.with(|state| {
                let q = uid_of(state, "q");
                for number in 1..=10 {
                    forge(state, number, ("q", &*q));
                }
            });
            sleep(Duration::from_mins(6)).await;
            pod_on(simulation, "p", "n0").await;
            until(simulation, "a new pod has another address", |state| {
                let mut endpoints = state.store.values(Kind::Endpoint);
                let p = endpoints.find(|endpoint| text(endpoint, "/spec/podRef/name") == "p");
                p.is_some_and(|p| addresses(p) == ["10.0.1.11"])
            })
            .await;
            // It dials again, and reports what is there.
            simulation.lock().droplets[THIEF].report(Report::Break);
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_pods_attachment_counts_whatever_others_report_of_the_pod() {
    for seed in 1..=4 {
        check("forged-home", seed, async |simulation| {
            begin(simulation, 1).await;
            keep_kubelet_away(simulation, "n0", true);
            simulation.with(|state| {
                add_pod(state, EAST, "p", "n0", &json!({"thuban.dev/network": "red-1"}));
                let p = uid_of(state, "p");
                for number in 100..200 {
                    forge(state, number, ("p", &*p));
                }
            });
            sleep(Duration::from_secs(10)).await;
            keep_kubelet_away(simulation, "n0", false);
            until(simulation, "its pod is attached", |state| {
                is_attached(state, "n0")
            })
            .await;
            sleep(Duration::from_secs(5)).await;
            keep_kubelet_away(simulation, "n0", true);
            // The pod is deleted by force, and its sandbox stays.
            simulation.with(|state| state.store.purge(Kind::Pod, EAST, "p"));
            sleep(Duration::from_mins(2)).await;
            until(simulation, "its endpoint stays", |state| {
                state.store.values(Kind::Endpoint).count() == 1
            })
            .await;
            keep_kubelet_away(simulation, "n0", false);
            until(simulation, "its endpoint is gone", |state| {
                state.store.values(Kind::Endpoint).count() == 0
            })
            .await;
            end_everything(simulation).await;
        });
    }
}
