//! PolicyState: tells the author of a NetworkPolicy how far it is enforced, and what it denies. ClusterNetworkPolicies
//! have conditions of their own that say the same. They have a PolicyState only while their denied packets are
//! reported.
//!
//! Invariant: a status is written when a condition changes, not for each pod or droplet. What a policy denies is
//! written once a minute at most. A policy that was Provisioned stays so until it changes, or until a droplet has no
//! room for its rules.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::api::ObjectMeta;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::condition::{find, set};
use thuban_api::{
    ClusterNetworkPolicy, Condition, ConditionStatus, Denied, PolicyState, PolicyStateSpec,
    REPORT_DENIED_ANNOTATION, system_namespace,
};

use crate::controller::cache::last_seen::Sights;
use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{
    Object, WriteError, condition, create, delete, owner, update_status,
};
use crate::controller::runtime::watch::Change;
use crate::hub::{PolicyStanding, TABLE_FULL, WAITS_FOR_ACKS, WAITS_FOR_UPGRADE};
use crate::metrics;
use crate::model::cached::NetworkPolicy;
use crate::model::denial_reports::{Gathered, note_peers, sum};

/// How long a policy waits before a condition says so: acks take milliseconds.
const CONDITION_DELAY: Duration = Duration::from_secs(1);
/// How often a policy that waits is looked at, besides when droplets ack.
const WAIT_RETRY: Duration = Duration::from_secs(10);
/// How long the workflow waits for the watch.
const WATCH_RETRY: Duration = Duration::from_millis(500);

/// How many characters of an annotation's value an event shows.
const MAX_VALUE: usize = 64;

const MALFORMED: &str = "Malformed";
const TOO_MANY: &str = "TooManyPolicies";
const PROVISIONED: &str = "Provisioned";

pub fn on_change(context: &Context, change: &Change<PolicyState>) {
    // One that somebody deletes is made again.
    if let Change::Gone(state) = change {
        let namespace = state.namespace().unwrap_or_default();
        context.hub.triggers.network_policy(&namespace, &state.name_any());
        if namespace == system_namespace() {
            context.hub.triggers.cluster_policy(&state.name_any());
        }
    }
}

/// Whether the author of a policy wants to read what it denies.
pub fn wants_report<K: Object>(policy: &K) -> bool {
    let annotation = policy.annotations().get(REPORT_DENIED_ANNOTATION);
    annotation.is_some_and(|value| value == "true")
}

/// Returns what is news of a policy's annotation, the value of which is given: a value without effect is told once.
fn annotation_news(told: &Sights<String>, uid: &str, value: Option<&String>) -> Option<String> {
    let Some(note) = value.and_then(|value| without_effect(value)) else {
        told.forget(uid);
        return None;
    };
    let before = told.replace(uid, note.clone());
    (before.as_ref() != Some(&note)).then_some(note)
}

/// Returns what to tell of a value of the annotation that its author may take for `true`.
fn without_effect(value: &str) -> Option<String> {
    if matches!(value, "true" | "false") {
        return None;
    }
    let value: String = value.chars().take(MAX_VALUE).collect();
    Some(format!(
        "annotation {REPORT_DENIED_ANNOTATION}: {value:?} has no effect: the only value that has one is \"true\"; set \
         it, or remove the annotation"
    ))
}

/// Forgets what was told of a policy that is gone.
pub fn forget<K: Object>(policy: &K, context: &Context) {
    let uid = policy.uid().unwrap_or_default();
    context.last_seen.report_denied.forget(&uid);
}

/// What is to be said of a policy.
pub struct Told {
    pub standing: PolicyStanding,
    /// None: nothing has to be written yet, or nothing is new.
    pub conditions: Option<Vec<Condition>>,
    pub next: Action,
}

/// Returns what is to be said of a policy, of which `known` is said already. `name` is the name by which the world
/// knows it. Writes an event if it is malformed, has no room somewhere, or has an annotation without effect, and that
/// is news.
pub fn tell<K: Object>(policy: &K, name: &str, known: &[Condition], context: &Context) -> Told {
    let (uid, annotation) = (policy.uid(), policy.annotations().get(REPORT_DENIED_ANNOTATION));
    let told = &context.last_seen.report_denied;
    if let Some(note) = annotation_news(told, &uid.unwrap_or_default(), annotation) {
        context.events.event(policy, true, "InvalidAnnotation", &note);
    }
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
    let accepted = match &problem {
        None => condition("Accepted", true, "Accepted", "", generation),
        Some(problem) => condition("Accepted", false, reason, problem, generation),
    };
    let mut conditions = known.to_vec();
    let is_news = set(&mut conditions, accepted);
    let known_one = find(known, PROVISIONED);
    let news = if let Some(standing) = &standing {
        news(standing, known_one, generation)
    } else {
        let message = "not in force as it is written: see the condition Accepted";
        Some(condition(PROVISIONED, false, reason, message, generation))
    };
    let is_waiting = news
        .as_ref()
        .is_some_and(|news| standing.is_some() && news.status != ConditionStatus::True);
    let standing = standing.unwrap_or_default();
    let mut next = Action::await_change();
    if !is_waiting {
        let waited = context.clocks.take(Timed::PolicyWait, &whose);
        let is_provisioned = news
            .as_ref()
            .is_some_and(|news| news.status == ConditionStatus::True);
        // A write that fails is tried again, and nothing has waited by then.
        if let Some(waited) = waited.filter(|_| is_provisioned) {
            metrics::policy_provisioned(waited);
        }
    } else if context.clocks.known_for(Timed::PolicyWait, &whose) < CONDITION_DELAY {
        return Told {
            standing,
            conditions: None,
            next: Action::requeue(CONDITION_DELAY),
        };
    } else {
        next = Action::requeue(WAIT_RETRY);
    }
    if let Some(news) = news {
        let was_full = known_one.is_some_and(|known| known.reason == TABLE_FULL);
        if news.reason == TABLE_FULL && !was_full {
            context.events.event(policy, true, TABLE_FULL, &news.message);
        }
        set(&mut conditions, news);
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

/// Returns the condition Provisioned of a policy that is in force; none: the known one stays.
fn news(standing: &PolicyStanding, known: Option<&Condition>, generation: Option<i64>) -> Option<Condition> {
    let was_provisioned = known.is_some_and(|known| {
        known.status == ConditionStatus::True && known.observed_generation == generation
    });
    // Later droplets may be slow, and one without a stream judges by what it has. One without room denies all packets.
    if was_provisioned && !standing.is_full {
        return None;
    }
    let mut message = standing.message();
    let (is_true, reason) = if standing.is_provisioned() {
        (true, "Acknowledged")
    } else if standing.is_outdated {
        (false, WAITS_FOR_UPGRADE)
    } else if standing.is_full {
        message += "; have fewer policies or rules; the rules are sent again within 5 minutes";
        (false, TABLE_FULL)
    } else {
        (false, WAITS_FOR_ACKS)
    };
    Some(condition(PROVISIONED, is_true, reason, &message, generation))
}

/// Returns what is told of each policy.
pub fn told_of_all(context: &Context) -> Vec<metrics::Told> {
    let policies = context.stores.network_policies.state();
    let namespaced = policies.iter().map(|policy| {
        let state = known(
            &policy.namespace().unwrap_or_default(),
            &policy.name_any(),
            context,
        );
        let state = state.filter(|state| is_of(state, &**policy));
        let status = state.as_ref().and_then(|state| state.status.as_ref());
        told_of(
            status.map_or(&[][..], |status| &status.conditions[..]),
            policy.metadata.generation,
        )
    });
    let policies = context.stores.cluster_policies.state();
    let cluster = policies.iter().map(|policy| {
        let status = policy.status.as_ref();
        told_of(
            status.map_or(&[][..], |status| &status.conditions[..]),
            policy.metadata.generation,
        )
    });
    namespaced.chain(cluster).collect()
}

/// Returns what conditions tell of this generation of a policy.
fn told_of(conditions: &[Condition], generation: Option<i64>) -> metrics::Told {
    metrics::CONDITIONS.map(|kind| {
        let told = find(conditions, kind).filter(|told| told.observed_generation == generation);
        told.map_or(ConditionStatus::Unknown, |told| told.status)
    })
}

/// Brings the PolicyState of a NetworkPolicy up to date.
pub async fn sync(policy: &NetworkPolicy, context: &Context) -> Result<Action, ReconcileError> {
    let namespace = policy.namespace().unwrap_or_default();
    let world_name = format!("{namespace}/{}", policy.name_any());
    let known = known(&namespace, &policy.name_any(), context);
    if has_removed_other(policy, known.as_deref(), context).await? {
        return Ok(Action::requeue(WATCH_RETRY));
    }
    let conditions = known.as_ref().and_then(|known| known.status.as_ref());
    let conditions = conditions.map_or(&[][..], |status| &status.conditions[..]);
    let told = tell(policy, &world_name, conditions, context);
    let place = (namespace.as_str(), world_name.as_str());
    write(policy, place, known.as_deref(), told, context).await
}

/// Brings the PolicyState of a ClusterNetworkPolicy up to date, which has these conditions. There is one while the
/// packets that the policy denies are reported, unless a NetworkPolicy has the name. `next`: what to do otherwise.
pub async fn sync_cluster(
    policy: &ClusterNetworkPolicy,
    standing: PolicyStanding,
    conditions: Vec<Condition>,
    next: Action,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let name = policy.name_any();
    let other = ObjectRef::<NetworkPolicy>::new(&name).within(system_namespace());
    if context.stores.network_policies.get(&other).is_some() {
        return Ok(next);
    }
    let known = known(system_namespace(), &name, context);
    if !context.hub.is_reported(&name) {
        if let Some(own) = known.as_deref().filter(|known| is_of(known, policy)) {
            let states = Api::namespaced(context.client.clone(), system_namespace());
            delete(&states, own).await?;
        }
        return Ok(next);
    }
    if has_removed_other(policy, known.as_deref(), context).await? {
        return Ok(Action::requeue(WATCH_RETRY));
    }
    let status = known.as_deref().and_then(|known| known.status.as_ref());
    let is_new = status.is_none_or(|status| status.conditions != conditions);
    let told = Told {
        standing,
        conditions: is_new.then_some(conditions),
        next,
    };
    write(
        policy,
        (system_namespace(), &name),
        known.as_deref(),
        told,
        context,
    )
    .await
}

fn known(namespace: &str, name: &str, context: &Context) -> Option<Arc<PolicyState>> {
    let known = ObjectRef::<PolicyState>::new(name).within(namespace);
    context.stores.policy_states.get(&known)
}

/// Removes the PolicyState if it is another policy's, an earlier one of the name. Returns whether it was.
async fn has_removed_other<K: Object>(
    policy: &K,
    known: Option<&PolicyState>,
    context: &Context,
) -> Result<bool, ReconcileError> {
    let Some(other) = known.filter(|known| !is_of(known, policy)) else {
        return Ok(false);
    };
    let namespace = other.namespace().unwrap_or_default();
    let states = Api::namespaced(context.client.clone(), &namespace);
    delete(&states, other).await?;
    Ok(true)
}

/// Writes what is new to the PolicyState of a policy. `place`: the namespace of the PolicyState, and the name by which
/// the world knows the policy.
async fn write<K: Object>(
    policy: &K,
    (namespace, world_name): (&str, &str),
    known: Option<&PolicyState>,
    told: Told,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let states: Api<PolicyState> = Api::namespaced(context.client.clone(), namespace);
    let known = match known {
        Some(known) => known.clone(),
        None if told.conditions.is_none() => return Ok(told.next),
        None => match create(&states, &state_of(policy, namespace)).await {
            Ok(made) => made,
            Err(error) if error.is_conflict() => return Ok(Action::requeue(WATCH_RETRY)),
            // The namespace is being deleted, or the CRDs are older than this operator.
            Err(error) if error.is_forbidden() || error.is_not_found() => return Ok(Action::await_change()),
            Err(error) => return Err(error.into()),
        },
    };
    let gathered = context.hub.take_denied(world_name, || context.counts.take());
    let mut changed = known.clone();
    let status = changed.status.get_or_insert_default();
    if let Some(conditions) = told.conditions {
        status.pods = told.standing.pods as u32;
        status.droplets = told.standing.droplets as u32;
        status.ready_droplets = told.standing.ready() as u32;
        status.conditions = conditions;
        status.observed_generation = policy.meta().generation;
    }
    let is_reported = context.hub.is_reported(world_name);
    status.denied = is_reported.then(|| denied(status.denied.take(), gathered.as_ref()));
    let written = update_if_changed(&states, &known, &changed).await;
    if let (Err(_), Some(gathered)) = (&written, gathered) {
        context.hub.give_denied_back(world_name, gathered);
    }
    written?;
    Ok(told.next)
}

async fn update_if_changed(
    states: &Api<PolicyState>,
    known: &PolicyState,
    changed: &PolicyState,
) -> Result<(), WriteError> {
    if known.status != changed.status {
        update_status(states, known, changed).await?;
    }
    Ok(())
}

/// Returns what a policy has denied, with what was gathered since the last write.
fn denied(known: Option<Denied>, gathered: Option<&Gathered>) -> Denied {
    let mut denied = known.unwrap_or_else(|| Denied {
        since: format!("{:.0}", Timestamp::now()),
        ..Denied::default()
    });
    if let Some(gathered) = gathered {
        denied.packets = sum(denied.packets, gathered.packets);
        note_peers(&mut denied.last_peers, gathered.last_peers.iter().cloned());
    }
    denied
}

fn is_of<K: Object>(state: &PolicyState, policy: &K) -> bool {
    let owners = state.owner_references();
    owners
        .iter()
        .any(|owner| Some(&owner.uid) == policy.meta().uid.as_ref())
}

fn state_of<K: Object>(policy: &K, namespace: &str) -> PolicyState {
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

#[cfg(test)]
mod tests {
    use super::{
        ConditionStatus, PolicyStanding, Sights, TABLE_FULL, WAITS_FOR_ACKS, annotation_news, condition,
        news, told_of, without_effect,
    };

    #[test]
    fn values_of_the_annotation_without_effect_are_told() {
        for value in ["true", "false"] {
            assert_eq!(without_effect(value), None);
        }
        for value in ["yes", "True", "1", ""] {
            let note = without_effect(value).unwrap();
            for part in [
                &format!("thuban.dev/report-denied: {value:?} has no effect"),
                "\"true\"",
            ] {
                assert!(note.contains(part), "{note}");
            }
        }
        assert!(without_effect(&"x".repeat(100_000)).unwrap().len() < 300);
    }

    #[test]
    fn a_value_without_effect_is_told_once() {
        let told = Sights::default();
        let news = |uid, value: Option<&str>| {
            let value = value.map(str::to_owned);
            annotation_news(&told, uid, value.as_ref()).is_some()
        };
        assert!(news("a", Some("yes")) && news("b", Some("yes")));
        assert!(!news("a", Some("yes")), "nothing has changed");
        assert!(news("a", Some("Yes")), "another value");
        assert!(!news("a", Some("true")) && !news("b", None));
        assert!(news("a", Some("Yes")) && news("b", Some("yes")), "set again");
    }

    #[test]
    fn what_is_told_of_an_earlier_generation_is_unknown() {
        let told = [
            condition("Accepted", true, "Accepted", "", Some(2)),
            condition("Provisioned", true, "Acknowledged", "", Some(1)),
        ];
        let is_true = ConditionStatus::True;
        assert_eq!(told_of(&told, Some(2)), [is_true, ConditionStatus::Unknown]);
        assert_eq!(told_of(&told, Some(1))[1], is_true);
        assert_eq!(told_of(&[], Some(1)), [ConditionStatus::Unknown; 2]);
    }

    #[test]
    fn a_provisioned_policy_is_told_of_a_full_table_alone() {
        let standing = |lacking: &[(&str, &'static str)], is_full| PolicyStanding {
            pods: 1,
            droplets: 2,
            lacking: lacking
                .iter()
                .map(|(droplet, why)| ((*droplet).to_owned(), *why))
                .collect(),
            is_full,
            is_rolled_out: true,
            ..PolicyStanding::default()
        };
        let (all, lost) = (standing(&[], false), standing(&[("c", "no stream")], false));
        let full = standing(&[("b", "no room"), ("c", "no stream")], true);
        let reason = |standing, known| news(standing, known, Some(1)).map(|news| news.reason);
        let provisioned = news(&all, None, Some(1)).unwrap();
        assert_eq!(reason(&lost, Some(&provisioned)), None);
        assert_eq!(reason(&lost, None).unwrap(), WAITS_FOR_ACKS);
        let told = news(&full, Some(&provisioned), Some(1)).unwrap();
        assert_eq!(told.reason, TABLE_FULL);
        for part in ["0 of 2 droplets; b: no room", "fewer policies", "sent again"] {
            assert!(told.message.contains(part), "{}", told.message);
        }
        assert_eq!(
            reason(&all, Some(&told)).unwrap(),
            "Acknowledged",
            "there is room again"
        );
    }
}
