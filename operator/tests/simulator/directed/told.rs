//! Tests of what users are told of their networks: addresses that come to an end, Services that can't be shared, pods
//! that get no address, roles that share a droplet.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use super::crowded::{delete_tiny_networks, has_address, tiny_networks};
use super::{begin, check, delete, end_everything, endpoint_db, is_provisioned, pod_of_db, until};
use crate::cluster::add_pod;
use crate::kind::Kind;
use crate::schedule::NAMESPACES;
use crate::simulation::State;
use crate::store::{condition, text};
use crate::tables::Slot;

/// Whether an object has a condition of this status and reason; `expected` is none: it has no such condition.
fn is(state: &State, kind: Kind, name: &str, told: &str, expected: Option<(&str, &str)>) -> bool {
    let object = state.store.value(kind, "", name);
    let told = object.and_then(|object| condition(object, told));
    told.map(|told| (text(told, "/status"), text(told, "/reason"))) == expected
}

/// Whether a droplet has the row that says that the pod gets no endpoint, with this reason.
fn is_refused(state: &State, droplet: &str, reason: &str) -> bool {
    let rows = &state.droplets[droplet].tables.rows;
    rows.iter()
        .any(|(slot, row)| matches!(slot, Slot::Refused(_)) && format!("{row:?}").contains(reason))
}

#[test]
fn services_that_cannot_be_shared_are_named() {
    check("unshared", 1, async |simulation| {
        begin(simulation, 1).await;
        simulation.with(|state| {
            state.store.edit(Kind::Vpc, "", "red", |vpc| {
                vpc["spec"]["sharedServices"] = json!(["east/metrics"]);
            });
        });
        let shared = |state: &State, expected| is(state, Kind::Vpc, "red", "SharedServices", expected);
        until(simulation, "the VPC names it", |state| {
            shared(state, Some(("False", "ServiceNotShared")))
                && is_warned(state, "Vpc", "red", "ServiceNotShared")
        })
        .await;
        simulation.with(|state| {
            let service = json!({
                "metadata": {"annotations": {"thuban.dev/network": "red-1"}},
                "spec": {"clusterIPs": ["10.96.0.20"], "ports": [{"port": 80, "targetPort": 80}]},
            });
            let _ = state
                .store
                .create(Kind::Service, NAMESPACES[0], "metrics", service);
        });
        until(simulation, "it is in another VPC", |state| {
            let vpc = state.store.value(Kind::Vpc, "", "red").map(ToString::to_string);
            vpc.is_some_and(|vpc| vpc.contains("is in another VPC than default"))
        })
        .await;
        simulation.with(|state| {
            state.store.edit(Kind::Vpc, "", "red", |vpc| {
                vpc["spec"]["sharedServices"] = Value::Null;
            });
        });
        until(simulation, "the condition goes", |state| shared(state, None)).await;
        delete(simulation, Kind::Service, NAMESPACES[0], "metrics");
        end_everything(simulation).await;
    });
}

#[test]
fn addresses_that_come_to_an_end_are_told_of() {
    check("used up", 1, async |simulation| {
        begin(simulation, 1).await;
        let told = |state: &State, reason: &str| is_warned(state, "Network", "tiny", reason);
        simulation.with(|state| {
            // Four addresses, of which pods get one.
            let network = json!({
                "metadata": {},
                "spec": {"vpc": "red", "cidrs": ["10.0.2.0/30"], "bouncers": 1, "allowedNamespaces": {}},
            });
            let _ = state.store.create(Kind::Network, "", "tiny", network);
        });
        until(simulation, "it has all its addresses", |state| {
            let network = state.store.value(Kind::Network, "", "tiny");
            network.is_some_and(|network| text(network, "/status/phase") == "Provisioned")
                && !told(state, "AddressesNearlyUsedUp")
        })
        .await;
        simulation.with(|state| {
            for name in ["a", "b"] {
                let annotations = json!({"thuban.dev/network": "tiny"});
                add_pod(state, NAMESPACES[0], name, "n0", &annotations);
            }
        });
        until(
            simulation,
            "the network says so, and the second pod's droplet why",
            |state| told(state, "AddressesNearlyUsedUp") && is_refused(state, "n0", "NetworkFull"),
        )
        .await;
        for (kind, namespace, name) in [
            (Kind::Pod, NAMESPACES[0], "a"),
            (Kind::Pod, NAMESPACES[0], "b"),
            (Kind::Network, "", "tiny"),
        ] {
            delete(simulation, kind, namespace, name);
        }
        end_everything(simulation).await;
    });
}

#[test]
fn a_pod_hears_that_other_vpcs_have_all_addresses_on_its_node() {
    check("used on the node", 1, async |simulation| {
        begin(simulation, 1).await;
        tiny_networks(simulation).await;
        let pods = [
            ("a", "n0", "tiny-red"),
            ("b", "n0", "tiny-blue"),
            ("c", "n1", "tiny-blue"),
        ];
        let start = |(name, node, network): (&str, &str, &str)| {
            simulation.with(|state| {
                let annotations = json!({"thuban.dev/network": network});
                add_pod(state, NAMESPACES[0], name, node, &annotations);
            });
        };
        start(pods[0]);
        until(simulation, "the first pod has the address", |state| {
            has_address(state, "a")
        })
        .await;
        start(pods[1]);
        until(simulation, "the other VPC's pod hears why it has none", |state| {
            is_refused(state, "n0", "AddressInUseOnNode")
        })
        .await;
        start(pods[2]);
        until(
            simulation,
            "its sibling has the address on another node",
            |state| has_address(state, "c"),
        )
        .await;
        for (name, ..) in pods {
            delete(simulation, Kind::Pod, NAMESPACES[0], name);
        }
        delete_tiny_networks(simulation);
        end_everything(simulation).await;
    });
}

#[test]
fn pods_of_a_network_that_goes_hear_so_at_once() {
    check("leaving", 1, async |simulation| {
        begin(simulation, 1).await;
        super::pod_on(simulation, "p", "n0").await;
        delete(simulation, Kind::Network, "", "red-1");
        // Pods that come before the operator has seen it are let in.
        sleep(Duration::from_secs(5)).await;
        simulation.with(|state| {
            let annotations = json!({"thuban.dev/network": "red-1"});
            add_pod(state, NAMESPACES[0], "late", "n1", &annotations);
        });
        until(simulation, "the late pod's droplet knows why", |state| {
            is_refused(state, "n1", "NetworkDeleting")
        })
        .await;
        delete(simulation, Kind::Pod, NAMESPACES[0], "late");
        end_everything(simulation).await;
    });
}

/// Whether people were warned of an object with this reason.
fn is_warned(state: &State, kind: &str, name: &str, reason: &str) -> bool {
    state
        .told
        .contains(&[kind, name, reason].map(str::to_owned).into())
}

#[test]
fn pods_hear_why_a_named_endpoint_is_not_theirs() {
    check("named", 1, async |simulation| {
        begin(simulation, 1).await;
        pod_of_db(simulation, "early", "n0");
        until(simulation, "there is no such Endpoint", |state| {
            is_warned(state, "Pod", "early", "EndpointNotFound")
        })
        .await;
        simulation.with(endpoint_db);
        until(simulation, "the pod has it", |state| {
            is_provisioned(state, Kind::Endpoint, "east", "db")
        })
        .await;
        pod_of_db(simulation, "late", "n1");
        until(simulation, "another pod has it", |state| {
            is_warned(state, "Pod", "late", "EndpointInUse")
        })
        .await;
        simulation.with(|state| {
            if is_warned(state, "Pod", "early", "EndpointInUse")
                || is_warned(state, "Pod", "late", "EndpointNotFound")
            {
                state.violation("a pod was told what is not so".into());
            }
        });
        for name in ["early", "late"] {
            delete(simulation, Kind::Pod, "east", name);
        }
        delete(simulation, Kind::Endpoint, "east", "db");
        end_everything(simulation).await;
    });
}

#[test]
fn services_say_that_backends_are_left_out() {
    check("lacking", 1, async |simulation| {
        begin(simulation, 1).await;
        simulation.with(|state| {
            let service = json!({
                "metadata": {"annotations": {"thuban.dev/network": "red-1"}},
                "spec": {"clusterIPs": ["10.96.0.20"], "ports": [{"name": "http", "port": 80, "targetPort": 80}]},
            });
            let _ = state.store.create(Kind::Service, "east", "metrics", service);
            // Nobody has the only address.
            let slice = json!({
                "metadata": {"labels": {"kubernetes.io/service-name": "metrics"}},
                "addressType": "IPv4",
                "endpoints": [{"addresses": ["10.0.1.99"], "conditions": {"ready": true}}],
                "ports": [{"name": "http", "protocol": "TCP", "port": 80}],
            });
            let _ = state.store.create(Kind::EndpointSlice, "east", "metrics-slice", slice);
        });
        until(simulation, "its backend is left out", |state| {
            is_warned(state, "Service", "metrics", "BackendsLeftOut")
        })
        .await;
        delete(simulation, Kind::EndpointSlice, "east", "metrics-slice");
        delete(simulation, Kind::Service, "east", "metrics");
        end_everything(simulation).await;
    });
}

#[test]
fn a_service_over_a_limit_of_size_says_so_until_it_fits() {
    check("too large", 1, async |simulation| {
        begin(simulation, 1).await;
        let ports = |count: u16| {
            let port = |port: u16| json!({"name": format!("p{port}"), "port": port, "targetPort": port});
            (1..=count).map(port).collect::<Value>()
        };
        simulation.with(|state| {
            let service = json!({
                "metadata": {"annotations": {"thuban.dev/network": "red-1"}},
                "spec": {"clusterIPs": ["10.96.0.20"], "ports": ports(129)},
            });
            let _ = state.store.create(Kind::Service, "east", "metrics", service);
        });
        until(simulation, "it has too many ports", |state| {
            is_warned(state, "Service", "metrics", "TooLarge")
                && is_endpoint(state, "metrics", "Ready", ("False", "TooLarge"))
        })
        .await;
        simulation.with(|state| {
            state.store.edit(Kind::Service, "east", "metrics", |service| {
                service["spec"]["ports"] = ports(128);
            });
        });
        until(simulation, "it is served", |state| {
            is_endpoint(state, "metrics", "Ready", ("True", "NoBackends"))
        })
        .await;
        delete(simulation, Kind::Service, "east", "metrics");
        end_everything(simulation).await;
    });
}

/// Whether the endpoint of a Service has a condition of this status and reason.
pub fn is_endpoint(state: &State, service: &str, told: &str, expected: (&str, &str)) -> bool {
    let mut endpoints = state.store.values(Kind::Endpoint);
    endpoints.any(|endpoint| {
        text(endpoint, "/metadata/name").starts_with(service)
            && condition(endpoint, told)
                .is_some_and(|told| (text(told, "/status"), text(told, "/reason")) == expected)
    })
}

#[test]
fn misspelt_annotations_are_told_of_wherever_they_are() {
    check("misspelt", 1, async |simulation| {
        begin(simulation, 1).await;
        let told = |state: &State, kind: &str, name: &str| is_warned(state, kind, name, "UnknownAnnotation");
        simulation.with(|state| {
            add_pod(state, "east", "p", "n0", &json!({"thuban.dev/network": "red-1"}));
            add_pod(state, "east", "q", "n0", &json!({"thuban.dev/networks": "red-1"}));
            state.store.edit(Kind::Namespace, "", "east", |space| {
                space["metadata"]["annotations"]["thuban.dev/Network"] = json!("red-1");
            });
            let service = json!({
                "metadata": {"annotations": {"thuban.dev/ip": "10.0.1.50"}},
                "spec": {"clusterIPs": ["10.96.0.21"], "ports": [{"port": 80, "targetPort": 80}]},
            });
            let _ = state.store.create(Kind::Service, "east", "s", service);
        });
        until(simulation, "each of them has an event", |state| {
            told(state, "Pod", "q") && told(state, "Namespace", "east") && told(state, "Service", "s")
        })
        .await;
        simulation.with(|state| assert!(!told(state, "Pod", "p")));
        delete(simulation, Kind::Service, "east", "s");
        end_everything(simulation).await;
    });
}
