//! Tests of a quota without room for another Endpoint: its pod and its Service are told, and get their Endpoints when
//! the quota is raised.

use std::time::Duration;

use serde_json::json;
use tokio::time::sleep;

use super::{WAIT_TIMEOUT, begin, check, delete, end_everything, has_pod, until};
use crate::cluster::{add_pod, power};
use crate::kind::Kind;
use crate::schedule::NAMESPACES;
use crate::simulation::State;
use crate::store::{Preconditions, text};

fn endpoints(state: &State) -> usize {
    let all = state.store.values(Kind::Endpoint);
    all.filter(|endpoint| text(endpoint, "/metadata/namespace") == NAMESPACES[0])
        .count()
}

fn is_told(state: &State, kind: &str, name: &str) -> bool {
    let told = [kind, name, "EndpointDenied"].map(str::to_owned);
    state.told.contains(&told.into())
}

#[test]
fn who_is_denied_an_endpoint_is_told_and_gets_it_later() {
    for seed in 1..=5 {
        check("denied", seed, async |simulation| {
            begin(simulation, 1).await;
            simulation.with(|state| {
                state.full.insert(NAMESPACES[0].to_owned());
                let annotations = json!({"thuban.dev/network": "red-1"});
                add_pod(state, NAMESPACES[0], "p", "n0", &annotations);
                let service = json!({
                    "metadata": {"annotations": annotations},
                    "spec": {"clusterIPs": ["10.96.0.20"], "ports": [{"port": 80, "targetPort": 80}]},
                });
                let _ = state.store.create(Kind::Service, NAMESPACES[0], "s", service);
            });
            until(simulation, "pod and Service are told", |state| {
                is_told(state, "Pod", "p") && is_told(state, "Service", "s")
            })
            .await;
            // This is longer than the short retries; an address that was claimed ahead is released.
            sleep(WAIT_TIMEOUT).await;
            until(simulation, "no address is kept for the pod", |state| {
                endpoints(state) == 0
                    && !state
                        .store
                        .values(Kind::IpClaim)
                        .any(|claim| text(claim, "/spec/pod") == "p")
            })
            .await;
            let raised = simulation.with(|state| {
                state.full.clear();
                state.elapsed()
            });
            until(simulation, "both have their Endpoints", |state| {
                endpoints(state) == 2 && has_pod(state, "n0")
            })
            .await;
            let late = simulation.lock().elapsed().saturating_sub(raised);
            if late > Duration::from_secs(70) {
                let what = format!("they have them {late:?} after the quota was raised");
                simulation.lock().violation(what);
            }
            delete(simulation, Kind::Service, NAMESPACES[0], "s");
            end_everything(simulation).await;
        });
    }
}

#[test]
fn in_a_namespace_that_ends_nobody_is_told_of_a_denial() {
    for seed in 1..=4 {
        check("ending", seed, async |simulation| {
            let operator = begin(simulation, 1).await;
            if seed % 2 == 0 {
                // Then only the API server's answer shows it.
                operator.deafen([Kind::Namespace]);
            }
            simulation.with(|state| {
                // A pod whose kubelet is away stays, and its namespace stays with it.
                power(state, "n0", false);
                let annotations = json!({"thuban.dev/network": "red-1"});
                add_pod(state, NAMESPACES[0], "p", "n0", &annotations);
                let any = Preconditions::default();
                let _ = state.store.delete(Kind::Pod, NAMESPACES[0], "p", &any, false);
                let _ = state.store.delete(Kind::Namespace, "", NAMESPACES[0], &any, true);
            });
            sleep(Duration::from_mins(3)).await;
            until(simulation, "the pod waits and is not told", |state| {
                let waits = state.store.get(Kind::Pod, NAMESPACES[0], "p").is_some();
                waits && !is_told(state, "Pod", "p") && endpoints(state) == 0
            })
            .await;
        });
    }
}
