//! Services of a VPC have addresses of the VPC until its limit, however many ask at once.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::sleep;

use super::told::is_endpoint;
use super::{begin, check, delete, end_everything, until};
use crate::kind::Kind;
use crate::operators;
use crate::simulation::{Simulation, State};
use crate::store::{condition, text};

const MAX_ADDRESSES: u16 = 256;

/// A network with room for more Services than its VPC may have.
fn make_large_network(state: &mut State) {
    let network = json!({"metadata": {}, "spec": {
        "vpc": "red", "cidrs": ["10.0.4.0/22"], "bouncers": 1, "allowedNamespaces": {}, "allowStaticIPs": true,
    }});
    let _ = state.store.create(Kind::Network, "", "large", network);
}

/// A Service whose own address is that many after the first of network `large`.
fn service_with_address(state: &mut State, index: u16) {
    let [high, low] = (index + 20).to_be_bytes();
    let address = format!("10.0.{}.{low}", 4 + high);
    let service = json!({
        "metadata": {"annotations": {"thuban.dev/network": "large", "thuban.dev/service-ip": address}},
        "spec": {
            "clusterIPs": [format!("10.96.{}.{low}", 1 + high)],
            "ports": [{"port": 80, "targetPort": 80}],
        },
    });
    let _ = state
        .store
        .create(Kind::Service, "east", &format!("s{index}"), service);
}

/// Whether an Endpoint has an address besides the Service's ClusterIP.
fn has_own_address(endpoint: &Value) -> bool {
    endpoint["status"]["addresses"][1].is_string()
}

/// Returns how many Services have their own address.
fn held(state: &State) -> usize {
    let endpoints = state.store.values(Kind::Endpoint);
    endpoints.filter(|endpoint| has_own_address(endpoint)).count()
}

/// Returns how many Services hear that their VPC has no room for their address.
fn left_out(state: &State) -> usize {
    let endpoints = state.store.values(Kind::Endpoint);
    let told = endpoints.filter_map(|endpoint| condition(endpoint, "ServiceAddress"));
    told.filter(|told| text(told, "/reason") == "TooMany").count()
}

fn is_left_out(state: &State, index: u16) -> bool {
    is_endpoint(
        state,
        &format!("s{index}-"),
        "ServiceAddress",
        ("False", "TooMany"),
    )
}

/// Deletes the large network with these Services, then everything else.
async fn end_with(simulation: &Arc<Simulation>, services: RangeInclusive<u16>) {
    for index in services {
        delete(simulation, Kind::Service, "east", &format!("s{index}"));
    }
    delete(simulation, Kind::Network, "", "large");
    end_everything(simulation).await;
}

#[test]
fn a_vpcs_services_have_addresses_until_its_limit() {
    check("too many", 1, async |simulation| {
        begin(simulation, 1).await;
        simulation.with(|state| {
            make_large_network(state);
            (0..MAX_ADDRESSES).for_each(|index| service_with_address(state, index));
        });
        until(simulation, "all have their addresses", |state| {
            let endpoints = state.store.values(Kind::Endpoint);
            let is_served = |endpoint: &&Arc<Value>| {
                has_own_address(endpoint) && text(endpoint, "/status/phase") == "Provisioned"
            };
            endpoints.filter(is_served).count() == usize::from(MAX_ADDRESSES)
        })
        .await;
        simulation.with(|state| service_with_address(state, MAX_ADDRESSES));
        until(simulation, "one more gets none", |state| {
            is_left_out(state, MAX_ADDRESSES)
        })
        .await;
        delete(simulation, Kind::Service, "east", "s0");
        until(simulation, "it gets the room of one that goes", |state| {
            !is_left_out(state, MAX_ADDRESSES)
        })
        .await;
        end_with(simulation, 1..=MAX_ADDRESSES).await;
    });
}

/// Many ask while others' claims are under way, and some of them under the next leader, which knows of no such claim.
#[test]
fn services_that_ask_at_once_stay_within_the_limit() {
    const LAST: u16 = MAX_ADDRESSES + 3;
    for seed in 1..=2 {
        check("at once", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            simulation.with(|state| {
                state.faults.slow_request = 100;
                make_large_network(state);
                (0..=LAST).for_each(|index| service_with_address(state, index));
            });
            if seed == 1 {
                until(simulation, "some have addresses", |state| held(state) > 100).await;
                first.crash();
                operators::start(simulation);
            }
            until(simulation, "each has an address or hears of the limit", |state| {
                held(state) + left_out(state) == usize::from(LAST) + 1
            })
            .await;
            // Those without an address try again meanwhile.
            sleep(Duration::from_secs(30)).await;
            simulation.with(|state| {
                state.faults.slow_request = 0;
                let held = held(state);
                if held != usize::from(MAX_ADDRESSES) {
                    state.violation(format!("{held} Services have an address of the VPC"));
                }
            });
            end_with(simulation, 0..=LAST).await;
        });
    }
}
