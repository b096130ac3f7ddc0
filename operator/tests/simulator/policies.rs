//! NetworkPolicies: users make, change and delete them. Each reports once for each generation that it is not enforced,
//! whatever happens to operators and watches.

use serde_json::{Value, json};

use crate::kind::Kind;
use crate::random::Random;
use crate::schedule::NAMESPACES;
use crate::simulation::State;
use crate::store::{Preconditions, is_deleting, text};

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
            let label = random.next().to_string();
            state.store.edit(Kind::NetworkPolicy, namespace, &name, |policy| {
                policy["metadata"]["labels"] = json!({"app": label});
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

/// Checks that every policy has an event of its generation, and none has more events than it had generations.
pub fn verdict(state: &State) -> Result<(), String> {
    for ((_, namespace, name), policy) in state.store.all(Kind::NetworkPolicy) {
        let policy = &*policy.value;
        let space = state.store.value(Kind::Namespace, "", namespace);
        if space.is_none_or(|space| is_deleting(space)) {
            continue;
        }
        let uid = text(policy, "/metadata/uid");
        let events: Vec<&str> = state
            .store
            .values(Kind::Event)
            .filter(|event| text(event, "/regarding/uid") == uid)
            .filter(|event| text(event, "/reason") == "NetworkPolicyNotEnforced")
            .map(|event| text(event, "/metadata/name"))
            .collect();
        let latest = format!(".{}", generation(policy));
        if !events.iter().any(|event| event.ends_with(&latest)) {
            return Err(format!(
                "network policy {namespace}/{name}{latest} says nothing: {events:?}"
            ));
        }
        if events.len() as u64 > generation(policy) {
            return Err(format!(
                "network policy {namespace}/{name}{latest} says it more than once: {events:?}"
            ));
        }
    }
    Ok(())
}
