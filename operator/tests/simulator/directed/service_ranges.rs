//! Ranges of Services come and go while the cluster runs: Services in them are served, and who can't use them is told.

use std::time::Duration;

use serde_json::json;
use thuban_proto::transit::row::Row;
use tokio::time::sleep;

use super::{begin, check, delete, end_everything, until};
use crate::deletions;
use crate::kind::Kind;
use crate::schedule::NAMESPACES;
use crate::simulation::State;
use crate::store::text;
use crate::tables::Slot;

/// Whether the Service's Endpoint has this reason for its readiness.
fn says(state: &State, reason: &str) -> bool {
    let mut endpoints = state.store.values(Kind::Endpoint);
    endpoints.any(|endpoint| {
        let conditions = endpoint.pointer("/status/conditions");
        let conditions = conditions.and_then(|conditions| conditions.as_array());
        conditions
            .into_iter()
            .flatten()
            .any(|condition| text(condition, "/type") == "Ready" && text(condition, "/reason") == reason)
    })
}

fn is_served(state: &State) -> bool {
    let mut droplets = state.droplets.values();
    droplets.any(|droplet| {
        let mut rows = droplet.tables.rows.keys();
        rows.any(|slot| matches!(slot, Slot::Service(..)))
    })
}

fn is_told(state: &State, name: &str, reason: &str) -> bool {
    state
        .told
        .contains(&["ServiceCIDR", name, reason].map(str::to_owned).into())
}

fn is_vpc_told(state: &State) -> bool {
    deletions::says(state, (Kind::Vpc, "", "red"), "Accepted", "RangeRefused")
}

#[test]
fn services_in_ranges_that_come_later_are_served() {
    check("service ranges", 1, async |simulation| {
        begin(simulation, 1).await;
        let make = |name: &str, range: &str| {
            simulation.with(|state| {
                let object = json!({"metadata": {}, "spec": {"cidrs": [range]}});
                let _ = state.store.create(Kind::ServiceCidr, "", name, object);
            });
        };
        simulation.with(|state| {
            let service = json!({
                "metadata": {"annotations": {"thuban.dev/network": "red-1"}},
                "spec": {"clusterIPs": ["10.112.0.20"], "ports": [{"port": 80, "targetPort": 80}]},
            });
            let _ = state.store.create(Kind::Service, NAMESPACES[0], "s", service);
        });
        until(simulation, "the Service is in no range", |state| {
            says(state, "OutsideServiceRanges")
        })
        .await;
        make("extra", "10.112.0.0/24");
        until(simulation, "the Service is served", |state| {
            is_served(state) && says(state, "NoBackends")
        })
        .await;
        // Whoever adds a node takes the range from nobody.
        simulation.with(|state| {
            let node = json!({
                "metadata": {},
                "spec": {},
                "status": {"addresses": [{"type": "InternalIP", "address": "10.112.0.200"}]},
            });
            let _ = state.store.create(Kind::Node, "", "young", node);
        });
        sleep(Duration::from_secs(5)).await;
        simulation.with(|state| {
            if !is_served(state) || is_told(state, "extra", "RangeRefused") {
                state.violation("a younger node took the range of a Service".into());
            }
        });
        delete(simulation, Kind::Node, "", "young");
        make("clash", "10.0.5.0/24");
        until(simulation, "both sides of an overlap are told", |state| {
            is_told(state, "clash", "RangeOverlapsVpc") && is_vpc_told(state)
        })
        .await;
        delete(simulation, Kind::ServiceCidr, "", "clash");
        until(simulation, "the VPC has its ranges for itself", |state| {
            !is_vpc_told(state)
        })
        .await;
        // Nodes and what they talk to are in this range.
        make("nodes", "192.168.7.0/24");
        until(simulation, "a range with nodes is refused", |state| {
            is_told(state, "nodes", "RangeRefused")
        })
        .await;
        sleep(Duration::from_secs(5)).await;
        simulation.with(|state| {
            let rows = state
                .droplets
                .values()
                .flat_map(|droplet| droplet.tables.rows.values());
            let is_known = rows.filter_map(|row| match &row.row {
                Some(Row::Vpc(row)) => Some(&row.service_cidrs),
                _ => None,
            });
            if is_known.flatten().any(|range| range.starts_with("192.168.")) {
                state.violation("nodes are in a service range".into());
            }
        });
        delete(simulation, Kind::ServiceCidr, "", "nodes");
        delete(simulation, Kind::ServiceCidr, "", "extra");
        until(simulation, "the Service is in no range again", |state| {
            !is_served(state) && says(state, "OutsideServiceRanges")
        })
        .await;
        delete(simulation, Kind::Service, NAMESPACES[0], "s");
        end_everything(simulation).await;
    });
}

#[test]
fn an_api_server_without_service_cidrs_is_enough() {
    check("no service cidrs", 1, async |simulation| {
        simulation.lock().unserved.insert(Kind::ServiceCidr);
        begin(simulation, 1).await;
        end_everything(simulation).await;
    });
}
