//! What policies deny, as droplets report it: it is written to the PolicyState of a policy that asks for it, and of no
//! other one.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use thuban_api::SYSTEM_NAMESPACE;
use thuban_api::identifiers::mapped;
use thuban_proto::transit::{Denial, Denials, PolicyKey};
use tokio::time::sleep;

use super::policies::EAST;
use super::{begin_in_use, check, delete, end_everything, until};
use crate::droplet::{Droplet, Report};
use crate::kind::Kind;
use crate::operators;
use crate::simulation::{Simulation, State};
use crate::store::text;

/// The namespace and name of a PolicyState.
type Place = (&'static str, &'static str);

const CLOSED: Place = (EAST, "closed");

fn add(simulation: &Simulation, name: &str, is_reported: bool) {
    let policy = json!({
        "metadata": {"annotations": {"thuban.dev/report-denied": is_reported.to_string()}},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    });
    simulation.with(|state| {
        let _ = state.store.create(Kind::NetworkPolicy, EAST, name, policy);
    });
}

fn denied(state: &State, (namespace, name): Place) -> Option<&Value> {
    let told = state.store.value(Kind::PolicyState, namespace, name)?;
    told.pointer("/status/denied").filter(|denied| !denied.is_null())
}

fn packets(state: &State, place: Place) -> Option<u64> {
    denied(state, place)?["packets"].as_u64()
}

/// Returns the mapped address of a pod.
fn address(state: &State, pod: &str) -> Vec<u8> {
    let mut locals = state
        .droplets
        .values()
        .flat_map(|droplet| droplet.tables.locals());
    let row = locals.find(|row| row.pod_name == pod).expect("a pod's row");
    row.address.clone()
}

fn asked(droplet: &Droplet) -> Option<PolicyKey> {
    droplet.asked.first().copied()
}

async fn until_asked(simulation: &Arc<Simulation>) {
    until(simulation, "both droplets are asked", |state| {
        state.droplets.values().all(|droplet| asked(droplet).is_some())
    })
    .await;
}

/// Reports packets to the pod `p` as denied by the first set that its droplet was asked about.
fn report(simulation: &Simulation, from: &str, packets: u64, rank: u32) {
    simulation.with(|state| {
        let source = match from.parse::<std::net::IpAddr>() {
            Ok(outside) => mapped(outside).to_vec(),
            Err(_) => address(state, from),
        };
        let destination = address(state, "p");
        let droplet = &state.droplets["n0"];
        let key = asked(droplet).expect("a question");
        let denial = Denial {
            vni: key.vni,
            set: key.id,
            rank,
            packets,
            source,
            destination,
            protocol: 6,
            port: 80,
            age_ms: 2000,
        };
        let denials = Denials {
            denials: vec![denial],
            ..Denials::default()
        };
        let stream = droplet.stream.as_ref().expect("a stream");
        let _ = stream.outbox.send(Report::Denials(denials));
    });
}

fn writes(state: &State) -> usize {
    let events = state.store.events_after(Kind::PolicyState, 0);
    events.len()
}

#[test]
fn what_a_policy_denies_is_told_while_it_asks() {
    for seed in 1..=5 {
        check("reported", seed, async |simulation| {
            let first = begin_in_use(simulation, 1).await;
            add(simulation, "closed", true);
            add(simulation, "silent", false);
            until(simulation, "the count begins", |state| {
                packets(state, CLOSED) == Some(0)
            })
            .await;
            until_asked(simulation).await;
            report(simulation, "q", 5, 9999);
            report(simulation, "192.0.2.77", 2, 9999);
            until(simulation, "both are told", |state| {
                packets(state, CLOSED) == Some(7)
            })
            .await;
            simulation.with(|state| {
                let told = denied(state, CLOSED).expect("what was denied").clone();
                let peers = told["lastPeers"].as_array().expect("peers");
                let is = |peer: &Value, address: &str, name: &Value| {
                    text(peer, "/address") == address && peer["peerPod"] == *name
                };
                let q: [u8; 4] = address(state, "q")[12..].try_into().expect("IPv4");
                let q = std::net::Ipv4Addr::from(q).to_string();
                assert!(peers.iter().any(|peer| is(peer, &q, &json!("east/q"))), "{told}");
                assert!(
                    peers.iter().any(|peer| is(peer, "192.0.2.77", &Value::Null)),
                    "{told}"
                );
                assert!(peers.len() == 2 && peers[0]["pod"] == "east/p", "{told}");
                assert_eq!(
                    (&peers[0]["protocol"], &peers[0]["port"]),
                    (&json!("TCP"), &json!(80))
                );
                assert!(denied(state, (EAST, "silent")).is_none());
            });

            // A minute of reports is a write or two.
            let before = simulation.with(|state| writes(state));
            for _ in 0..60 {
                report(simulation, "q", 1, 9999);
                sleep(Duration::from_secs(1)).await;
            }
            sleep(Duration::from_secs(90)).await;
            let more = simulation.with(|state| writes(state)) - before;
            assert!((1..=2).contains(&more), "{more} writes");
            simulation.with(|state| assert_eq!(packets(state, CLOSED), Some(67)));
            sleep(Duration::from_mins(5)).await;
            assert_eq!(
                simulation.with(|state| writes(state)) - before,
                more,
                "nothing is new"
            );

            // The next operator goes on with the same count.
            first.crash();
            operators::start(simulation);
            sleep(Duration::from_secs(30)).await;
            until_asked(simulation).await;
            report(simulation, "q", 3, 9999);
            until(simulation, "the count goes on", |state| {
                packets(state, CLOSED) == Some(70)
            })
            .await;

            simulation.with(|state| {
                state.store.edit(Kind::NetworkPolicy, EAST, "closed", |policy| {
                    policy["metadata"]["annotations"] = json!({});
                });
            });
            until(simulation, "nothing is told or asked any more", |state| {
                let is_asked = |droplet: &Droplet| asked(droplet).is_some();
                denied(state, CLOSED).is_none() && !state.droplets.values().any(is_asked)
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn what_a_cluster_policy_denies_is_told_to_the_platform_team() {
    const GUARD: Place = (SYSTEM_NAMESPACE, "guard");
    check("reported-cluster", 1, async |simulation| {
        begin_in_use(simulation, 1).await;
        simulation.lock().unserved.remove(&Kind::ClusterNetworkPolicy);
        simulation.with(|state| {
            let _ = state
                .store
                .create(Kind::Namespace, "", SYSTEM_NAMESPACE, json!({"metadata": {}}));
            let subject = json!({"namespaces": {}});
            let rules = json!([{"action": "Deny", "from": [{"namespaces": {}}]}]);
            let policy = json!({
                "metadata": {"annotations": {"thuban.dev/report-denied": "true"}},
                "spec": {"tier": "Admin", "priority": 1, "subject": subject, "ingress": rules},
            });
            let _ = state
                .store
                .create(Kind::ClusterNetworkPolicy, "", "guard", policy);
        });
        until(simulation, "its count begins", |state| {
            packets(state, GUARD) == Some(0)
        })
        .await;
        until_asked(simulation).await;
        report(simulation, "q", 4, 9999);
        report(simulation, "q", 5, 0);
        until(simulation, "what its rule denied is told", |state| {
            packets(state, GUARD) == Some(5)
        })
        .await;
        simulation.with(|state| {
            let told = state.store.value(Kind::PolicyState, GUARD.0, GUARD.1);
            let told = told.expect("its state");
            assert_eq!(told["status"]["pods"], 2);
            assert!(told.to_string().contains("Provisioned"), "{told}");
            state
                .store
                .edit(Kind::ClusterNetworkPolicy, "", "guard", |policy| {
                    policy["metadata"]["annotations"] = json!({});
                });
        });
        until(simulation, "it has no state any more", |state| {
            state.store.value(Kind::PolicyState, GUARD.0, GUARD.1).is_none()
        })
        .await;
        delete(simulation, Kind::ClusterNetworkPolicy, "", "guard");
        end_everything(simulation).await;
    });
}

/// Returns the notes of the events about the annotation of the policy `closed`.
fn notes(state: &State) -> Vec<&str> {
    let events = state.store.values(Kind::Event);
    let own = events.filter(|event| text(event, "/reason") == "InvalidAnnotation");
    own.filter(|event| text(event, "/regarding/name") == CLOSED.1)
        .map(|event| text(event, "/note"))
        .collect()
}

#[test]
fn a_value_of_the_annotation_without_effect_is_told() {
    check("reported-value", 1, async |simulation| {
        begin_in_use(simulation, 1).await;
        add(simulation, "closed", false);
        let set = |value: &str| {
            simulation.with(|state| {
                state.store.edit(Kind::NetworkPolicy, EAST, "closed", |policy| {
                    policy["metadata"]["annotations"] = json!({"thuban.dev/report-denied": value});
                });
            });
        };
        sleep(Duration::from_secs(30)).await;
        simulation.with(|state| assert_eq!(notes(state), [""; 0], "false is no mistake"));
        set("yes");
        until(simulation, "the value is told", |state| {
            notes(state).iter().any(|note| note.contains("\"yes\""))
        })
        .await;
        simulation.with(|state| assert!(denied(state, CLOSED).is_none()));
        set("true");
        until(simulation, "the count begins", |state| {
            packets(state, CLOSED) == Some(0)
        })
        .await;
        end_everything(simulation).await;
    });
}
