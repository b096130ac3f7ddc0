//! Tests of the exceptions of deletion: the objects that a deleted VPC or network does not wait for, and those that it
//! serves to the end though its roles are gone. Two operators cause what one alone seldom meets: one has not seen the
//! deletion yet.

use serde_json::{Value, json};
use tokio::time::sleep;

use std::sync::Arc;
use std::time::Duration;

use crate::cluster::add_pod;
use crate::convergence::is_provisioned;
use crate::directed::{begin, check, delete, has, second, until, until_gone};
use crate::invariants::addresses;
use crate::kind::Kind;
use crate::simulation::{Simulation, State};
use crate::store::{self, is_deleting, text};

fn create(simulation: &Simulation, kind: Kind, namespace: &str, name: &str, spec: &Value) {
    simulation.with(|state| {
        let object = json!({"metadata": {}, "spec": spec});
        let _ = state.store.create(kind, namespace, name, object);
    });
}

fn network(simulation: &Simulation, name: &str, range: &str) {
    let spec = json!({"vpc": "red", "cidrs": [range], "bouncers": 1, "allowedNamespaces": {}});
    create(simulation, Kind::Network, "", name, &spec);
}

/// Whether a condition of the type is there with this reason.
pub fn says(
    state: &State,
    (kind, namespace, name): (Kind, &str, &str),
    condition: &str,
    reason: &str,
) -> bool {
    let object = state.store.value(kind, namespace, name);
    let told = object.and_then(|object| store::condition(object, condition));
    told.is_some_and(|told| text(told, "/reason") == reason)
}

async fn until_gone_network(simulation: &Arc<Simulation>, name: &str) {
    let is_gone = |state: &State| !has(state, Kind::Network, name);
    until(simulation, "the network is gone", is_gone).await;
}

fn roles(state: &State, kind: Kind) -> usize {
    let roles = state.store.values(kind);
    roles
        .filter(|role| is_provisioned(role) && !is_deleting(role))
        .count()
}

#[test]
fn a_vpc_does_not_wait_for_a_network_never_accepted() {
    for seed in 1..=3 {
        check("never-accepted", seed, async |simulation| {
            begin(simulation, 1).await;
            network(simulation, "red-9", "10.9.9.0/24");
            let never = (Kind::Network, "", "red-9");
            until(simulation, "the network is refused", |state| {
                says(state, never, "Accepted", "OutsideVpc")
            })
            .await;
            delete(simulation, Kind::Vpc, "", "red");
            sleep(Duration::from_mins(1)).await;
            let waits = |state: &State| {
                let vpc = state.store.value(Kind::Vpc, "", "red");
                let told = vpc.and_then(|vpc| store::condition(vpc, "Deleting"));
                told.is_some_and(|told| {
                    text(told, "/reason") == "WaitsForNetworks" && text(told, "/status") == "True"
                })
            };
            until(simulation, "the VPC waits for the other one", waits).await;
            delete(simulation, Kind::Network, "", "red-1");
            until_gone(simulation).await;
            until(simulation, "the network is still there", |state| {
                has(state, Kind::Network, "red-9")
            })
            .await;
        });
    }
}

#[test]
fn a_vpc_in_deletion_divides_for_networks_that_came_late() {
    for seed in 1..=3 {
        check("late-network", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            delete(simulation, Kind::Network, "", "red-1");
            until_gone_network(simulation, "red-1").await;
            let other = second(simulation, &first).await;
            // One operator removes the dividers; the other one does not see that, and accepts a network.
            other.deafen([Kind::Vpc, Kind::Divider]);
            first.deafen([Kind::Network]);
            network(simulation, "red-2", "10.0.2.0/24");
            until(simulation, "the network is accepted", |state| {
                says(state, (Kind::Network, "", "red-2"), "Accepted", "Valid")
            })
            .await;
            delete(simulation, Kind::Vpc, "", "red");
            until(simulation, "no divider is left", |state| {
                state.store.values(Kind::Divider).next().is_none()
            })
            .await;
            other.crash();
            first.deafen([]);
            until(simulation, "a divider serves the VPC that is deleted", |state| {
                let vpc = state.store.value(Kind::Vpc, "", "red");
                vpc.is_some_and(|vpc| is_deleting(vpc)) && roles(state, Kind::Divider) == 1
            })
            .await;
            delete(simulation, Kind::Network, "", "red-2");
            until_gone(simulation).await;
        });
    }
}

#[test]
fn a_network_does_not_wait_for_endpoints_out_of_rows() {
    for seed in 1..=3 {
        check("out-of-rows", seed, async |simulation| {
            begin(simulation, 1).await;
            // One Endpoint asks for an address that the network doesn't have; the other one is a Service's.
            let spec = json!({
                "type": "Simple", "vpc": "", "network": "red-1", "addresses": ["10.0.77.7"],
            });
            create(simulation, Kind::Endpoint, "east", "astray", &spec);
            simulation.with(|state| {
                let service = json!({
                    "metadata": {"annotations": {"thuban.dev/network": "red-1"}},
                    "spec": {"type": "ClusterIP", "clusterIPs": ["10.96.0.10"],
                             "ports": [{"name": "http", "protocol": "TCP", "port": 80}]},
                });
                let _ = state.store.create(Kind::Service, "east", "web", service);
            });
            let is_told = |state: &State| {
                let mut endpoints = state.store.values(Kind::Endpoint);
                endpoints.any(|endpoint| text(endpoint, "/spec/type") == "Scaled" && is_provisioned(endpoint))
                    && says_no(state, "astray")
            };
            until(simulation, "one is served and the other is not", is_told).await;
            delete(simulation, Kind::Network, "", "red-1");
            until_gone_network(simulation, "red-1").await;
            sleep(Duration::from_secs(30)).await;
            until(
                simulation,
                "both are there, and say why they are not served",
                |state| {
                    let all: Vec<&str> = names(state).collect();
                    all.len() == 2 && all.iter().all(|name| says_no(state, name))
                },
            )
            .await;
            delete(simulation, Kind::Vpc, "", "red");
            until_gone(simulation).await;
        });
    }
}

fn names(state: &State) -> impl Iterator<Item = &str> {
    let endpoints = state.store.values(Kind::Endpoint);
    endpoints.map(|endpoint| text(endpoint, "/metadata/name"))
}

/// Whether a condition of the Endpoint is false.
fn says_no(state: &State, name: &str) -> bool {
    let endpoint = state.store.value(Kind::Endpoint, "east", name);
    let conditions = endpoint.and_then(|endpoint| endpoint.pointer("/status/conditions")?.as_array());
    let mut conditions = conditions.into_iter().flatten();
    conditions.any(|told| text(told, "/status") == "False")
}

#[test]
fn a_network_in_deletion_bounces_for_endpoints_that_came_late() {
    for seed in 1..=3 {
        check("late-endpoint", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            let other = second(simulation, &first).await;
            // One operator removes the bouncer; the other one does not see that, and lets a pod in.
            other.deafen([Kind::Network, Kind::Bouncer]);
            first.deafen([Kind::Endpoint, Kind::Pod]);
            simulation.with(|state| {
                add_pod(state, "east", "p", "n0", &json!({"thuban.dev/network": "red-1"}));
            });
            until(simulation, "the pod has an address", |state| {
                let mut endpoints = state.store.values(Kind::Endpoint);
                endpoints.any(|endpoint| !addresses(endpoint).is_empty())
            })
            .await;
            delete(simulation, Kind::Network, "", "red-1");
            until(simulation, "no bouncer is left", |state| {
                state.store.values(Kind::Bouncer).next().is_none()
            })
            .await;
            other.crash();
            // It hears of the pod first: of a pod that it doesn't know it would end the Endpoint.
            first.deafen([Kind::Endpoint]);
            sleep(Duration::from_millis(500)).await;
            first.deafen([]);
            until(simulation, "a bouncer serves the pod", |state| {
                let mut endpoints = state.store.values(Kind::Endpoint);
                roles(state, Kind::Bouncer) == 1 && endpoints.any(|endpoint| is_provisioned(endpoint))
            })
            .await;
            delete(simulation, Kind::Pod, "east", "p");
            until_gone_network(simulation, "red-1").await;
            delete(simulation, Kind::Vpc, "", "red");
            until_gone(simulation).await;
        });
    }
}
