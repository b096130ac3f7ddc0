//! Network policies: by steps on several droplets, while a droplet doesn't know them or doesn't ack, and of a kind that
//! comes later.

use std::time::Duration;

use serde_json::{Value, json};
use thuban_rows::{BASELINE, Kinds};
use tokio::time::sleep;

use super::{
    begin, begin_in_use, check, delete, droplet_of, end_everything, exchange, has_pod, pod_on, until,
};
use crate::cluster::{add_node, add_pod};
use crate::droplet::Manner;
use crate::kind::Kind;
use crate::policies;
use crate::simulation::{Simulation, State};
use crate::store::{condition, text};

pub const EAST: &str = "east";

fn add(simulation: &Simulation, name: &str) {
    let policy = json!({"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
    simulation.with(|state| {
        let _ = state.store.create(Kind::NetworkPolicy, EAST, name, policy);
    });
}

/// Adds a pod of `red-1` with a label.
pub fn add_labelled(simulation: &Simulation, name: &str, node: &str, app: &str) {
    simulation.with(|state| {
        add_pod(state, EAST, name, node, &json!({"thuban.dev/network": "red-1"}));
        state.store.edit(Kind::Pod, EAST, name, |pod| {
            pod["metadata"]["labels"] = json!({"app": app});
        });
    });
}

/// Whether an object has a condition of this type, status and reason, of a generation.
fn tells(object: &Value, (kind, status, reason): (&str, &str, &str), generation: u64) -> bool {
    condition(object, kind).is_some_and(|told| {
        let is = |path, expected| text(told, path) == expected;
        is("/status", status) && is("/reason", reason) && told["observedGeneration"] == generation
    })
}

fn says_of(state: &State, name: &str, condition: (&str, &str, &str), generation: u64) -> bool {
    let told = state.store.value(Kind::PolicyState, EAST, name);
    told.is_some_and(|told| tells(told, condition, generation))
}

/// Whether the PolicyState of a policy that was never changed has the condition.
pub fn says(state: &State, name: &str, condition: (&str, &str, &str)) -> bool {
    says_of(state, name, condition, 1)
}

fn behave(simulation: &Simulation, nodes: &[&str], manner: Manner) {
    let droplets = &mut simulation.lock().droplets;
    for node in nodes {
        droplets.get_mut(*node).expect("a droplet").manner = manner;
    }
}

fn sets(state: &State) -> Vec<bool> {
    let droplets = state.droplets.values();
    let locals = droplets.flat_map(|droplet| droplet.tables.locals());
    locals.map(|row| row.ingress_set != 0).collect()
}

#[test]
fn a_policy_is_enforced_on_all_droplets_and_told() {
    for seed in 1..=5 {
        check("policy", seed, async |simulation| {
            begin_in_use(simulation, 1).await;
            add(simulation, "closed");
            until(simulation, "both pods are isolated", |state| {
                sets(state) == [true, true]
            })
            .await;
            until(simulation, "its author knows", |state| {
                says(state, "closed", ("Provisioned", "True", "Acknowledged"))
                    && says(state, "closed", ("Accepted", "True", "Accepted"))
            })
            .await;
            until(simulation, "all is well", |state| {
                policies::verdict(state).is_ok()
            })
            .await;
            delete(simulation, Kind::NetworkPolicy, EAST, "closed");
            until(simulation, "no pod is isolated", |state| {
                sets(state) == [false, false]
            })
            .await;
            until(simulation, "its PolicyState is gone", |state| {
                state.store.values(Kind::PolicyState).next().is_none()
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

fn classes(state: &State) -> Vec<u32> {
    let droplets = state.droplets.values();
    let locals = droplets.flat_map(|droplet| droplet.tables.locals());
    locals.map(|row| row.class).collect()
}

#[test]
fn other_labels_of_a_pod_or_namespace_count() {
    for seed in 1..=5 {
        check("policy-labels", seed, async |simulation| {
            begin_in_use(simulation, 1).await;
            let policy = json!({"spec": {
                "podSelector": {"matchLabels": {"app": "db"}},
                "ingress": [{"from": [{"namespaceSelector": {"matchLabels": {"team": "red"}}}]}],
            }});
            simulation.with(|state| {
                let _ = state.store.create(Kind::NetworkPolicy, EAST, "db", policy);
            });
            until(simulation, "its author knows", |state| {
                says(state, "db", ("Provisioned", "True", "Acknowledged"))
            })
            .await;
            simulation.with(|state| assert_eq!((sets(state), classes(state)), (vec![false; 2], vec![0; 2])));
            simulation.with(|state| {
                state.store.edit(Kind::Pod, EAST, "p", |pod| {
                    pod["metadata"]["labels"] = json!({"app": "db"});
                });
            });
            until(simulation, "the pod is isolated", |state| {
                sets(state) == [true, false] && classes(state) == [1, 1]
            })
            .await;
            simulation.with(|state| {
                state.store.edit(Kind::Namespace, "", EAST, |space| {
                    space["metadata"]["labels"]["team"] = json!("red");
                });
            });
            until(simulation, "the namespace's pods are peers", |state| {
                let classes = classes(state);
                classes.iter().all(|class| *class > 1) && classes[0] == classes[1]
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_policy_waits_for_the_upgrade_of_all_droplets() {
    for seed in 1..=5 {
        check("policy-upgrade", seed, async |simulation| {
            begin(simulation, 1).await;
            let old: Kinds = BASELINE.iter().copied().collect();
            exchange(simulation, "n0", &old);
            // The droplet has dialled again after this time.
            sleep(Duration::from_secs(20)).await;
            pod_on(simulation, "p", "n0").await;
            pod_on(simulation, "q", "n1").await;
            add(simulation, "closed");
            until(simulation, "it waits for the upgrade", |state| {
                says(state, "closed", ("Provisioned", "False", "WaitsForUpgrade"))
                    && policies::verdict(state).is_ok()
            })
            .await;
            simulation.with(|state| assert_eq!(sets(state), [false, false]));
            exchange(simulation, "n0", &Kinds::all());
            until(simulation, "both pods are isolated", |state| {
                sets(state) == [true, true] && has_pod(state, "n0")
            })
            .await;
            until(simulation, "its author knows", |state| {
                says(state, "closed", ("Provisioned", "True", "Acknowledged"))
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_changed_policy_is_provisioned_anew() {
    const PROVISIONED: (&str, &str, &str) = ("Provisioned", "True", "Acknowledged");
    for seed in 1..=5 {
        check("policy-changed", seed, async |simulation| {
            begin_in_use(simulation, 1).await;
            add(simulation, "closed");
            until(simulation, "its author knows", |state| {
                says(state, "closed", PROVISIONED)
            })
            .await;
            behave(simulation, &["n0", "n1"], Manner::Mute);
            simulation.with(|state| {
                state.store.edit(Kind::NetworkPolicy, EAST, "closed", |policy| {
                    policy["spec"]["policyTypes"] = json!(["Ingress", "Egress"]);
                });
            });
            until(simulation, "it waits for acks again", |state| {
                says_of(state, "closed", ("Provisioned", "False", "WaitsForAcks"), 2)
            })
            .await;
            sleep(Duration::from_secs(20)).await;
            simulation.with(|state| {
                let events = state.store.events_after(Kind::PolicyState, 0);
                let is_early = events.iter().any(|event| {
                    let told: Value = serde_json::from_slice(&event.object).expect("an object");
                    tells(&told, PROVISIONED, 2)
                });
                if is_early {
                    state.violation("it was Provisioned before anybody acked".into());
                }
            });
            behave(simulation, &["n0", "n1"], Manner::Honest);
            until(simulation, "its author knows again", |state| {
                says_of(state, "closed", PROVISIONED, 2)
            })
            .await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_policy_made_again_has_a_state_of_its_own() {
    for seed in 1..=5 {
        check("policy-again", seed, async |simulation| {
            begin_in_use(simulation, 1).await;
            let has_own = |state: &State| {
                let policy = state.store.value(Kind::NetworkPolicy, EAST, "closed");
                let told = state.store.value(Kind::PolicyState, EAST, "closed");
                let uid = policy.map(|policy| text(policy, "/metadata/uid"));
                let owner = told.map(|told| text(told, "/metadata/ownerReferences/0/uid"));
                owner == uid && says(state, "closed", ("Provisioned", "True", "Acknowledged"))
            };
            add(simulation, "closed");
            until(simulation, "it has a state", has_own).await;
            // The state of the first policy outlives that policy.
            simulation.lock().is_collector_away = true;
            delete(simulation, Kind::NetworkPolicy, EAST, "closed");
            add(simulation, "closed");
            until(simulation, "it has a state again", has_own).await;
            simulation.lock().is_collector_away = false;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn a_state_that_somebody_deletes_is_made_again() {
    check("policy-state", 1, async |simulation| {
        begin_in_use(simulation, 1).await;
        let has_state = |state: &State| says(state, "closed", ("Provisioned", "True", "Acknowledged"));
        add(simulation, "closed");
        until(simulation, "it has a state", has_state).await;
        delete(simulation, Kind::PolicyState, EAST, "closed");
        simulation.with(|state| assert!(!has_state(state)));
        until(simulation, "it has a state again", has_state).await;
        end_everything(simulation).await;
    });
}

#[test]
fn an_endpoint_waits_until_others_know_its_class() {
    for seed in 1..=5 {
        check("policy-ready", seed, async |simulation| {
            begin(simulation, 1).await;
            add_node(simulation, 2);
            let bounces = droplet_of(simulation, Kind::Bouncer, "red-1-b0");
            let divides = droplet_of(simulation, Kind::Divider, "red-d0");
            let mut nodes = ["n0", "n1", "n2"].into_iter();
            let other = nodes.find(|node| *node != bounces && *node != divides);
            let other = other.expect("a droplet without roles");
            add_labelled(simulation, "p", other, "db");
            let policy = json!({"spec": {
                "podSelector": {"matchLabels": {"app": "db"}},
                "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}],
            }});
            simulation.with(|state| {
                let _ = state.store.create(Kind::NetworkPolicy, EAST, "db", policy);
            });
            until(simulation, "the pod is isolated", |state| {
                sets(state) == [true] && says(state, "db", ("Provisioned", "True", "Acknowledged"))
            })
            .await;
            // Nothing but the class of the next pod is waited for there.
            behave(simulation, &[other], Manner::Mute);
            add_labelled(simulation, "q", &bounces, "web");
            until(simulation, "its droplet has the next pod's row", |state| {
                has_pod(state, &bounces)
            })
            .await;
            let is_ready = |state: &State| super::says(state, "q", "Acknowledged");
            sleep(Duration::from_secs(20)).await;
            simulation.with(|state| {
                if is_ready(state) {
                    state.violation("it is ready, though a droplet may not know its class".into());
                }
            });
            behave(simulation, &[other], Manner::Honest);
            until(simulation, "it is ready", is_ready).await;
            end_everything(simulation).await;
        });
    }
}

#[test]
fn cluster_policies_count_once_their_kind_is_there() {
    check("policy-kind", 1, async |simulation| {
        begin_in_use(simulation, 1).await;
        // The operator asks less often the longer the kind is missing.
        sleep(Duration::from_mins(10)).await;
        simulation.lock().unserved.remove(&Kind::ClusterNetworkPolicy);
        simulation.with(|state| {
            let subject = json!({"namespaces": {}});
            let rules = json!([{"action": "Deny", "from": [{"namespaces": {}}]}]);
            let spec = json!({"tier": "Admin", "priority": 1, "subject": subject, "ingress": rules});
            let policy = json!({"metadata": {}, "spec": spec});
            let _ = state
                .store
                .create(Kind::ClusterNetworkPolicy, "", "guard", policy);
        });
        until(simulation, "both pods have its rules", |state| {
            sets(state) == [true, true]
        })
        .await;
        until(simulation, "its author knows", |state| {
            let guard = state.store.value(Kind::ClusterNetworkPolicy, "", "guard");
            guard.is_some_and(|guard| tells(guard, ("Provisioned", "True", "Acknowledged"), 1))
        })
        .await;
        delete(simulation, Kind::ClusterNetworkPolicy, "", "guard");
        until(simulation, "no pod has a set", |state| {
            sets(state) == [false, false]
        })
        .await;
        end_everything(simulation).await;
    });
}

#[test]
fn a_policy_beyond_the_limits_is_told_until_there_is_room() {
    check("policy-limits", 1, async |simulation| {
        begin_in_use(simulation, 1).await;
        let add_large = |name: &str, count: u16| {
            let ports: Vec<Value> = (1..=count).map(|port| json!({"port": port})).collect();
            let policy = json!({"spec": {"podSelector": {}, "ingress": [{"ports": ports}]}});
            simulation.with(|state| {
                let _ = state.store.create(Kind::NetworkPolicy, EAST, name, policy);
            });
        };
        let is_good = |state: &State, name: &str| {
            says(state, name, ("Accepted", "True", "Accepted"))
                && says(state, name, ("Provisioned", "True", "Acknowledged"))
        };
        add_large("old", 15_000);
        until(simulation, "the first counts", |state| is_good(state, "old")).await;
        // Their ages are seconds.
        sleep(Duration::from_secs(1)).await;
        add_large("new", 6_000);
        until(simulation, "the second is refused", |state| {
            says(state, "new", ("Accepted", "False", "TooManyPolicies"))
                && says(state, "new", ("Provisioned", "False", "TooManyPolicies"))
        })
        .await;
        sleep(Duration::from_mins(1)).await;
        simulation.with(|state| {
            let events = state.store.values(Kind::Event);
            let count = events
                .filter(|event| text(event, "/reason") == "TooManyPolicies")
                .count();
            if count != 1 || !is_good(state, "old") {
                state.violation(format!("{count} events tell of it"));
            }
        });
        delete(simulation, Kind::NetworkPolicy, EAST, "old");
        until(simulation, "there is room for the second", |state| {
            is_good(state, "new") && sets(state) == [true, true]
        })
        .await;
        end_everything(simulation).await;
    });
}
