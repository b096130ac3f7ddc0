//! Tests of a pod's claim from the end of its Endpoint on: it rests, whoever leads and whoever wants the address.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::time::sleep;

use super::conditions::until_pod_says;
use super::{begin, check, delete, end_everything, has_pod, pod_on, says, second, until};
use crate::cluster::add_pod;
use crate::droplet::{Manner, Report};
use crate::invariants::addresses;
use crate::kind::Kind;
use crate::operators::{self, Operator};
use crate::schedule::NAMESPACES;
use crate::simulation::{Simulation, State};
use crate::store::text;

const EAST: &str = NAMESPACES[0];
/// The first address of the network.
const CLAIM: &str = "red.10.0.1.2";
/// A claim of this age may rest without a word in it.
const SETTLED: Duration = Duration::from_secs(25);
/// The time that an address rests.
const REST: Duration = Duration::from_secs(30);

fn is_claimed(state: &State) -> bool {
    state.store.get(Kind::IpClaim, "", CLAIM).is_some()
}

fn endpoint_of(state: &State, pod: &str) -> Option<String> {
    let mut endpoints = state.store.values(Kind::Endpoint);
    let endpoint = endpoints.find(|endpoint| text(endpoint, "/spec/podRef/name") == pod);
    endpoint.map(|endpoint| text(endpoint, "/metadata/name").to_owned())
}

/// Returns how often objects of the pod were written, by method and kind.
fn writes_of(operator: &Operator) -> BTreeMap<String, u64> {
    let mut counts: BTreeMap<String, u64> = BTreeMap::new();
    for (request, (times, _)) in operator.writes.lock().unwrap().iter() {
        let mut parts = request.split('/');
        let (what, status) = (parts.next().unwrap_or_default(), request.ends_with("/status"));
        if what.ends_with("ipclaims") || what.ends_with("endpoints") {
            let status = if status { " status" } else { "" };
            *counts.entry(format!("{what}{status}")).or_default() += times;
        }
    }
    counts
}

/// Makes a pod that is Provisioned, with a claim that is old enough to rest without a mark.
async fn begin_with_old_pod(simulation: &Arc<Simulation>) -> Arc<Operator> {
    let only = begin(simulation, 1).await;
    pod_on(simulation, "p", "n0").await;
    until_pod_says(simulation, "p", "Acknowledged").await;
    sleep(SETTLED).await;
    only
}

#[test]
fn a_pods_life_costs_five_writes_and_no_read() {
    for seed in 1..=3 {
        check("life", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            let before = writes_of(&only);
            pod_on(simulation, "p", "n0").await;
            until_pod_says(simulation, "p", "Acknowledged").await;
            sleep(SETTLED).await;
            delete(simulation, Kind::Pod, EAST, "p");
            until(simulation, "its claim is gone", |state| !is_claimed(state)).await;
            let mut written = writes_of(&only);
            for (request, times) in before {
                *written.entry(request).or_default() -= times;
            }
            let wanted = [
                ("DELETE endpoints", 1),
                ("DELETE ipclaims", 1),
                ("PATCH endpoints status", 1),
                ("POST endpoints", 1),
                ("POST ipclaims", 1),
            ];
            let wanted = wanted.map(|(request, times)| (request.to_owned(), times)).into();
            written.retain(|_, times| *times > 0);
            if written != wanted {
                simulation.lock().violation(format!("written were {written:?}"));
            }
            let read = only.reads.lock().unwrap().clone();
            if !read.is_empty() {
                simulation.lock().violation(format!("read were {read:?}"));
            }
            end_everything(simulation).await;
        });
    }
}

#[test]
fn claim_of_a_pod_that_lives_shortly_gets_no_mark() {
    for seed in 1..=3 {
        check("short", seed, async |simulation| {
            let only = begin(simulation, 1).await;
            pod_on(simulation, "p", "n0").await;
            until_pod_says(simulation, "p", "Acknowledged").await;
            delete(simulation, Kind::Pod, EAST, "p");
            until(simulation, "its claim is gone", |state| !is_claimed(state)).await;
            let marked = writes_of(&only).contains_key("PATCH ipclaims status");
            let read = only.reads.lock().unwrap().len();
            if marked || read != 1 {
                let what = format!("{read} were read, the claim was marked: {marked}");
                simulation.lock().violation(what);
            }
            end_everything(simulation).await;
        });
    }
}

#[test]
fn next_leader_lets_an_address_rest_again() {
    for seed in 1..=6 {
        check("rest-again", seed, async |simulation| {
            let first = begin_with_old_pod(simulation).await;
            delete(simulation, Kind::Pod, EAST, "p");
            until(simulation, "its Endpoint is gone", |state| {
                endpoint_of(state, "p").is_none()
            })
            .await;
            // The claim rests, for the first leader.
            sleep(Duration::from_secs(3 * seed)).await;
            first.crash();
            operators::start(simulation);
            sleep(REST).await;
            until(simulation, "it rests", is_claimed).await;
            until(simulation, "its claim is gone", |state| !is_claimed(state)).await;
            end_everything(simulation).await;
        });
    }
}

/// Makes a pod on a droplet that does not ack, with an Endpoint as earlier versions of the operator made it: with a
/// finalizer. It may be deleted while the pod lives. Its claim rests then, and the pod wants an Endpoint.
async fn begin_with_resting_claim(simulation: &Arc<Simulation>) {
    begin(simulation, 1).await;
    let be = |manner| {
        let droplets = &mut simulation.lock().droplets;
        droplets.get_mut("n0").expect("a droplet").manner = manner;
    };
    be(Manner::Mute);
    pod_on(simulation, "p", "n0").await;
    sleep(SETTLED).await;
    let old = endpoint_of(&simulation.lock(), "p").expect("an Endpoint");
    simulation.with(|state| {
        state.store.edit(Kind::Endpoint, EAST, &old, |endpoint| {
            endpoint["metadata"]["finalizers"] = json!(["thuban.dev/rows"]);
        });
    });
    super::force(simulation, Kind::Endpoint, EAST, &old);
    be(Manner::Honest);
}

/// Waits until the pod has the address of the claim that rested, and keeps it beyond the end of the rest.
async fn until_kept(simulation: &Arc<Simulation>) {
    let has_it = |state: &State| {
        let mut endpoints = state.store.values(Kind::Endpoint);
        let endpoint = endpoints.find(|endpoint| text(endpoint, "/spec/podRef/name") == "p");
        says(state, "p", "Acknowledged")
            && is_claimed(state)
            && endpoint.is_some_and(|endpoint| addresses(endpoint) == ["10.0.1.2"])
    };
    until(simulation, "the pod has its address again", has_it).await;
    sleep(REST * 2).await;
    until(simulation, "it keeps the address", has_it).await;
}

#[test]
fn living_pod_takes_its_claim_back_while_it_rests() {
    for seed in 1..=5 {
        check("taken-back", seed, async |simulation| {
            begin_with_resting_claim(simulation).await;
            until_kept(simulation).await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn endpoint_made_without_addresses_takes_a_resting_claim() {
    for seed in 1..=5 {
        check("taken-late", seed, async |simulation| {
            begin_with_resting_claim(simulation).await;
            // Its next Endpoint is denied for a while, and is then made without addresses.
            simulation.with(|state| state.full.insert(EAST.to_owned()));
            until(simulation, "its Endpoint is gone", |state| {
                endpoint_of(state, "p").is_none()
            })
            .await;
            sleep(Duration::from_secs(8)).await;
            simulation.with(|state| state.full.clear());
            until_kept(simulation).await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_pod_that_was_seen_after_its_endpoint_gets_its_rows() {
    for seed in 1..=5 {
        check("seen-late", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            let other = second(simulation, &first).await;
            let be = |manner| {
                let droplets = &mut simulation.lock().droplets;
                for droplet in droplets.values_mut() {
                    droplet.manner = manner;
                }
            };
            // The first operator takes the rows of an Endpoint whose pod it does not know, and waits for acks of that.
            first.deafen([Kind::Pod]);
            be(Manner::Mute);
            simulation.with(|state| add_pod(state, EAST, "p", "n0", &json!({"thuban.dev/network": "red-1"})));
            until(simulation, "the other makes its Endpoint", |state| {
                endpoint_of(state, "p").is_some()
            })
            .await;
            sleep(Duration::from_secs(5)).await;
            first.deafen([]);
            sleep(Duration::from_secs(1)).await;
            other.crash();
            be(Manner::Honest);
            until_pod_says(simulation, "p", "Acknowledged").await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_claim_stays_while_another_leader_brings_its_rows_again() {
    let mut noticed = 0;
    for seed in 1..=8 {
        check("brought-again", seed, async |simulation| {
            let first = begin_with_old_pod(simulation).await;
            let other = second(simulation, &first).await;
            other.deafen(Kind::ALL);
            // The first operator's deletion of the Endpoint takes up to six seconds.
            simulation.lock().faults.slow_request = 1000;
            delete(simulation, Kind::Pod, EAST, "p");
            until(simulation, "the first has taken its rows", |state| {
                !has_pod(state, "n0")
            })
            .await;
            simulation.lock().droplets["n0"].report(Report::Break);
            until(simulation, "the other has brought them again", |state| {
                has_pod(state, "n0")
            })
            .await;
            until(simulation, "its Endpoint is gone", |state| {
                endpoint_of(state, "p").is_none()
            })
            .await;
            simulation.lock().faults.slow_request = 0;
            // If the first has not noticed yet that the droplet is gone, only the rest keeps the address: it is longer
            // than a watch is late.
            let is_noticed = first.hub().is_some_and(|hub| !hub.is_connected("n0"));
            if is_noticed {
                noticed += 1;
                sleep(REST * 2).await;
                until(simulation, "its claim stays", is_claimed).await;
            }
            other.deafen([]);
            until(simulation, "its rows are gone", |state| !has_pod(state, "n0")).await;
            first.crash();
            until(simulation, "its claim is gone", |state| !is_claimed(state)).await;
            end_everything(simulation).await;
        });
    }
    assert!(noticed >= 3, "{noticed} of 8");
}

#[test]
fn only_its_namesake_has_an_address_that_rests() {
    for seed in 1..=5 {
        check("namesake", seed, async |simulation| {
            begin(simulation, 1).await;
            simulation.with(|state| {
                state.store.edit(Kind::Network, "", "red-1", |network| {
                    network["spec"]["allowStaticIPs"] = true.into();
                });
            });
            let asks = json!({"thuban.dev/network": "red-1", "thuban.dev/ip": "10.0.1.2"});
            simulation.with(|state| add_pod(state, EAST, "p", "n0", &asks));
            until_pod_says(simulation, "p", "Acknowledged").await;
            sleep(SETTLED).await;
            delete(simulation, Kind::Pod, EAST, "p");
            until(simulation, "its Endpoint is gone", |state| {
                endpoint_of(state, "p").is_none()
            })
            .await;
            let ended = simulation.lock().elapsed();
            simulation.with(|state| add_pod(state, EAST, "q", "n1", &asks));
            until_pod_says(simulation, "q", "AddressTaken").await;
            delete(simulation, Kind::Pod, EAST, "q");
            // Two requests give the claim to the namesake. Whoever asks between them has it.
            until(simulation, "it asks no more", |state| {
                endpoint_of(state, "q").is_none()
            })
            .await;
            simulation.with(|state| add_pod(state, EAST, "p", "n1", &asks));
            until_pod_says(simulation, "p", "Acknowledged").await;
            let took = simulation.lock().elapsed().saturating_sub(ended);
            if took >= REST {
                let what = format!("the namesake waited for {took:?}");
                simulation.lock().violation(what);
            }
            end_everything(simulation).await;
        });
    }
}
