//! Tests of the two lanes of a kind: creations that get no answer don't hold deletions up, nor the reverse.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use serde_json::json;

use super::{begin, check, delete, has, is_provisioned, until, until_gone};
use crate::kind::Kind;
use crate::operators::Operator;
use crate::simulation::{Simulation, State};

/// More than the workers of a lane.
const MANY: usize = 80;
/// The workers of a lane.
const WORKERS: usize = 64;
/// Less than the time for which a worker waits for an answer.
const SOON: Duration = Duration::from_secs(10);

fn names() -> impl Iterator<Item = String> {
    (0..MANY).map(|number| format!("v{number}"))
}

fn create(state: &mut State, name: &str) {
    let vpc = json!({"metadata": {}, "spec": {"cidrs": ["10.0.0.0/16"], "dividers": 1}});
    let _ = state.store.create(Kind::Vpc, "", name, vpc);
}

fn create_many(simulation: &Simulation) {
    simulation.with(|state| {
        for name in names() {
            create(state, &name);
        }
    });
}

/// Waits until all workers of a lane wait for answers to writes of this kind.
async fn until_full(simulation: &Arc<Simulation>, operator: &Arc<Operator>, kind: Kind) {
    until(simulation, "all workers of a lane are busy", |_| {
        operator.under_way(kind) >= WORKERS
    })
    .await;
}

fn stall(simulation: &Simulation, stalled: Option<(Method, Kind)>) {
    simulation.lock().stalled = stalled;
}

fn say_if_late(simulation: &Simulation, since: Duration, what: &str) {
    let state = &mut *simulation.lock();
    let took = state.elapsed().saturating_sub(since);
    if took > SOON {
        state.violation(format!("{what} after {} s", took.as_secs()));
    }
}

#[test]
fn deletions_wait_behind_no_creations() {
    for seed in 1..=2 {
        check("lane-of-deletions", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            delete(simulation, Kind::Network, "", "red-1");
            let is_gone = |state: &State| !has(state, Kind::Network, "red-1");
            until(simulation, "the network is gone", is_gone).await;
            stall(simulation, Some((Method::POST, Kind::VniClaim)));
            create_many(simulation);
            until_full(simulation, &only, Kind::VniClaim).await;
            let since = simulation.lock().elapsed();
            delete(simulation, Kind::Vpc, "", "red");
            until_gone(simulation).await;
            say_if_late(simulation, since, "the VPC is gone");
        });
    }
}

#[test]
fn creations_wait_behind_no_deletions() {
    for seed in 1..=2 {
        check("lane-of-creations", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            create_many(simulation);
            until(simulation, "all VPCs are Provisioned", |state| {
                names().all(|name| is_provisioned(state, Kind::Vpc, "", &name))
            })
            .await;
            stall(simulation, Some((Method::DELETE, Kind::Divider)));
            for name in names() {
                delete(simulation, Kind::Vpc, "", &name);
            }
            until_full(simulation, &only, Kind::Divider).await;
            let since = simulation.lock().elapsed();
            simulation.with(|state| create(state, "late"));
            until(simulation, "the new VPC is Provisioned", |state| {
                is_provisioned(state, Kind::Vpc, "", "late")
            })
            .await;
            say_if_late(simulation, since, "the new VPC is Provisioned");
        });
    }
}

/// A VPC is deleted while its number is claimed. Its deletion begins when that write is over, and loses no number.
#[test]
fn a_deletion_waits_for_its_objects_own_write() {
    for seed in 1..=3 {
        check("own-write", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            stall(simulation, Some((Method::POST, Kind::VniClaim)));
            simulation.with(|state| create(state, "late"));
            until(simulation, "its number is being claimed", |_| {
                only.under_way(Kind::VniClaim) == 1
            })
            .await;
            delete(simulation, Kind::Vpc, "", "late");
            tokio::time::sleep(Duration::from_secs(5)).await;
            let is_early = !has(&simulation.lock(), Kind::Vpc, "late");
            if is_early {
                let what = "the VPC went while its number was being claimed";
                simulation.lock().violation(what.to_owned());
            }
            stall(simulation, None);
            until(simulation, "the VPC is gone", |state| {
                !has(state, Kind::Vpc, "late")
            })
            .await;
            // The claim that no VPC counts rests, and goes.
            until(simulation, "its number is free", |state| {
                state.store.names(Kind::VniClaim).len() == 1
            })
            .await;
        });
    }
}
