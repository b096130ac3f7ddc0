//! NetworkPolicy: none is enforced, and an event at the policy itself tells its author so.
//!
//! Invariant: there is one event for each UID and generation, however often operators start, watches list again or two
//! operators lead, because the API server takes the event's name once. When the API server has forgotten the event
//! (after an hour, unless it is configured otherwise), the next leader writes it again.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::controller::Action;
use tracing::info;

use crate::controller::context::Context;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::watch::Change;
use crate::model::cached::NetworkPolicy;

const REASON: &str = "NetworkPolicyNotEnforced";
const NOTE: &str = "Thuban does not enforce NetworkPolicies: this one allows and denies nothing. Pods are reached by every \
                    pod of their VPC, and by none of another VPC; to keep pods apart, put them into VPCs of their own";

pub fn on_change(context: &Context, change: &Change<NetworkPolicy>) {
    match change {
        Change::Applied(policy) => {
            let namespace = policy.namespace().unwrap_or_default();
            context
                .hub
                .triggers
                .network_policy(&namespace, &policy.name_any());
        }
        Change::Gone(policy) => {
            let uid = policy.uid().unwrap_or_default();
            context.policies_told.with(|told| told.remove(&uid));
        }
    }
}

pub async fn reconcile(policy: Arc<NetworkPolicy>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let (Some(uid), Some(generation)) = (policy.uid(), policy.metadata.generation) else {
        return Ok(Action::await_change());
    };
    if policy.metadata.deletion_timestamp.is_some() || context.policies_told.has(&uid, generation) {
        return Ok(Action::await_change());
    }
    let key = generation.to_string();
    match context.events.warn_once(&*policy, &key, REASON, NOTE).await {
        Ok(is_new) => {
            if is_new {
                info!(generation, "network policy is not enforced");
            }
            context.policies_told.with(|told| told.insert(uid, generation));
            Ok(Action::await_change())
        }
        // The namespace is being deleted, and the policy with it.
        Err(error) if error.is_forbidden() || error.is_not_found() => Ok(Action::await_change()),
        Err(error) => Err(error.into()),
    }
}
