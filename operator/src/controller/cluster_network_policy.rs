//! ClusterNetworkPolicy, if the API server has the kind: brings the world up to date with it, and tells its author by
//! conditions how far it is enforced.

use std::sync::Arc;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::ClusterNetworkPolicy;

use crate::controller::context::Context;
use crate::controller::policy_state::tell;
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
    context.hub.triggers.cluster_policy(&name);
}

pub async fn reconcile(
    policy: Arc<ClusterNetworkPolicy>,
    context: Arc<Context>,
) -> Result<Action, ReconcileError> {
    let known = policy.status.as_ref();
    let known = known.map_or(&[][..], |status| &status.conditions[..]);
    let told = tell(&*policy, &policy.name_any(), known, &context);
    let Some(conditions) = told.conditions else {
        return Ok(told.next);
    };
    let mut changed = (*policy).clone();
    changed.status.get_or_insert_default().conditions = conditions;
    let policies: Api<ClusterNetworkPolicy> = Api::all(context.client.clone());
    update_status(&policies, &*policy, &changed).await?;
    Ok(told.next)
}
