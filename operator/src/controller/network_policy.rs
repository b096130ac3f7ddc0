//! NetworkPolicy: brings the world up to date with it. While a droplet doesn't enforce policies, an event at the policy
//! itself tells its author so.
//!
//! Invariant: there is one event for each UID and generation, however often operators start, watches list again or two
//! operators lead, because the API server takes the event's name once. When the API server has forgotten the event
//! (after an hour, unless it is configured otherwise), the next leader writes it again.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::controller::Action;
use tracing::info;

use crate::controller::context::Context;
use crate::controller::policy_state::{self, wants_report};
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::watch::Change;
use crate::model::cached::NetworkPolicy;
use crate::model::world::World;

const REASON: &str = "NetworkPolicyNotEnforced";
const NOTE: &str = "Thuban does not enforce NetworkPolicies in VPCs with nodes of an older transitd: there, this one allows \
                    and denies nothing. Pods are reached by every pod of their VPC, and by none of another VPC; to keep \
                    pods apart, put them into VPCs of their own";

pub fn on_change(context: &Context, change: &Change<NetworkPolicy>) {
    let (policy, spec) = match change {
        Change::Applied(policy) => (policy, policy.spec.as_ref()),
        Change::Gone(policy) => (&**policy, None),
    };
    let (namespace, name) = (policy.namespace().unwrap_or_default(), policy.name_any());
    let created = policy.metadata.creation_timestamp.as_ref();
    let created = created.map_or(0, |time| time.0.as_second());
    // What is malformed is told by the reconciler.
    let _ = context
        .hub
        .update(|world| world.set_network_policy(&namespace, &name, created, spec));
    let is_wanted = spec.is_some() && wants_report(policy);
    context
        .hub
        .set_reported(&format!("{namespace}/{name}"), is_wanted);
    match change {
        Change::Applied(_) => {
            context.hub.triggers.network_policy(&namespace, &name);
        }
        Change::Gone(_) => {
            let uid = policy.uid().unwrap_or_default();
            context.policies_told.with(|told| told.remove(&uid));
            policy_state::forget(policy, context);
        }
    }
}

pub async fn reconcile(policy: Arc<NetworkPolicy>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    if policy.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    if context.hub.read(World::has_outdated) {
        warn(&policy, &context).await?;
    }
    policy_state::sync(&policy, &context).await
}

/// Writes the event that not all droplets enforce the policy.
async fn warn(policy: &NetworkPolicy, context: &Context) -> Result<(), ReconcileError> {
    let (Some(uid), Some(generation)) = (policy.uid(), policy.metadata.generation) else {
        return Ok(());
    };
    if context.policies_told.has(&uid, generation) {
        return Ok(());
    }
    let key = generation.to_string();
    match context.events.warn_once(policy, &key, REASON, NOTE).await {
        Ok(is_new) => {
            if is_new {
                info!(generation, "network policy is not enforced");
            }
            context.policies_told.with(|told| told.insert(uid, generation));
            Ok(())
        }
        // The namespace is being deleted, and the policy with it.
        Err(error) if error.is_forbidden() || error.is_not_found() => Ok(()),
        Err(error) => Err(error.into()),
    }
}
