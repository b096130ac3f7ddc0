//! Tests of Endpoints that go at once, whatever guards them: their addresses stay claimed while a pod may have them.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::sleep;

use super::{begin, check, end_everything, pod_on, until};
use crate::cluster::{add_pod, remove_node};
use crate::droplet::Report;
use crate::kind::Kind;
use crate::operators;
use crate::schedule::NAMESPACES;
use crate::simulation::{Simulation, State};
use crate::store::text;

const EAST: &str = NAMESPACES[0];
/// A time longer than a claim without an Endpoint waits and rests.
const LONG: Duration = Duration::from_mins(3);

/// Removes the Endpoint at once, as an administrator can who took the policy away.
fn strip(simulation: &Simulation, pod: &str) {
    simulation.with(|state| {
        let endpoint = {
            let mut endpoints = state.store.values(Kind::Endpoint);
            endpoints
                .find(|endpoint| text(endpoint, "/spec/podRef/name") == pod)
                .cloned()
        };
        let name = text(&endpoint.expect("an Endpoint"), "/metadata/name").to_owned();
        state.stripped.insert(name.clone());
        state.store.purge(Kind::Endpoint, EAST, &name);
    });
}

fn is_attached(state: &State, node: &str) -> bool {
    !state.droplets[node].attachments.is_empty()
}

/// Cuts a node off, or ends that: nothing of it reaches anybody, and it serves on.
pub(super) fn cut_off(simulation: &Simulation, node: &str, is_cut_off: bool) {
    let state = &mut *simulation.lock();
    let droplet = state.droplets.get_mut(node).expect("a droplet");
    droplet.is_reachable = !is_cut_off;
    droplet.is_kubelet_away = is_cut_off;
    droplet.report(Report::Break);
}

/// Whether the pod's claim is there and not released.
fn is_claimed_for(state: &State, pod: &str) -> bool {
    let mut claims = state.store.values(Kind::IpClaim);
    claims.any(|claim| text(claim, "/spec/pod") == pod && text(claim, "/status/releasedAt").is_empty())
}

/// Makes a pod that has its address, on a node that is then cut off.
async fn begin_cut_off(simulation: &Arc<Simulation>) -> Arc<operators::Operator> {
    let only = begin(simulation, 1).await;
    // From then on droplets are judged.
    sleep(Duration::from_mins(1)).await;
    pod_on(simulation, "p", "n0").await;
    until(simulation, "its pod is attached", |state| {
        is_attached(state, "n0")
    })
    .await;
    sleep(Duration::from_secs(10)).await;
    cut_off(simulation, "n0", true);
    sleep(Duration::from_secs(20)).await;
    only
}

#[test]
fn stripped_endpoints_address_is_kept_while_its_node_is_cut_off() {
    for seed in 1..=6 {
        check("stripped", seed, async |simulation| {
            let only = begin_cut_off(simulation).await;
            // The pod is deleted by force: its kubelet can't be asked.
            simulation.with(|state| state.store.purge(Kind::Pod, EAST, "p"));
            strip(simulation, "p");
            sleep(LONG).await;
            until(simulation, "its claim is kept", |state| {
                is_claimed_for(state, "p")
            })
            .await;
            if seed % 3 == 0 {
                // The next operator knows the address by the claim alone.
                only.crash();
                operators::start(simulation);
                sleep(LONG).await;
                until(simulation, "the next keeps it too", |state| {
                    is_claimed_for(state, "p")
                })
                .await;
            }
            if seed % 2 == 0 {
                cut_off(simulation, "n0", false);
            } else {
                simulation.with(|state| remove_node(state, "n0"));
            }
            until(simulation, "its address is free", |state| {
                !is_claimed_for(state, "p")
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn stripped_endpoints_address_is_kept_while_its_pod_has_it() {
    for seed in 1..=4 {
        check("stripped-denied", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "p", "n0").await;
            until(simulation, "its pod is attached", |state| {
                is_attached(state, "n0")
            })
            .await;
            sleep(Duration::from_secs(10)).await;
            // The pod gets no other Endpoint, and runs on.
            simulation.with(|state| state.full.insert(EAST.to_owned()));
            strip(simulation, "p");
            sleep(LONG).await;
            until(simulation, "its claim is kept", |state| {
                is_claimed_for(state, "p")
            })
            .await;
            simulation.with(|state| {
                state.full.clear();
                // The pod is in the same network: it must not get the address.
                add_pod(state, EAST, "q", "n1", &json!({"thuban.dev/network": "red-1"}));
            });
            until(simulation, "both have what is theirs", |state| {
                is_attached(state, "n1") && state.store.values(Kind::Endpoint).count() == 2
            })
            .await;
            end_everything(simulation).await;
        });
    }
}
