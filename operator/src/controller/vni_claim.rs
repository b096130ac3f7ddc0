//! VniClaim: a claim that no VPC counts rests, and is deleted once no droplet has rows of its number. Two operators at
//! a time may both have made a claim for a VPC; the VPC counts one.

use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::identifiers::Vni;
use thuban_api::{VniClaim, Vpc};
use tracing::info;

use crate::controller::context::Context;
use crate::controller::droplet;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{WriteError, delete, get};
use crate::hub::{Barrier, Waiter};

/// How often steady claims are looked at again, in case a watch has missed the end of their VPC.
const STEADY_RETRY: Duration = Duration::from_mins(5);

pub async fn reconcile(claim: Arc<VniClaim>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let spec = &claim.spec;
    let uid = claim.uid().unwrap_or_default();
    let known = context.vpc(&spec.vpc);
    if !is_void(&claim, known.as_deref()) {
        context.clocks.forget(Timed::VniClaimVoid, &uid);
        return Ok(Action::requeue(STEADY_RETRY));
    }
    // A status may be about to name the claim. Or its VPC is gone, and another leader, whose view of the VPC is older,
    // still sends rows to droplets whose streams to this leader have ended unheard.
    if let Some(left) = context
        .clocks
        .remaining(Timed::VniClaimVoid, &uid, context.claim_rest)
    {
        return Ok(Action::requeue(left));
    }
    let vni = claim.name_any().parse().ok().and_then(Vni::new);
    if let Some(vni) = vni {
        let waiter = || Waiter::VniClaim(claim.name_any());
        let barrier = |droplets| Barrier::new(waiter()).lacks_number(vni, droplets);
        if !holding_rows(barrier, &context).await?.is_empty() {
            return Ok(Action::requeue(Duration::from_secs(3)));
        }
    }
    let vpcs: Api<Vpc> = Api::all(context.client.clone());
    let vpc = get(&vpcs, &spec.vpc).await?;
    if !is_void(&claim, vpc.as_ref()) {
        return Ok(Action::requeue(STEADY_RETRY));
    }
    let claims: Api<VniClaim> = Api::all(context.client.clone());
    delete(&claims, &*claim).await?;
    context.clocks.forget(Timed::VniClaimVoid, &uid);
    info!(
        claim = claim.name_any(),
        vpc = spec.vpc,
        "VNI that no VPC counts released"
    );
    Ok(Action::await_change())
}

/// Returns the droplets that may have rows under a number and that the barrier waits for. This leader may not know
/// droplets that joined a moment ago and follow another leader. The API server knows them, and is asked once the
/// barrier waits for no other droplet.
pub async fn holding_rows(
    barrier: impl Fn(Vec<String>) -> Barrier,
    context: &Context,
) -> Result<Vec<String>, WriteError> {
    let holding = context.hub.missing(&barrier(Vec::new())).unacked;
    if !holding.is_empty() {
        return Ok(holding);
    }
    let droplets = droplet::all_in_force(context).await?;
    Ok(context.hub.missing(&barrier(droplets)).unacked)
}

/// Returns the VPC if it is the one that the claim was made for.
fn own<'a>(claim: &VniClaim, vpc: Option<&'a Vpc>) -> Option<&'a Vpc> {
    vpc.filter(|vpc| vpc.uid().as_deref() == Some(&claim.spec.vpc_uid))
}

/// Whether the VPC that the claim names is gone, or has another VNI.
fn is_void(claim: &VniClaim, vpc: Option<&Vpc>) -> bool {
    let Some(vpc) = own(claim, vpc) else {
        return true;
    };
    let counted = vpc.status.as_ref().and_then(|status| status.vni);
    counted.is_some_and(|vni| vni.to_string() != claim.name_any())
}
