//! Tests of droplets that are lost: what the operator says of them, what their pods keep, and that a deleted Droplet
//! comes back.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use tokio::time::sleep;

use super::conditions::{reason, until_droplet_is, until_node_is};
use super::{begin, bounces, check, delete, end_everything, has, has_pod, pod_on, until};
use crate::cluster::power;
use crate::droplet::{Droplet, Report};
use crate::kind::Kind;
use crate::operators;
use crate::simulation::Simulation;

/// A time after which the node lifecycle controller and a new leader have judged.
const LONG: Duration = Duration::from_mins(3);

/// Checks that the droplets are what the operator last said that they are.
fn check_reasons(simulation: &Simulation, wanted: [&str; 2]) {
    let state = &mut *simulation.lock();
    let reasons = ["n0", "n1"].map(|name| reason(state, name).to_owned());
    if reasons != wanted {
        state.violation(format!("the droplets are {reasons:?}, not {wanted:?}"));
    }
}

fn change(simulation: &Simulation, name: &str, change: impl FnOnce(&mut Droplet)) {
    let state = &mut *simulation.lock();
    change(state.droplets.get_mut(name).expect("a droplet"));
}

/// Cuts a droplet off from operators, or ends that.
fn reach(simulation: &Simulation, name: &str, is_reachable: bool) {
    change(simulation, name, |droplet| {
        droplet.is_reachable = is_reachable;
        droplet.report(Report::Break);
    });
}

/// Cuts a node off from the API server, or ends that: its kubelet does not reach it.
fn hear_kubelet(simulation: &Simulation, name: &str, is_heard: bool) {
    change(simulation, name, |droplet| droplet.is_kubelet_away = !is_heard);
}

#[test]
fn a_droplet_is_not_ready_once_kubernetes_has_lost_its_node() {
    for seed in 1..=4 {
        check("lost", seed, async |simulation| {
            begin(simulation, 1).await;
            until_droplet_is(simulation, "n1", "Connected").await;
            reach(simulation, "n1", false);
            until_droplet_is(simulation, "n1", "Suspect").await;
            sleep(LONG).await;
            check_reasons(simulation, ["Connected", "Suspect"]);
            simulation.with(|state| power(state, "n1", false));
            until_droplet_is(simulation, "n1", "NotReady").await;
            reach(simulation, "n1", true);
            simulation.with(|state| power(state, "n1", true));
            until_droplet_is(simulation, "n1", "Connected").await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn pods_of_a_node_whose_kubelet_is_silent_keep_their_rows() {
    for seed in 1..=4 {
        check("silent", seed, async |simulation| {
            begin(simulation, 1).await;
            pod_on(simulation, "p", "n1").await;
            sleep(Duration::from_mins(1)).await;
            hear_kubelet(simulation, "n1", false);
            until_node_is(simulation, "n1", "Unknown").await;
            sleep(LONG).await;
            // The stream counts more than what Kubernetes says.
            check_reasons(simulation, ["Connected", "Connected"]);
            reach(simulation, "n1", false);
            until_droplet_is(simulation, "n1", "NotReady").await;
            until(simulation, "the other node leads packets to the pod", |state| {
                bounces(state, "n0")
            })
            .await;
            sleep(LONG).await;
            until(
                simulation,
                "it still does, and the pod's node delivers",
                |state| bounces(state, "n0") && has_pod(state, "n1"),
            )
            .await;
            hear_kubelet(simulation, "n1", true);
            until_droplet_is(simulation, "n1", "Suspect").await;
            reach(simulation, "n1", true);
            until_droplet_is(simulation, "n1", "Connected").await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn no_droplet_is_judged_while_too_many_are_away_at_once() {
    for seed in 1..=4 {
        check("many", seed, async |simulation| {
            begin(simulation, 1).await;
            until_droplet_is(simulation, "n1", "Connected").await;
            sleep(Duration::from_mins(1)).await;
            for name in ["n0", "n1"] {
                reach(simulation, name, false);
                hear_kubelet(simulation, name, false);
            }
            until_node_is(simulation, "n1", "Unknown").await;
            sleep(LONG).await;
            check_reasons(simulation, ["Connected", "Connected"]);
            // One is left that is away.
            reach(simulation, "n0", true);
            hear_kubelet(simulation, "n0", true);
            until_droplet_is(simulation, "n1", "NotReady").await;
            reach(simulation, "n1", true);
            hear_kubelet(simulation, "n1", true);
            until_droplet_is(simulation, "n1", "Connected").await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_new_leader_waits_and_then_believes_the_node() {
    for seed in 1..=4 {
        check("led", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            until_droplet_is(simulation, "n1", "Connected").await;
            reach(simulation, "n1", false);
            until_droplet_is(simulation, "n1", "Suspect").await;
            first.crash();
            simulation.with(|state| power(state, "n1", false));
            until_node_is(simulation, "n1", "Unknown").await;
            let next = operators::start(simulation);
            until(simulation, "the next leads", |_| next.hub().is_some()).await;
            sleep(Duration::from_secs(50)).await;
            check_reasons(simulation, ["Connected", "Suspect"]);
            until_droplet_is(simulation, "n1", "NotReady").await;
            reach(simulation, "n1", true);
            simulation.with(|state| power(state, "n1", true));
            until_droplet_is(simulation, "n1", "Connected").await;
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
            delete(simulation, Kind::Droplet, "", "n1");
            let has_lost = AtomicBool::new(false);
            until(simulation, "it is there again", |state| {
                has_lost.fetch_or(!has_pod(state, "n1"), Relaxed);
                reason(state, "n1") == "Connected"
            })
            .await;
            if has_lost.into_inner() {
                simulation.lock().violation("it lost its pod meanwhile".into());
            }
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_droplet_deleted_while_nobody_leads_is_made_again() {
    for seed in 1..=4 {
        check("unled", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            pod_on(simulation, "p", "n1").await;
            sleep(Duration::from_mins(1)).await;
            first.crash();
            delete(simulation, Kind::Droplet, "", "n1");
            until(simulation, "it is there before anybody leads", |state| {
                has(state, Kind::Droplet, "n1")
            })
            .await;
            operators::start(simulation);
            until_droplet_is(simulation, "n1", "Connected").await;
            until(simulation, "it has its pod", |state| has_pod(state, "n1")).await;
            end_everything(simulation).await;
        });
    }
}
