//! Sets of two policies whose hashes begin alike: leaders that meet them in another order give their ids to others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};
use thuban_operator::model::policy::{Labels, Member, Policies};
use thuban_proto::transit::row::Row;
use thuban_rows::PolicyId;

use super::policies::{EAST, add_labelled, says};
use super::{begin, check, end_everything, until};
use crate::kind::Kind;
use crate::operators;
use crate::simulation::State;
use crate::tables::{Slot, number};

/// Lets pods of a label take packets to a port.
fn spec(app: &str) -> Value {
    json!({"podSelector": {"matchLabels": {"app": app}}, "ingress": [{"ports": [{"port": 80}]}]})
}

/// Returns the id that the set of a policy would have.
fn id_of(name: &str, app: &str) -> PolicyId {
    let mut policies = Policies::default();
    let spec = serde_json::from_value(spec(app)).expect("a spec");
    policies
        .set_network_policy(EAST, name, 0, Some(&spec))
        .expect("a good policy");
    let labels: Labels = [("app".to_owned(), app.to_owned())].into();
    let applied = policies.apply(&Member {
        namespace: EAST,
        labels: &labels,
        ports: &[].into(),
        vpc: "red",
        network: "red-1",
        on_host_network: false,
    });
    applied.ingress.expect("a set").id(0)
}

/// Returns names of two policies, for `web` and for `db`, whose sets have one id.
fn colliding() -> [String; 2] {
    let mut known: [HashMap<PolicyId, String>; 2] = Default::default();
    for tried in 0.. {
        let ids = ["web", "db"].map(|app| id_of(&format!("{app}-{tried}"), app));
        known[0].insert(ids[0], format!("web-{tried}"));
        known[1].insert(ids[1], format!("db-{tried}"));
        let found = ids
            .iter()
            .find_map(|id| Some([known[0].get(id)?, known[1].get(id)?]));
        if let Some(names) = found {
            return names.map(Clone::clone);
        }
    }
    unreachable!("ids have 24 bits")
}

/// Returns the policies that judge packets to each ready pod where it is, by the pod's name.
fn judges(state: &State) -> Vec<(String, String)> {
    let mut judges = Vec::new();
    for droplet in state.droplets.values() {
        for local in droplet.tables.locals().filter(|local| local.ready) {
            let id = PolicyId::new(local.ingress_set);
            let set = id.and_then(|id| droplet.tables.rows.get(&Slot::PolicySet(number(local.vni), id)));
            let rules = match set.map(|set| &set.row) {
                Some(Some(Row::PolicySet(set))) => &set.rules[..],
                _ => &[],
            };
            let policies: Vec<&str> = rules.iter().map(|rule| &*rule.policy).collect();
            judges.push((local.pod_name.clone(), policies.join(",")));
        }
    }
    judges.sort();
    judges
}

#[test]
fn sets_of_one_hash_are_told_apart_under_the_next_leader() {
    let [web, db] = colliding();
    let refusals = AtomicUsize::new(0);
    for seed in 1..=5 {
        check("policy-ids", seed, async |simulation| {
            let first = begin(simulation, 1).await;
            add_labelled(simulation, "p", "n0", "web");
            add_labelled(simulation, "q", "n1", "db");
            // Leaders meet pods by name: a later one meets the set of `web` first.
            for (name, app) in [(&db, "db"), (&web, "web")] {
                simulation.with(|state| {
                    let policy = json!({"spec": spec(app)});
                    let _ = state.store.create(Kind::NetworkPolicy, EAST, name, policy);
                });
                until(simulation, "the policy is enforced", |state| {
                    says(state, name, ("Provisioned", "True", "Acknowledged"))
                })
                .await;
            }
            let own = [("p", &web), ("q", &db)];
            let own = own.map(|(pod, policy)| (pod.to_owned(), format!("{EAST}/{policy}")));
            let are_told_apart = |state: &State| judges(state) == own;
            until(simulation, "each pod has its own set", are_told_apart).await;
            // The next leader learns at once only of pods that droplets have attached.
            until(simulation, "both pods are attached", |state| {
                let droplets = state.droplets.values();
                droplets.map(|droplet| droplet.attachments.len()).sum::<usize>() == own.len()
            })
            .await;
            first.crash();
            let next = operators::start(simulation);
            until(simulation, "all droplets follow the next leader", |state| {
                let mut droplets = state.droplets.values();
                droplets.all(|droplet| droplet.follows(next.epoch))
            })
            .await;
            until(simulation, "each pod has its own set again", are_told_apart).await;
            let has_refused = |state: &mut State| {
                let mut droplets = state.droplets.values();
                droplets.any(|droplet| droplet.tables.times_taken > 0)
            };
            if simulation.with(has_refused) {
                refusals.fetch_add(1, Ordering::Relaxed);
            }
            end_everything(simulation).await;
        });
    }
    // A leader that learns of the policies as the first one did gives the ids as the first one did.
    assert_ne!(refusals.into_inner(), 0, "no droplet has refused a set");
}
