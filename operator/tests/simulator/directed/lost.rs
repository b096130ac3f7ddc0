//! Tests of droplets that are lost: what the operator says of them, and that a deleted Droplet comes back.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::{begin, check, end_everything, has, has_pod, pod_on, until};
use crate::cluster::power;
use crate::droplet::Report;
use crate::kind::Kind;
use crate::simulation::{Simulation, State};
use crate::store::{Preconditions, condition, text};

/// Returns why the droplet is Ready, or is not.
fn reason<'a>(state: &'a State, droplet: &str) -> &'a str {
    let droplet = state.store.value(Kind::Droplet, "", droplet);
    let ready = droplet.and_then(|droplet| condition(droplet, "Ready"));
    ready.map(|ready| text(ready, "/reason")).unwrap_or_default()
}

async fn until_it_is(simulation: &Arc<Simulation>, wanted: &str) {
    until(simulation, &format!("n1 is {wanted}"), |state| {
        reason(state, "n1") == wanted
    })
    .await;
}

fn reach(simulation: &Simulation, is_reachable: bool) {
    let droplets = &mut simulation.lock().droplets;
    let droplet = droplets.get_mut("n1").expect("a droplet");
    droplet.is_reachable = is_reachable;
    droplet.report(Report::Break);
}

#[test]
fn a_droplet_is_not_ready_once_kubernetes_has_lost_its_node() {
    for seed in 1..=4 {
        check("lost", seed, async |simulation| {
            begin(simulation, 1).await;
            until_it_is(simulation, "Connected").await;
            reach(simulation, false);
            until_it_is(simulation, "Suspect").await;
            sleep(Duration::from_mins(3)).await;
            until_it_is(simulation, "Suspect").await;
            simulation.with(|state| power(state, "n1", false));
            until_it_is(simulation, "NotReady").await;
            reach(simulation, true);
            simulation.with(|state| power(state, "n1", true));
            until_it_is(simulation, "Connected").await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_deleted_droplet_is_made_again_at_once_and_keeps_its_pods() {
    for seed in 1..=4 {
        check("deleted", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "p", "n1").await;
            // The streams of the leader are open for long.
            sleep(Duration::from_mins(2)).await;
            simulation.with(|state| {
                let any = Preconditions::default();
                let deleted = state.store.delete(Kind::Droplet, "", "n1", &any, false);
                assert!(deleted.is_ok() && !has(state, Kind::Droplet, "n1"));
            });
            sleep(Duration::from_secs(5)).await;
            until(simulation, "it is there and keeps its pod", |state| {
                has(state, Kind::Droplet, "n1") && has_pod(state, "n1")
            })
            .await;
            until_it_is(simulation, "Connected").await;
            end_everything(simulation).await;
        });
    }
}
