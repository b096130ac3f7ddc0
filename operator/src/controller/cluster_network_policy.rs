//! ClusterNetworkPolicy, if the API server has the kind: brings the world up to date with it, and tells its author by
//! conditions how far it is enforced. What it denies is in a PolicyState of the system's namespace.

use std::sync::Arc;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::ClusterNetworkPolicy;

use crate::controller::context::Context;
use crate::controller::policy_state::{forget, sync_cluster, tell, wants_report};
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::update_status;
use crate::controller::runtime::watch::Change;

pub fn on_change(context: &Context, change: &Change<ClusterNetworkPolicy>) {
    let (policy, spec) = match change {
        Change::Applied(policy) => (policy, Some(&policy.spec)),
        Change::Gone(policy) => (&**policy, None),
    };
    let name = policy.name_any();
    // What is malformed is told by the reconciler.
    let _ = context.hub.update(|world| world.set_cluster_policy(&name, spec));
    context
        .hub
        .set_reported(&name, spec.is_some() && wants_report(policy));
    if matches!(change, Change::Gone(_)) {
        forget(policy, context);
    }
    context.hub.triggers.cluster_policy(&name);
}

pub async fn reconcile(
    policy: Arc<ClusterNetworkPolicy>,
    context: Arc<Context>,
) -> Result<Action, ReconcileError> {
    let known = policy.status.as_ref();
    let known = known.map_or(&[][..], |status| &status.conditions[..]);
    let told = tell(&*policy, &policy.name_any(), known, &context);
    if let Some(conditions) = &told.conditions {
        let mut changed = (*policy).clone();
        changed
            .status
            .get_or_insert_default()
            .conditions
            .clone_from(conditions);
        let policies: Api<ClusterNetworkPolicy> = Api::all(context.client.clone());
        update_status(&policies, &*policy, &changed).await?;
    }
    let conditions = told.conditions.unwrap_or_else(|| known.to_vec());
    sync_cluster(&policy, told.standing, conditions, told.next, &context).await
}
