//! NetworkPolicies: users make, change and delete them. Each is enforced in the end, and its PolicyState says so. While
//! a droplet doesn't enforce policies, each reports that once for each generation, whatever happens to operators and
//! watches.

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::{Value, json};
use thuban_rows::{Kind as Row, PolicyId};

use crate::droplet::Droplet;
use crate::kind::Kind;
use crate::random::Random;
use crate::schedule::NAMESPACES;
use crate::simulation::State;
use crate::store::{Preconditions, condition, is_deleting, text};
use crate::tables::{Slot, number};

/// Does a random action of users.
pub fn step(state: &mut State, random: &mut Random) {
    let namespace = NAMESPACES[random.below(2) as usize];
    let name = format!("p{}", random.below(3));
    match random.below(5) {
        0..2 => {
            let policy = json!({"spec": {"podSelector": {}, "policyTypes": ["Ingress"]}});
            if state
                .store
                .create(Kind::NetworkPolicy, namespace, &name, policy)
                .is_ok()
            {
                state.note(|| format!("network policy {namespace}/{name} is created"));
            }
        }
        2 => {
            let label = random.next().to_string();
            state.note(|| format!("network policy {namespace}/{name} gets other rules"));
            state.store.edit(Kind::NetworkPolicy, namespace, &name, |policy| {
                policy["spec"]["podSelector"] = json!({"matchLabels": {"app": label}});
            });
        }
        3 => {
            let label = random.next();
            state.store.edit(Kind::NetworkPolicy, namespace, &name, |policy| {
                policy["metadata"]["labels"] = json!({"app": label.to_string()});
                policy["metadata"]["annotations"] =
                    json!({"thuban.dev/report-denied": label.is_multiple_of(2).to_string()});
            });
        }
        _ => {
            state.note(|| format!("network policy {namespace}/{name} is deleted"));
            let _ = state.store.delete(
                Kind::NetworkPolicy,
                namespace,
                &name,
                &Preconditions::default(),
                false,
            );
        }
    }
}

fn generation(policy: &Value) -> u64 {
    policy["metadata"]["generation"].as_u64().unwrap_or_default()
}

/// Checks that droplets enforce every policy, and that its author was told.
pub fn verdict(state: &State) -> Result<(), String> {
    let enforces = |droplet: &Droplet| {
        [Row::Class, Row::PolicySet]
            .into_iter()
            .all(|kind| droplet.kinds.contains(kind))
    };
    let are_all_enforcing = state.droplets.values().all(enforces);
    for ((_, namespace, name), policy) in state.store.all(Kind::NetworkPolicy) {
        let policy = &*policy.value;
        let space = state.store.value(Kind::Namespace, "", namespace);
        if space.is_none_or(|space| is_deleting(space)) {
            continue;
        }
        has_events(state, policy, are_all_enforcing)
            .and_then(|()| has_state(state, policy, are_all_enforcing))
            .map_err(|why| format!("network policy {namespace}/{name}.{} {why}", generation(policy)))?;
    }
    if are_all_enforcing {
        are_isolated(state)?;
    }
    Ok(())
}

/// Checks that a policy that isn't enforced has an event of its generation, and no more events than it had generations.
fn has_events(state: &State, policy: &Value, are_all_enforcing: bool) -> Result<(), String> {
    let uid = text(policy, "/metadata/uid");
    let events: Vec<&str> = state
        .store
        .values(Kind::Event)
        .filter(|event| text(event, "/regarding/uid") == uid)
        .filter(|event| text(event, "/reason") == "NetworkPolicyNotEnforced")
        .map(|event| text(event, "/metadata/name"))
        .collect();
    let latest = format!(".{}", generation(policy));
    if !are_all_enforcing && !events.iter().any(|event| event.ends_with(&latest)) {
        return Err(format!("says nothing: {events:?}"));
    }
    if events.len() as u64 > generation(policy) {
        return Err(format!("says it more than once: {events:?}"));
    }
    Ok(())
}

/// Checks that the PolicyState of a policy is of its generation, and says whether it is enforced.
fn has_state(state: &State, policy: &Value, are_all_enforcing: bool) -> Result<(), String> {
    let namespace = text(policy, "/metadata/namespace");
    let told = state
        .store
        .value(Kind::PolicyState, namespace, text(policy, "/metadata/name"))
        .ok_or("has no PolicyState")?;
    let provisioned = condition(told, "Provisioned").ok_or("has a PolicyState without conditions")?;
    if provisioned["observedGeneration"] != policy["metadata"]["generation"] {
        return Err(format!("has a PolicyState of an earlier generation: {told}"));
    }
    if are_all_enforcing && text(provisioned, "/status") != "True" {
        return Err(format!("is not Provisioned: {told}"));
    }
    let is_reported = policy["metadata"]["annotations"]["thuban.dev/report-denied"] == "true";
    if told
        .pointer("/status/denied")
        .is_some_and(|denied| !denied.is_null())
        != is_reported
    {
        return Err(format!("is to say what was denied ({is_reported}): {told}"));
    }
    Ok(())
}

/// Checks that all pods of a namespace with a policy of all its pods have a set for packets to them, and others have
/// none: all other policies select no pod.
fn are_isolated(state: &State) -> Result<(), String> {
    let of_all = |policy: &&Arc<Value>| policy["spec"]["podSelector"] == json!({});
    let policies = state.store.values(Kind::NetworkPolicy).filter(of_all);
    let isolated: BTreeSet<&str> = policies
        .map(|policy| text(policy, "/metadata/namespace"))
        .collect();
    for droplet in state.droplets.values() {
        let mut locals = droplet.tables.locals().filter(|row| row.ready && !row.host);
        let wrong = locals.find(|row| {
            let is_isolated = isolated.contains(row.pod_namespace.as_str());
            (row.ingress_set != 0) != is_isolated || row.egress_set != 0
        });
        if let Some(row) = wrong {
            return Err(format!("{} has {row:?}, isolated are {isolated:?}", droplet.name));
        }
    }
    Ok(())
}

/// Checks that a droplet has the rows of all classes and sets of its endpoints.
pub fn locals_are_judged(droplet: &Droplet) -> Result<(), String> {
    let id = |number| PolicyId::new(number).filter(|id| *id != PolicyId::PLAIN);
    for row in droplet.tables.locals() {
        let vni = number(row.vni);
        let class = id(row.class).map(|id| Slot::Class(vni, id));
        let sets = [row.ingress_set, row.egress_set].into_iter().filter_map(id);
        let sets = sets.map(|id| Slot::PolicySet(vni, id));
        let mut slots = class.into_iter().chain(sets);
        if let Some(slot) = slots.find(|slot| !droplet.tables.rows.contains_key(slot)) {
            return Err(format!("{} has {row:?} without {slot:?}", droplet.name));
        }
    }
    Ok(())
}
