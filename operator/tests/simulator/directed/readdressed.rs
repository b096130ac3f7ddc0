//! Endpoints that need another address than the one that they were made with.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::sleep;

use super::conditions::until_pod_says;
use super::{begin, check, delete, end_everything, pod_on, says, until};
use crate::cluster::add_pod;
use crate::invariants::addresses;
use crate::kind::Kind;
use crate::schedule::NAMESPACES;
use crate::simulation::{Simulation, State};
use crate::store::text;

const EAST: &str = NAMESPACES[0];

fn addresses_of(state: &State, pod: &str) -> Vec<String> {
    let mut endpoints = state.store.values(Kind::Endpoint);
    let endpoint = endpoints.find(|endpoint| text(endpoint, "/spec/podRef/name") == pod);
    let addresses = endpoint.map(|endpoint| addresses(endpoint).into_iter().map(str::to_owned).collect());
    addresses.unwrap_or_default()
}

/// Its droplet refuses the first addresses.
async fn refused(simulation: &Arc<Simulation>, times: usize) {
    simulation.with(|state| {
        let droplet = state.droplets.get_mut("n0").expect("a droplet");
        droplet.refusals = times;
        add_pod(state, EAST, "p", "n0", &json!({"thuban.dev/network": "red-1"}));
    });
    until_pod_says(simulation, "p", "Acknowledged").await;
}

#[test]
fn an_endpoint_whose_address_is_refused_twice_gets_a_third() {
    for seed in 1..=5 {
        check("refused-twice", seed, async |simulation| {
            begin(simulation, 1).await;
            refused(simulation, 2).await;
            // Claims that it does not count go.
            until(simulation, "it has one claim", |state| {
                let claims = state.store.values(Kind::IpClaim);
                claims.filter(|claim| text(claim, "/spec/pod") == "p").count() == 1
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn nobody_waits_for_rows_of_an_address_that_is_anothers_now() {
    for seed in 1..=5 {
        check("anothers", seed, async |simulation| {
            begin(simulation, 1).await;
            refused(simulation, 1).await;
            until(simulation, "the refused address is free", |state| {
                state.store.get(Kind::IpClaim, "", "red.10.0.1.2").is_none()
            })
            .await;
            // The operator hears of it.
            sleep(Duration::from_secs(20)).await;
            pod_on(simulation, "q", "n1").await;
            until(simulation, "another has it", |state| {
                addresses_of(state, "q") == ["10.0.1.2"] && says(state, "q", "Acknowledged")
            })
            .await;
            delete(simulation, Kind::Pod, EAST, "p");
            until(simulation, "the Endpoint is gone", |state| {
                state.store.values(Kind::Endpoint).count() == 1
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

/// Makes a pod of which the operator doesn't hear, with the Endpoint's name that it will have.
fn add_unheard_pod(state: &mut State) -> (String, String) {
    add_pod(state, EAST, "p", "n0", &json!({"thuban.dev/network": "red-1"}));
    let pod = state.store.value(Kind::Pod, EAST, "p").expect("a pod");
    let uid = text(pod, "/metadata/uid").to_owned();
    (format!("p-{}", &uid[..8]), uid)
}

#[test]
fn an_endpoint_whose_claim_was_let_go_gets_another_address() {
    for seed in 1..=5 {
        check("late-endpoint", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            // The operator made claim and Endpoint; the claim was let go before the Endpoint was there.
            only.deafen([Kind::Pod]);
            simulation.with(|state| {
                let (name, uid) = add_unheard_pod(state);
                let spec = json!({
                    "type": "Simple", "vpc": "red", "network": "red-1", "droplet": "n0",
                    "podRef": {"name": "p", "uid": uid, "cniUid": uid}, "claimed": ["10.0.1.9"],
                });
                let endpoint = json!({"metadata": {"finalizers": ["thuban.dev/rows"]}, "spec": spec});
                state
                    .store
                    .create(Kind::Endpoint, EAST, &name, endpoint)
                    .expect("an Endpoint");
            });
            only.deafen([]);
            until_pod_says(simulation, "p", "Acknowledged").await;
            sleep(Duration::from_secs(30)).await;
            until(simulation, "its address is claimed", |state| {
                let of_p = addresses_of(state, "p");
                let mut claims = state.store.values(Kind::IpClaim);
                claims.any(|claim| of_p == [text(claim, "/spec/address")] && text(claim, "/spec/pod") == "p")
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn release_that_is_done_late_takes_no_address_from_a_pod() {
    for seed in 1..=5 {
        check("late-release", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            // The operator made the claim, and forgot the pod.
            only.deafen([Kind::Pod]);
            simulation.with(|state| {
                let (name, uid) = add_unheard_pod(state);
                let spec = json!({
                    "vpc": "red", "network": "red-1", "address": "10.0.1.9", "endpointNamespace": EAST,
                    "endpointName": name, "pod": "p", "ownerUid": uid, "droplet": "n0",
                });
                let claim = json!({"metadata": {}, "spec": spec});
                let made = state.store.create(Kind::IpClaim, "", "red.10.0.1.9", claim);
                made.expect("a claim");
                state.late_status = Some((Kind::IpClaim, Duration::from_secs(30)));
            });
            until(simulation, "it releases the claim", |state| {
                state.late_status.is_none()
            })
            .await;
            // Before the release is done it hears of the pod, and takes over its own claim.
            only.deafen([]);
            until_pod_says(simulation, "p", "Acknowledged").await;
            // The release is done by then, if the API server accepts it.
            sleep(Duration::from_secs(40)).await;
            until(simulation, "its address is claimed", |state| {
                let of_p = addresses_of(state, "p");
                let mut claims = state.store.values(Kind::IpClaim);
                claims.any(|claim| {
                    of_p == [text(claim, "/spec/address")] && text(claim, "/status/releasedAt").is_empty()
                })
            })
            .await;
            end_everything(simulation).await;
        });
    }
}
