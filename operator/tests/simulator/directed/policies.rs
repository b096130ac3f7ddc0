//! Network policies: by steps on several droplets, and while a droplet doesn't know them.

use serde_json::{Value, json};
use thuban_rows::{BASELINE, Kinds};

use super::{begin, begin_in_use, check, delete, end_everything, exchange, has_pod, pod_on, until};
use crate::kind::Kind;
use crate::policies;
use crate::simulation::{Simulation, State};
use crate::store::text;

const EAST: &str = "east";

fn add(simulation: &Simulation, name: &str) {
    let policy = json!({"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
    simulation.with(|state| {
        let _ = state.store.create(Kind::NetworkPolicy, EAST, name, policy);
    });
}

/// Returns the conditions of the policy's PolicyState: type, status and reason.
fn told(state: &State, name: &str) -> Vec<(String, String, String)> {
    let told = state.store.value(Kind::PolicyState, EAST, name);
    let conditions = told.and_then(|told| told.pointer("/status/conditions")?.as_array().cloned());
    let field = |condition: &Value, path: &str| text(condition, path).to_owned();
    let conditions = conditions.into_iter().flatten();
    conditions
        .map(|condition| {
            let of = |path| field(&condition, path);
            (of("/type"), of("/status"), of("/reason"))
        })
        .collect()
}

fn says(state: &State, name: &str, (kind, status, reason): (&str, &str, &str)) -> bool {
    told(state, name).contains(&(kind.into(), status.into(), reason.into()))
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
            tokio::time::sleep(std::time::Duration::from_secs(20)).await;
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
