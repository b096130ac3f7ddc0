//! PolicyState: tells the author of a NetworkPolicy how far it is enforced. ClusterNetworkPolicies have conditions of
//! their own that say the same.
//!
//! Invariant: a status is written when a condition changes, not for each pod or droplet. A policy that was Provisioned
//! stays so until it changes.

use std::time::Duration;

use kube::api::ObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::condition::{find, set};
use thuban_api::{Condition, ConditionStatus, PolicyState, PolicyStateSpec};

use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{Object, condition, create, delete, owner, update_status};
use crate::controller::runtime::watch::Change;
use crate::hub::{PolicyStanding, WAITS_FOR_ACKS, WAITS_FOR_UPGRADE};
use crate::model::cached::NetworkPolicy;

/// How long a policy waits before a condition says so: acks take milliseconds.
const CONDITION_DELAY: Duration = Duration::from_secs(1);
/// How often a policy that waits is looked at, besides when droplets ack.
const WAIT_RETRY: Duration = Duration::from_secs(10);
/// How long the workflow waits for the watch.
const WATCH_RETRY: Duration = Duration::from_millis(500);

const MALFORMED: &str = "Malformed";
const TOO_MANY: &str = "TooManyPolicies";
const PROVISIONED: &str = "Provisioned";

pub fn on_change(context: &Context, change: &Change<PolicyState>) {
    // One that somebody deletes is made again.
    if let Change::Gone(state) = change {
        let namespace = state.namespace().unwrap_or_default();
        context.hub.triggers.network_policy(&namespace, &state.name_any());
    }
}

/// What is to be said of a policy.
pub struct Told {
    pub standing: PolicyStanding,
    /// None: nothing has to be written yet, or nothing is new.
    pub conditions: Option<Vec<Condition>>,
    pub next: Action,
}

/// Returns what is to be said of a policy, of which `known` is said already. `name` is the name by which the world
/// knows it. Writes an event if it is malformed and that is news.
pub fn tell<K: Object>(policy: &K, name: &str, known: &[Condition], context: &Context) -> Told {
    let generation = policy.meta().generation;
    let whose = format!(
        "{}.{}",
        policy.uid().unwrap_or_default(),
        generation.unwrap_or_default()
    );
    let (reason, problem) = context.hub.read(|world| {
        let policies = world.policies();
        let malformed = || policies.problem(name).map(ToString::to_string);
        match policies.refused(name) {
            Some(refused) => (TOO_MANY, Some(refused.to_string())),
            None => (MALFORMED, malformed()),
        }
    });
    let standing = context.hub.policy_standing(name);
    let is_in_force = standing.is_some();
    let standing = standing.unwrap_or_default();
    let accepted = match &problem {
        None => condition("Accepted", true, "Accepted", "", generation),
        Some(problem) => condition("Accepted", false, reason, problem, generation),
    };
    let mut conditions = known.to_vec();
    let is_news = set(&mut conditions, accepted);
    let mut next = Action::await_change();
    let was_provisioned = find(known, PROVISIONED).is_some_and(|known| {
        known.status == ConditionStatus::True && known.observed_generation == generation
    });
    if !was_provisioned || !is_in_force {
        let provisioned = if is_in_force {
            provisioned(&standing, generation)
        } else {
            let message = "not in force as it is written: see the condition Accepted";
            condition(PROVISIONED, false, reason, message, generation)
        };
        let is_true = provisioned.status == ConditionStatus::True;
        if is_true || !is_in_force {
            context.clocks.forget(Timed::PolicyWait, &whose);
        } else {
            next = Action::requeue(WAIT_RETRY);
            if context.clocks.known_for(Timed::PolicyWait, &whose) < CONDITION_DELAY {
                return Told {
                    standing,
                    conditions: None,
                    next: Action::requeue(CONDITION_DELAY),
                };
            }
        }
        set(&mut conditions, provisioned);
    }
    if let (true, Some(problem)) = (is_news, &problem) {
        context.events.event(policy, true, reason, problem);
    }
    Told {
        standing,
        conditions: (conditions != known).then_some(conditions),
        next,
    }
}

fn provisioned(standing: &PolicyStanding, generation: Option<i64>) -> Condition {
    let condition =
        |is_true, reason, message: &str| condition(PROVISIONED, is_true, reason, message, generation);
    if standing.is_provisioned() {
        condition(true, "Acknowledged", &standing.message())
    } else if standing.is_outdated {
        condition(false, WAITS_FOR_UPGRADE, &standing.message())
    } else {
        condition(false, WAITS_FOR_ACKS, &standing.message())
    }
}

/// Brings the PolicyState of a NetworkPolicy up to date.
pub async fn sync(policy: &NetworkPolicy, context: &Context) -> Result<Action, ReconcileError> {
    let (namespace, name) = (policy.namespace().unwrap_or_default(), policy.name_any());
    let states: Api<PolicyState> = Api::namespaced(context.client.clone(), &namespace);
    let known = ObjectRef::<PolicyState>::new(&name).within(&namespace);
    let known = context.stores.policy_states.get(&known);
    if let Some(other) = known.as_deref().filter(|known| !is_of(known, policy)) {
        // It is of an earlier policy of the name.
        delete(&states, other).await?;
        return Ok(Action::requeue(WATCH_RETRY));
    }
    let conditions = known.as_ref().and_then(|known| known.status.as_ref());
    let conditions = conditions.map_or(&[][..], |status| &status.conditions[..]);
    let told = tell(policy, &format!("{namespace}/{name}"), conditions, context);
    let Some(conditions) = told.conditions else {
        return Ok(told.next);
    };
    let known = match known {
        Some(known) => (*known).clone(),
        None => match create(&states, &state_of(policy, &namespace)).await {
            Ok(made) => made,
            Err(error) if error.is_conflict() => return Ok(Action::requeue(WATCH_RETRY)),
            // The namespace is being deleted, or the CRDs are older than this operator.
            Err(error) if error.is_forbidden() || error.is_not_found() => return Ok(Action::await_change()),
            Err(error) => return Err(error.into()),
        },
    };
    let mut changed = known.clone();
    let status = changed.status.get_or_insert_default();
    status.pods = told.standing.pods as u32;
    status.droplets = told.standing.droplets as u32;
    status.ready_droplets = told.standing.ready() as u32;
    status.conditions = conditions;
    status.observed_generation = policy.metadata.generation;
    update_status(&states, &known, &changed).await?;
    Ok(told.next)
}

fn is_of(state: &PolicyState, policy: &NetworkPolicy) -> bool {
    let owners = state.owner_references();
    owners
        .iter()
        .any(|owner| Some(&owner.uid) == policy.metadata.uid.as_ref())
}

fn state_of(policy: &NetworkPolicy, namespace: &str) -> PolicyState {
    let mut owner = owner(policy);
    if let Some(owner) = &mut owner {
        // Whoever deletes the policy doesn't wait for its state.
        owner.block_owner_deletion = None;
    }
    let mut state = PolicyState::new(&policy.name_any(), PolicyStateSpec {});
    state.metadata = ObjectMeta {
        name: Some(policy.name_any()),
        namespace: Some(namespace.to_owned()),
        owner_references: owner.map(|owner| vec![owner]),
        ..ObjectMeta::default()
    };
    state
}
