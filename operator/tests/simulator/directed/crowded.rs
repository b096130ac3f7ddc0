//! Tests of nodes on which other VPCs have all free addresses of a network: the pod of transitd there says so, and pods
//! that came before are moved.

use std::sync::Arc;

use serde_json::{Value, json};
use thuban_api::SYSTEM_NAMESPACE;

use super::{begin, check, delete, end_everything, is_provisioned, until};
use crate::cluster::add_pod;
use crate::kind::Kind;
use crate::schedule::NAMESPACES;
use crate::simulation::{Simulation, State};
use crate::store::{is_deleting, text};

const LABEL: &str = "full.thuban.dev/tiny-blue";

/// Makes a second VPC, and a network in each of both: `tiny-red` and `tiny-blue`, which have the same one address for
/// pods.
pub async fn tiny_networks(simulation: &Arc<Simulation>) {
    simulation.with(|state| {
        let vpc = json!({
            "metadata": {},
            "spec": {"cidrs": ["10.0.0.0/16"], "dividers": 1, "allowedNamespaces": {}},
        });
        let _ = state.store.create(Kind::Vpc, "", "blue", vpc);
        for vpc in ["red", "blue"] {
            let network = json!({
                "metadata": {},
                "spec": {"vpc": vpc, "cidrs": ["10.0.2.0/30"], "bouncers": 1, "allowedNamespaces": {}},
            });
            let _ = state
                .store
                .create(Kind::Network, "", &format!("tiny-{vpc}"), network);
        }
    });
    until(simulation, "both networks are there", |state| {
        ["tiny-red", "tiny-blue"]
            .iter()
            .all(|name| is_provisioned(state, Kind::Network, "", name))
    })
    .await;
}

/// Deletes what [`tiny_networks`] made.
pub fn delete_tiny_networks(simulation: &Simulation) {
    for network in ["tiny-red", "tiny-blue"] {
        delete(simulation, Kind::Network, "", network);
    }
    delete(simulation, Kind::Vpc, "", "blue");
}

/// Whether a pod has an address that its droplet serves.
pub fn has_address(state: &State, pod: &str) -> bool {
    let mut endpoints = state.store.values(Kind::Endpoint);
    endpoints.any(|endpoint| {
        text(endpoint, "/spec/podRef/name") == pod && text(endpoint, "/status/phase") == "Provisioned"
    })
}

fn transitd(node: &str) -> String {
    format!("transitd-{node}")
}

fn add_transitd(state: &mut State, node: &str) {
    let pod = json!({
        "metadata": {"labels": {"app.kubernetes.io/name": "transitd"}},
        "spec": {"containers": [], "nodeName": node, "hostNetwork": true},
        "status": {"phase": "Running"},
    });
    let _ = state
        .store
        .create(Kind::Pod, SYSTEM_NAMESPACE, &transitd(node), pod);
}

fn is_labelled(state: &State, node: &str) -> bool {
    let pod = state.store.value(Kind::Pod, SYSTEM_NAMESPACE, &transitd(node));
    pod.is_some_and(|pod| pod["metadata"]["labels"].get(LABEL).is_some())
}

/// Adds a pod of `tiny-blue`, of a controller of this kind, as the admission policy has changed it.
fn add_owned(state: &mut State, name: &str, kind: &str) {
    add_pod(
        state,
        NAMESPACES[0],
        name,
        "n0",
        &json!({"thuban.dev/network": "tiny-blue"}),
    );
    state.store.edit(Kind::Pod, NAMESPACES[0], name, |pod| {
        pod["metadata"]["ownerReferences"] =
            json!([{"apiVersion": "apps/v1", "kind": kind, "name": "o", "uid": "o", "controller": true}]);
        pod["spec"]["affinity"] = json!({"podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{
                "labelSelector": {"matchExpressions": [{"key": LABEL, "operator": "Exists"}]},
                "namespaces": [SYSTEM_NAMESPACE], "topologyKey": "kubernetes.io/hostname",
            }],
        }});
    });
}

fn is_there(state: &State, pod: &str) -> bool {
    let pod = state.store.value(Kind::Pod, NAMESPACES[0], pod);
    pod.is_some_and(|pod: &Arc<Value>| !is_deleting(pod))
}

#[test]
fn a_node_says_which_network_is_full_and_its_pods_move() {
    check("crowded", 1, async |simulation| {
        begin(simulation, 1).await;
        tiny_networks(simulation).await;
        simulation.with(|state| {
            add_transitd(state, "n0");
            add_transitd(state, "n1");
            let annotations = json!({"thuban.dev/network": "tiny-red"});
            add_pod(state, NAMESPACES[0], "a", "n0", &annotations);
        });
        until(simulation, "the node of the first pod says so", |state| {
            has_address(state, "a") && is_labelled(state, "n0")
        })
        .await;
        simulation.with(|state| {
            add_owned(state, "b", "ReplicaSet");
            add_owned(state, "c", "DaemonSet");
        });
        until(
            simulation,
            "the pod that comes back elsewhere is moved",
            |state| !is_there(state, "b"),
        )
        .await;
        simulation.with(|state| {
            if !is_there(state, "c") || has_address(state, "c") || is_labelled(state, "n1") {
                state.violation("another pod is moved, or another node is full".to_owned());
            }
        });
        delete(simulation, Kind::Pod, NAMESPACES[0], "a");
        until(simulation, "the node has room again", |state| {
            has_address(state, "c") && !is_labelled(state, "n0")
        })
        .await;
        delete(simulation, Kind::Pod, NAMESPACES[0], "c");
        for node in ["n0", "n1"] {
            delete(simulation, Kind::Pod, SYSTEM_NAMESPACE, &transitd(node));
        }
        delete_tiny_networks(simulation);
        end_everything(simulation).await;
    });
}
