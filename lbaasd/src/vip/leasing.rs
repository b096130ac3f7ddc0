//! Gets a Vip the leases that it lacks, and renews those that it has.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cidrd::client::ClientError;
use cidrd::http::Wanted;
use cidrd::lease::Family;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::{ConditionStatus, IpFamily, Vip};
use tracing::warn;

use super::{Context, FINALIZER, Outcome, Said, choose, has_addresses};
use crate::leases::covers;
use crate::objects::api_of;

/// How old a Vip without a status may be that is left to the lbaasd that made it its own. Of many Vips that are created
/// at once, the last one waits for all others.
const OTHERS_TURN: SignedDuration = SignedDuration::from_secs(10);

/// The UIDs of Vips that this process has made its own, until it has written their status. If that fails, it goes on
/// with them and does not wait for another lbaasd.
#[derive(Default)]
pub struct Begun(Mutex<HashSet<String>>);

impl Begun {
    fn uids(&self) -> MutexGuard<'_, HashSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, uid: &str) {
        self.uids().insert(uid.to_owned());
    }

    pub(super) fn has(&self, uid: &str) -> bool {
        self.uids().contains(uid)
    }

    pub(super) fn end(&self, uid: &str) {
        self.uids().remove(uid);
    }
}

fn asked(vip: &Vip, pool: &str) -> Wanted {
    let family = |family: &IpFamily| match family {
        IpFamily::V4 => Family::V4,
        IpFamily::V6 => Family::V6,
    };
    let addresses = vip.spec.requested_ips.iter();
    Wanted {
        pool: pool.to_owned(),
        namespace: vip.namespace().unwrap_or_default(),
        name: vip.name_any(),
        families: vip.spec.ip_families.iter().map(family).collect(),
        addresses: addresses.filter_map(|address| address.parse().ok()).collect(),
    }
}

/// Whether another lbaasd has just made a Vip its own and is about to lease its addresses. Two that ask cidrd for one
/// Vip at the same time only hold each other up. If the other one ends meanwhile, this one goes on.
pub(super) fn is_anothers_turn(vip: &Vip, now: Timestamp) -> bool {
    let has_finalizer = vip.finalizers().iter().any(|name| name == FINALIZER);
    let created = vip.creation_timestamp().map(|created| created.0);
    let age = created.map(|created| now.duration_since(created).abs());
    has_finalizer && vip.status.is_none() && age.is_some_and(|age| age < OTHERS_TURN)
}

/// Whether a Vip that got its finalizer just now has no leases. If it has addresses, somebody removed a former one.
pub(super) fn is_new(vip: &Vip) -> bool {
    !has_addresses(vip)
}

/// Renews what a Vip has, and gets it what it lacks. `is_new`: it got its finalizer just now, and has no leases.
pub(super) async fn lease(
    vip: &Vip,
    is_new: bool,
    accepted: &Said,
    context: &Context,
) -> Result<Outcome, kube::Error> {
    let uid = vip.uid().unwrap_or_default();
    let away = |error: &ClientError| {
        warn!(namespace = vip.namespace(), name = vip.name_any(), %error, "leases are not renewed");
        Ok(Outcome::Away)
    };
    let renewed = if is_new {
        Ok(Vec::new())
    } else {
        context.leases.renewed(&uid).await
    };
    let held = match renewed {
        Ok(held) => held,
        Err(error) => return away(&error),
    };
    if covers(&held, &asked(vip, "")) {
        return Ok(Outcome::Granted(held));
    }
    let refused =
        |reason: &str, message: &str| Outcome::Refused(reason.to_owned(), message.to_owned(), held.clone());
    if accepted.0 != ConditionStatus::True {
        return Ok(refused(accepted.1, &accepted.2));
    }
    // Another lbaasd may have ended the Vip, even one that got its finalizer from this process just now. Nobody would
    // release the lease: its address would be blocked until the lease ends.
    if !is_there(vip, context).await? {
        return Ok(Outcome::Away);
    }
    let pools = context.pools.state();
    let namespace = ObjectRef::new(&vip.namespace().unwrap_or_default());
    let labels = context.namespaces.get(&namespace);
    let labels = labels
        .map(|namespace| namespace.labels().clone())
        .unwrap_or_default();
    let has = held.first().map(|grant| grant.lease.pool.as_str());
    let candidates = match has
        .or(Some(vip.spec.pool.as_str()))
        .filter(|pool| !pool.is_empty())
    {
        Some(pool) => vec![pool],
        None => choose(pools.iter().map(AsRef::as_ref), &labels, &vip.spec.ip_families),
    };
    let mut outcome = refused(
        "NoPool",
        "no public IpPool admits the namespace and has a free address of each family",
    );
    for pool in candidates {
        match context.leases.put(&uid, &asked(vip, pool)).await {
            Ok(grants) => return Ok(Outcome::Granted(grants)),
            Err(ClientError::Refused(problem)) => {
                outcome = refused(&problem.reason, &problem.detail);
                if problem.reason != "Exhausted" {
                    break;
                }
            }
            Err(error) => return away(&error),
        }
    }
    Ok(outcome)
}

/// Whether the API server has a Vip, and not in its end.
async fn is_there(vip: &Vip, context: &Context) -> Result<bool, kube::Error> {
    let live = api_of(&context.client, vip).get_opt(&vip.name_any()).await?;
    Ok(live.is_some_and(|live| live.uid() == vip.uid() && live.metadata.deletion_timestamp.is_none()))
}

#[cfg(test)]
mod tests;
