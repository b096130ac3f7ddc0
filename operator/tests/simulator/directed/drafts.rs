//! Tests of the time in which a pod's Endpoint is being made: its rows are there before, and its pod runs before the
//! object says Provisioned.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::conditions::until_pod_says;
use super::{begin, check, end_everything, force, has_pod, pod_on, until};
use crate::invariants::addresses;
use crate::kind::Kind;
use crate::schedule::NAMESPACES;
use crate::simulation::{Simulation, State};
use crate::store::text;

const EAST: &str = NAMESPACES[0];

fn runs(state: &State) -> bool {
    !state.droplets["n0"].attachments.is_empty()
}

/// Returns the phase of the only Endpoint and its name.
fn endpoint(state: &State) -> Option<(&str, &str)> {
    let endpoint = state.store.values(Kind::Endpoint).next()?;
    Some((text(endpoint, "/status/phase"), text(endpoint, "/metadata/name")))
}

/// Makes a pod that runs before its Endpoint is Provisioned: requests take up to six seconds.
async fn begin_with_early_pod(simulation: &Arc<Simulation>) {
    begin(simulation, 1).await;
    simulation.lock().faults.slow_request = 1000;
    pod_on(simulation, "p", "n0").await;
    until(simulation, "its pod runs", runs).await;
    simulation.lock().faults.slow_request = 0;
}

#[test]
fn rows_are_there_before_the_endpoint_is_seen() {
    for seed in 1..=3 {
        check("unseen", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            only.deafen([Kind::Endpoint]);
            pod_on(simulation, "p", "n0").await;
            sleep(Duration::from_secs(5)).await;
            if runs(&simulation.lock()) {
                simulation
                    .lock()
                    .violation("its pod runs before it is made".into());
            }
            only.deafen([]);
            until_pod_says(simulation, "p", "Acknowledged").await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_pod_runs_before_its_endpoint_is_provisioned() {
    let mut early = 0;
    for seed in 1..=5 {
        check("early", seed, async |simulation| {
            begin_with_early_pod(simulation).await;
            let phase = endpoint(&simulation.lock()).map(|(phase, _)| phase.to_owned());
            early += usize::from(phase.as_deref() != Some("Provisioned"));
            until_pod_says(simulation, "p", "Acknowledged").await;
            end_everything(simulation).await;
        });
    }
    assert!(early >= 3, "{early} of 5");
}

#[test]
fn an_early_pod_gets_its_endpoint_again_with_its_address() {
    let mut early = 0;
    for seed in 1..=5 {
        check("gone-early", seed, async |simulation| {
            begin_with_early_pod(simulation).await;
            let name = endpoint(&simulation.lock()).map(|(phase, name)| (phase.to_owned(), name.to_owned()));
            let (phase, name) = name.expect("an Endpoint");
            if phase == "Provisioned" {
                return end_everything(simulation).await;
            }
            early += 1;
            force(simulation, Kind::Endpoint, EAST, &name);
            until(simulation, "it is made again", |state| {
                let endpoint = state.store.values(Kind::Endpoint).next();
                endpoint.is_some_and(|endpoint| {
                    text(endpoint, "/status/phase") == "Provisioned" && addresses(endpoint) == ["10.0.1.2"]
                })
            })
            .await;
            until(simulation, "its droplet has its row", |state| {
                has_pod(state, "n0")
            })
            .await;
            end_everything(simulation).await;
        });
    }
    assert!(early >= 3, "{early} of 5");
}
