//! IpClaim: rests after its release, then goes; one that no Endpoint counts is released.

use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::{Endpoint, IpClaim, IpClaimStatus};
use tracing::info;

use super::context::{Context, ReconcileError};
use super::objects::{WriteError, delete, replace_status};

/// How long a released address rests before it may be given out again.
const REST: Duration = Duration::from_secs(30);
/// How long a claim may wait for the Endpoint's status to name it.
const GRACE: Duration = Duration::from_secs(20);

pub async fn reconcile(claim: Arc<IpClaim>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    let is_released = claim
        .status
        .as_ref()
        .is_some_and(|status| status.released_at.is_some());
    if is_released {
        // By this leader's monotonic clock: a new leader restarts the rest.
        let left = remaining(
            &context,
            &format!("released/{}", claim.uid().unwrap_or_default()),
            REST,
        );
        if let Some(left) = left {
            return Ok(Action::requeue(left));
        }
        delete(&claims, &*claim).await?;
        forget(&context, &claim);
        return Ok(Action::await_change());
    }
    let spec = &claim.spec;
    let endpoint = context
        .stores
        .endpoints
        .get(&ObjectRef::<Endpoint>::new(&spec.endpoint_name).within(&spec.endpoint_namespace));
    let is_counted = endpoint.is_some_and(|endpoint| {
        endpoint.uid().as_deref() == Some(&spec.endpoint_uid)
            && endpoint
                .status
                .as_ref()
                .is_some_and(|status| status.addresses.first() == Some(&spec.address))
    });
    if is_counted {
        return Ok(Action::await_change());
    }
    // Nobody's yet: its endpoint's status may be on its way, or its operator died, or it lost to another claim.
    if let Some(left) = remaining(
        &context,
        &format!("orphan/{}", claim.uid().unwrap_or_default()),
        GRACE,
    ) {
        return Ok(Action::requeue(left));
    }
    info!(
        claim = claim.name_any(),
        endpoint = spec.endpoint_name,
        "claim without endpoint released"
    );
    release(&claims, &claim).await?;
    Ok(Action::await_change())
}

/// What is left of `time` since this leader first asked about `key`.
fn remaining(context: &Context, key: &str, time: Duration) -> Option<Duration> {
    let mut seen = context.seen.lock().ok()?;
    let since = *seen.entry(key.to_owned()).or_insert_with(Instant::now);
    time.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
}

fn forget(context: &Context, claim: &IpClaim) {
    let uid = claim.uid().unwrap_or_default();
    if let Ok(mut seen) = context.seen.lock() {
        seen.remove(&format!("released/{uid}"));
        seen.remove(&format!("orphan/{uid}"));
    }
}

/// Marks a claim whose rows are gone everywhere.
pub async fn release(claims: &Api<IpClaim>, claim: &IpClaim) -> Result<(), WriteError> {
    let mut released = claim.clone();
    released.status = Some(IpClaimStatus {
        released_at: Some(Timestamp::now().to_string()),
    });
    match replace_status(claims, &released).await {
        Ok(_) => Ok(()),
        Err(error) if error.is_not_found() => Ok(()),
        Err(error) => Err(error),
    }
}
