//! Tests of what a VPC says of itself, and how often it is written.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::time::sleep;

use super::{begin, check, is_provisioned, until};
use crate::kind::Kind;
use crate::simulation::{Simulation, State};
use crate::store::{condition, text};

/// Creates the VPC `blue` with two dividers.
pub fn create(simulation: &Arc<Simulation>, range: &str) {
    simulation.with(|state| {
        let vpc = json!({"metadata": {}, "spec": {"cidrs": [range], "dividers": 2}});
        let _ = state.store.create(Kind::Vpc, "", "blue", vpc);
    });
}

/// Creates a network of `blue` with one bouncer.
pub fn create_network(simulation: &Arc<Simulation>) {
    simulation.with(|state| {
        let network = json!({
            "metadata": {}, "spec": {"vpc": "blue", "cidrs": ["10.0.1.0/24"], "bouncers": 1},
        });
        let _ = state.store.create(Kind::Network, "", "blue-1", network);
    });
}

/// Returns how often a status was written. Writes of an operator whose cache is behind are refused.
fn written(state: &State, status: &str) -> usize {
    let line = format!("PATCH {status} -> 200");
    state.trace.iter().filter(|entry| entry.contains(&line)).count()
}

/// Returns the reason of a condition of the VPC.
fn reason(state: &State, kind: &str) -> Option<String> {
    let vpc = state.store.value(Kind::Vpc, "", "blue")?;
    condition(vpc, kind).map(|told| text(told, "/reason").to_owned())
}

fn number(state: &State, field: &str) -> Option<u64> {
    let vpc = state.store.value(Kind::Vpc, "", "blue")?;
    vpc.pointer(field)?.as_u64()
}

#[test]
fn vpcs_and_networks_are_written_for_what_lasts() {
    for seed in 1..=5 {
        check("paced", seed, async |simulation| {
            begin(simulation, 1).await;
            let since = simulation.lock().elapsed();
            create(simulation, "10.0.0.0/16");
            // A network that comes before its VPC's ranges says so at once.
            until(simulation, "the VPC is Provisioned", |state| {
                is_provisioned(state, Kind::Vpc, "", "blue")
            })
            .await;
            create_network(simulation);
            until(simulation, "the network is Provisioned", |state| {
                is_provisioned(state, Kind::Network, "", "blue-1")
            })
            .await;
            let took = simulation.lock().elapsed().saturating_sub(since);
            if took > Duration::from_secs(1) {
                let what = format!("the network was Provisioned after {took:?}");
                simulation.lock().violation(what);
            }
            // The ranges come into force, and it is Provisioned.
            for status in ["vpcs//blue/status", "networks//blue-1/status"] {
                let times = written(&simulation.lock(), status);
                if times > 2 {
                    let what = format!("{status} was written {times} times");
                    simulation.lock().violation(what);
                }
            }
            sleep(Duration::from_secs(10)).await;
            until(simulation, "its numbers are right", |state| {
                number(state, "/status/networks") == Some(1)
                    && number(state, "/status/workingDividers") == Some(2)
            })
            .await;
        });
    }
}

#[test]
fn a_wait_that_lasts_is_told() {
    for seed in 1..=3 {
        check("lasting-wait", seed, async |simulation| {
            begin(simulation, 1).await;
            simulation.lock().stalled = Some((Method::PATCH, Kind::Divider));
            create(simulation, "10.0.0.0/16");
            sleep(Duration::from_secs(2)).await;
            if reason(&simulation.lock(), "Ready").is_some() {
                let what = "the VPC says at once that its dividers don't work yet";
                simulation.lock().violation(what.to_owned());
            }
            let since = simulation.lock().elapsed();
            until(simulation, "the VPC says what it waits for", |state| {
                reason(state, "Ready").as_deref() == Some("DividersNotProvisioned")
            })
            .await;
            let state = &mut *simulation.lock();
            if state.elapsed().saturating_sub(since) > Duration::from_secs(3) {
                state.violation("the VPC says late what it waits for".to_owned());
            }
        });
    }
}

#[test]
fn an_error_is_told_at_once() {
    check("refused", 1, async |simulation| {
        begin(simulation, 1).await;
        // It overlaps the range of Services.
        create(simulation, "10.96.0.0/16");
        sleep(Duration::from_secs(1)).await;
        let told = simulation.lock().store.value(Kind::Vpc, "", "blue").cloned();
        let accepted = told.as_deref().and_then(|vpc| condition(vpc, "Accepted"));
        if accepted.is_none_or(|accepted| text(accepted, "/status") != "False") {
            let what = "the VPC does not say within a second that it is refused";
            simulation.lock().violation(what.to_owned());
        }
    });
}
