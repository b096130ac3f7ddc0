//! IpClaim: rests once its address is out of use, then is deleted. A claim that no Endpoint counts is released: that is
//! written into it. The claim of an Endpoint that this leader removed rests without a word
//! ([`crate::controller::cache::resting_claims`]).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::{Endpoint, IpClaim, IpClaimSpec, IpClaimStatus};
use tracing::info;

use crate::controller::attach;
use crate::controller::cache::resting_claims::Resting;
use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::objects::{WriteError, delete, get, update_status};
use crate::hub::{Barrier, Report, Waiter};
use crate::model::allocation::{Standing, standing};
use crate::model::rows::Key;
use crate::model::world::{RoleKind, World};

/// How long a claim may wait for an Endpoint to name it. Longer than [`crate::model::allocation::FRESH`].
const COUNTING_TIMEOUT: Duration = Duration::from_secs(20);
/// How soon the proof that an address is out of use is tried again: acks of its droplets wake it earlier.
const PROOF_RETRY: Duration = Duration::from_secs(3);

pub async fn reconcile(claim: Arc<IpClaim>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    let spec = &claim.spec;
    let uid = claim.uid().unwrap_or_default();
    if claim
        .status
        .as_ref()
        .is_some_and(|status| status.released_at.is_some())
    {
        // The rest is timed by this leader's monotonic clock: a new leader restarts it.
        if let Some(left) = context
            .clocks
            .remaining(Timed::ClaimReleased, &uid, context.claim_rest)
        {
            return Ok(Action::requeue(left));
        }
        // An Endpoint with the address in its status has the address, whether the claim is released or not.
        if standing(spec, holder(&context, spec).await?.as_ref()) == Standing::Counted {
            return Ok(Action::requeue(context.claim_rest));
        }
        delete(&claims, &*claim).await?;
        forget(&context, &claim);
        return Ok(Action::await_change());
    }
    let endpoint = ObjectRef::<Endpoint>::new(&spec.endpoint_name).within(&spec.endpoint_namespace);
    if standing(spec, context.stores.endpoints.get(&endpoint).as_deref()) == Standing::Counted {
        context.clocks.forget(Timed::ClaimOrphaned, &uid);
        return Ok(Action::await_change());
    }
    if let Some(resting) = context.resting_claims.of(&claim, context.claim_rest) {
        return rest(&claim, &claims, resting, &context).await;
    }
    // The operator that made the claim died before it wrote the status, or the claim lost to another claim.
    if let Some(left) = context
        .clocks
        .remaining(Timed::ClaimOrphaned, &uid, COUNTING_TIMEOUT)
    {
        return Ok(Action::requeue(left));
    }
    // A worker that is about to count the claim may take long.
    let Some(_guard) = context.claim_locks.try_lock(&spec.owner_uid) else {
        return Ok(Action::requeue(COUNTING_TIMEOUT));
    };
    if !is_void(&context, spec).await? {
        return Ok(Action::requeue(COUNTING_TIMEOUT));
    }
    if !is_out_of_use(&claim, false, &context) {
        return Ok(Action::requeue(COUNTING_TIMEOUT));
    }
    info!(
        claim = claim.name_any(),
        endpoint = spec.endpoint_name,
        "claim without endpoint released"
    );
    release(&claims, &claim).await?;
    Ok(Action::await_change())
}

/// Goes on with the rest of a claim whose Endpoint this leader removed.
async fn rest(
    claim: &IpClaim,
    claims: &Api<IpClaim>,
    resting: Resting,
    context: &Context,
) -> Result<Action, ReconcileError> {
    let is_settled = match resting {
        Resting::Unproven if is_out_of_use(claim, true, context) => {
            context.resting_claims.prove(claim);
            return Ok(Action::requeue(context.claim_rest));
        }
        Resting::Unproven => return Ok(Action::requeue(PROOF_RETRY)),
        Resting::Left(left) => return Ok(Action::requeue(left)),
        Resting::Over { is_settled } => is_settled,
    };
    if !is_settled && !is_void(context, &claim.spec).await? {
        // The cache does not show it yet.
        context.resting_claims.forget(&claim.name_any());
        return Ok(Action::requeue(COUNTING_TIMEOUT));
    }
    // Only this version is deleted: an Endpoint that took the claim meanwhile has written into it.
    delete(claims, claim).await?;
    forget(context, claim);
    Ok(Action::await_change())
}

/// Whether there is the same proof as when an Endpoint is deleted: the rows are gone from all droplets that may have
/// them, the endpoint's droplet and bouncers say so themselves, and no pod has the address. An Endpoint may go by force
/// while its droplet is cut off and serves on. `is_removed`: this leader removed it, with the proof.
fn is_out_of_use(claim: &IpClaim, is_removed: bool, context: &Context) -> bool {
    let spec = &claim.spec;
    // The VPC gives the VNI, because the network may be gone.
    let vni = context.hub.read(|world| world.vni(&spec.vpc));
    let (Some(vni), Ok(address)) = (vni, spec.address.parse::<IpAddr>()) else {
        return true;
    };
    // The claim itself bears out a report of its droplet; if it names none, any droplet may have the pod. A report may
    // come late, of a droplet that is gone: it counts for nothing if its Endpoint has been removed.
    let judge = |report: &Report, world: &World| {
        let is_there = world.is_droplet(report.droplet);
        let is_home = spec.droplet == report.droplet && is_there;
        let is_true = is_home || spec.droplet.is_empty() || attach::is_borne_out(report, world, context);
        (is_true || is_removed && !is_there).then_some(is_true)
    };
    if context.hub.is_live(vni, address, "", judge) {
        return false;
    }
    let mut barrier = Barrier::new(Waiter::IpClaim(claim.name_any())).lacks_addresses(vni, &[address]);
    barrier = context.hub.read(|world| {
        let bouncers = world.roles(RoleKind::Bouncer).holders(&spec.network);
        let bouncers = bouncers.into_iter().map(str::to_owned);
        let homes: Vec<String> = if spec.droplet.is_empty() {
            world.droplets().map(|(name, _)| name.clone()).collect()
        } else {
            vec![spec.droplet.clone()]
        };
        barrier.asks(bouncers.chain(homes))
    });
    if spec.pod.is_empty() && spec.droplet.is_empty() {
        // The address may have been a Service's.
        let rows = [
            Key::Service(vni, address),
            Key::Exposed(vni, address),
            Key::NodeService(vni, address),
        ];
        let taken_for_one = context.hub.read(|world| world.vpc_rows(&spec.vpc));
        barrier = barrier.lacks(rows).has(taken_for_one);
    }
    context.hub.missing(&barrier).is_empty()
}

/// Returns the Endpoint that the claim names, as the API server has it now.
async fn holder(context: &Context, spec: &IpClaimSpec) -> Result<Option<Endpoint>, WriteError> {
    let endpoints: Api<Endpoint> = Api::namespaced(context.client.clone(), &spec.endpoint_namespace);
    get(&endpoints, &spec.endpoint_name).await
}

/// Whether no Endpoint counts the claim, or may come to count it, by the API server's word.
pub async fn is_void(context: &Context, spec: &IpClaimSpec) -> Result<bool, WriteError> {
    Ok(standing(spec, holder(context, spec).await?.as_ref()) == Standing::Void)
}

fn forget(context: &Context, claim: &IpClaim) {
    let uid = claim.uid().unwrap_or_default();
    context.clocks.forget(Timed::ClaimReleased, &uid);
    context.clocks.forget(Timed::ClaimOrphaned, &uid);
    context.resting_claims.forget(&claim.name_any());
}

/// Marks a claim whose rows are gone everywhere.
pub async fn release(claims: &Api<IpClaim>, claim: &IpClaim) -> Result<(), WriteError> {
    let mut released = claim.clone();
    released.status = Some(IpClaimStatus {
        released_at: Some(Timestamp::now().to_string()),
        ..IpClaimStatus::default()
    });
    match update_status(claims, claim, &released).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}

/// Writes into a claim that the Endpoint takes its address. A release that was decided before then fails, even if the
/// API server carries it out late.
pub async fn confirm(claims: &Api<IpClaim>, claim: &IpClaim, endpoint: &Endpoint) -> Result<(), WriteError> {
    let mut confirmed = claim.clone();
    confirmed.status = Some(IpClaimStatus {
        released_at: None,
        confirmed_for: endpoint.uid(),
        confirmed_at: Some(Timestamp::now().to_string()),
    });
    update_status(claims, claim, &confirmed).await.map(drop)
}
