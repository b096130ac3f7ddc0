//! Tests of droplets that are cut off, or that hold acks back: which objects they delay, and for how long.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::{
    begin, check, delete, droplet_of, end_everything, has_rows, is_claimed, pod_on, says, until, until_gone,
};
use crate::cluster::add_node;
use crate::droplet::{Manner, Report};
use crate::kind::Kind;
use crate::simulation::{Simulation, State};
use crate::store::text;
use crate::tables::Slot;

/// Returns the other one of two nodes.
fn other_than(droplet: &str) -> &'static str {
    if droplet == "n0" { "n1" } else { "n0" }
}

#[test]
fn endpoint_waits_until_a_bouncer_and_a_divider_live() {
    let roles = [(Kind::Bouncer, "red-1-b0"), (Kind::Divider, "red-d0")];
    for (seed, (kind, name)) in (1..=6).zip(roles.into_iter().cycle()) {
        check("unserved", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            // From then on droplets are judged.
            sleep(Duration::from_mins(1)).await;
            let lost = droplet_of(simulation, kind, name);
            // The operator does not hear that the role has moved.
            only.deafen([kind]);
            let reach = |is_reachable: bool| {
                let droplets = &mut simulation.lock().droplets;
                let droplet = droplets.get_mut(&lost).expect("a droplet");
                droplet.is_reachable = is_reachable;
                droplet.report(Report::Break);
            };
            reach(false);
            sleep(Duration::from_secs(20)).await;
            pod_on(simulation, "p", other_than(&lost)).await;
            let waits = |state: &State| says(state, "p", "WaitsForAcks");
            until(simulation, "its endpoint waits", waits).await;
            sleep(Duration::from_mins(1)).await;
            until(simulation, "it still does", waits).await;
            only.deafen([]);
            until(simulation, "its endpoint is Provisioned", |state| {
                says(state, "p", "Acknowledged")
            })
            .await;
            reach(true);
            end_everything(simulation).await;
        });
    }
}

fn be(simulation: &Simulation, droplet: &str, manner: Manner) {
    let state = &mut *simulation.lock();
    state.note(|| format!("{droplet} is {manner:?}"));
    if let Some(droplet) = state.droplets.get_mut(droplet) {
        droplet.manner = manner;
    }
}

const PODS: [&str; 6] = ["p0", "p1", "p2", "p3", "p4", "p5"];

/// Adds pods on a node; each is a program of its own to the droplets that it concerns.
async fn add_pods(simulation: &Arc<Simulation>, node: &str) {
    for name in PODS {
        pod_on(simulation, name, node).await;
        sleep(Duration::from_secs(1)).await;
    }
}

async fn until_all_say(simulation: &Arc<Simulation>, reason: &str) {
    until(simulation, &format!("all pods say {reason}"), |state| {
        PODS.iter().all(|pod| says(state, pod, reason))
    })
    .await;
}

/// Deletes the pods, and waits until their endpoints are gone.
async fn end_pods(simulation: &Arc<Simulation>) {
    for name in PODS {
        delete(simulation, Kind::Pod, "east", name);
        sleep(Duration::from_secs(1)).await;
    }
    until(simulation, "their endpoints are gone", |state| {
        let mut endpoints = state.store.values(Kind::Endpoint);
        !endpoints.any(|endpoint| PODS.contains(&text(endpoint, "/spec/podRef/name")))
    })
    .await;
}

#[test]
fn a_bouncer_that_keeps_acks_back_holds_up_no_endpoint_for_long() {
    for (seed, manner) in (1..=8).zip(Manner::LATE.into_iter().cycle()) {
        check("late-bouncer", seed, async |simulation| {
            begin(simulation, 1).await;
            sleep(Duration::from_mins(1)).await;
            let late = droplet_of(simulation, Kind::Bouncer, "red-1-b0");
            be(simulation, &late, manner);
            add_pods(simulation, other_than(&late)).await;
            until_all_say(simulation, "Acknowledged").await;
            end_pods(simulation).await;
            be(simulation, &late, Manner::Honest);
            end_everything(simulation).await;
        });
    }
}

/// Makes a droplet ask where the pods of a node are.
fn ask(simulation: &Simulation, droplet: &str, node: &str) {
    simulation.with(|state| {
        let attached = state.droplets[node].attachments.values();
        let attached: Vec<_> = attached
            .map(|attachment| (attachment.vni, crate::tables::address(&attachment.address)))
            .collect();
        let subscriber = state.droplets.get_mut(droplet).expect("a droplet");
        for (vni, address) in attached {
            subscriber.subscriptions.insert((vni, address));
            subscriber.report(Report::Subscribe(vni, address));
        }
    });
}

fn direct_rows(state: &State, droplet: &str) -> usize {
    let rows = state.droplets[droplet].tables.rows.keys();
    rows.filter(|slot| matches!(slot, Slot::Direct(..))).count()
}

#[test]
fn a_subscriber_without_acks_holds_up_no_address_for_long() {
    for (seed, manner) in (1..=8).zip(Manner::LATE.into_iter().cycle()) {
        check("late-subscriber", seed, async |simulation| {
            begin(simulation, 1).await;
            add_node(simulation, 2);
            // The droplet takes part in the VPC by a pod of its own.
            pod_on(simulation, "q", "n2").await;
            add_pods(simulation, "n0").await;
            until_all_say(simulation, "Acknowledged").await;
            ask(simulation, "n2", "n0");
            until(simulation, "it knows where they are", |state| {
                direct_rows(state, "n2") == PODS.len()
            })
            .await;
            sleep(Duration::from_mins(1)).await;
            be(simulation, "n2", manner);
            end_pods(simulation).await;
            be(simulation, "n2", Manner::Honest);
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_vpc_goes_while_a_mute_droplet_keeps_its_number() {
    for seed in 1..=5 {
        check("mute", seed, async |simulation| {
            begin(simulation, 1).await;
            sleep(Duration::from_mins(1)).await;
            let mute = droplet_of(simulation, Kind::Divider, "red-d0");
            be(simulation, &mute, Manner::Mute);
            delete(simulation, Kind::Network, "", "red-1");
            delete(simulation, Kind::Vpc, "", "red");
            until_gone(simulation).await;
            sleep(Duration::from_mins(3)).await;
            until(simulation, "its number is kept", is_claimed).await;
            be(simulation, &mute, Manner::Honest);
            until(simulation, "its number is free", |state| !is_claimed(state)).await;
        });
    }
}

#[test]
fn a_droplet_is_told_nothing_of_a_vpc_that_it_has_left() {
    for seed in 1..=5 {
        check("left", seed, async |simulation| {
            begin(simulation, 1).await;
            add_node(simulation, 2);
            pod_on(simulation, "q", "n2").await;
            pod_on(simulation, "p", "n0").await;
            until(simulation, "the pod is attached", |state| {
                !state.droplets["n0"].attachments.is_empty()
            })
            .await;
            ask(simulation, "n2", "n0");
            until(simulation, "it knows where the pod is", |state| {
                direct_rows(state, "n2") == 1
            })
            .await;
            delete(simulation, Kind::Pod, "east", "q");
            let has_left = |state: &State| !has_rows(state, "n2");
            until(simulation, "it has no row of the VPC", has_left).await;
            // It asks again, and once more when it dials.
            ask(simulation, "n2", "n0");
            sleep(Duration::from_secs(5)).await;
            simulation.lock().droplets["n2"].report(Report::Break);
            sleep(Duration::from_secs(20)).await;
            until(simulation, "it still has none", has_left).await;
            end_everything(simulation).await;
        });
    }
}
