//! Tests of the time in which a pod's Endpoint is being made: its rows are there before, and its pod runs before the
//! object says Provisioned.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::conditions::until_pod_says;
use super::{begin, check, delete, end_everything, has_pod, pod_on, until};
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
fn a_running_pod_keeps_its_rows_when_its_endpoint_is_deleted() {
    for seed in 1..=5 {
        check("deleted-early", seed, async |simulation| {
            begin_with_early_pod(simulation).await;
            let Some(("", name)) = endpoint(&simulation.lock()).map(|(phase, name)| (phase, name.to_owned()))
            else {
                // The policy of the API server lets nobody delete a Provisioned one.
                return end_everything(simulation).await;
            };
            delete(simulation, Kind::Endpoint, EAST, &name);
            until(simulation, "it is made again", |state| {
                if !has_pod(state, "n0") {
                    panic!("its droplet lost the pod's row");
                }
                endpoint(state).is_some_and(|(phase, _)| phase == "Provisioned")
            })
            .await;
            let has_it = |state: &State| {
                let endpoint = state.store.values(Kind::Endpoint).next();
                endpoint.is_some_and(|endpoint| addresses(endpoint) == ["10.0.1.2"])
            };
            until(simulation, "it has its address", has_it).await;
            end_everything(simulation).await;
        });
    }
}
