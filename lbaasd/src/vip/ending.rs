//! The end of a Vip: its name goes, resolvers forget the name, clients go, nodes withdraw the addresses, the Service's
//! status forgets them, and cidrd gets the lease back. Nodes go on announcing until clients had their time.
//!
//! The status says how far the end is. So any lbaasd goes on with it.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use kube::runtime::controller::Action;
use thuban_api::{ConditionStatus, SERVICE_IP_ANNOTATION, Vip, VipStatus};
use tracing::{info, warn};

use super::{Context, FINALIZER, LEASE_RETRY, VipError, say, set_finalizers, sum_up};
use crate::leases::RENEW_EVERY;
use crate::objects::change_status;
use crate::{derived, service};

/// How long a Vip that is deleted waits for nodes that don't say that they withdrew its addresses.
const WITHDRAW_TIMEOUT: SignedDuration = SignedDuration::from_mins(1);
/// How soon a Vip that is deleted is looked at again whose Service keeps its addresses.
const KEPT_RETRY: Duration = Duration::from_secs(30);

/// Ends a Vip that is deleted, in an order in which nobody announces an address that another may get.
pub async fn end(vip: &Vip, context: &Context) -> Result<Action, VipError> {
    if !vip.finalizers().iter().any(|name| name == FINALIZER) {
        return Ok(Action::await_change());
    }
    let (namespace, name, uid) = (
        vip.namespace().unwrap_or_default(),
        vip.name_any(),
        vip.uid().unwrap_or_default(),
    );
    let is_private = vip.status.as_ref().is_some_and(VipStatus::is_private);
    if is_private && !is_withdrawn(vip) && derived::are_addresses_kept(vip, &context.client).await? {
        change_status(&context.client, vip, |vip| keep(vip, Timestamp::now())).await?;
        // Nobody else may get them.
        if let Err(error) = context.leases.renewed(&uid).await {
            warn!(namespace, name, %error, "leases are not renewed");
        }
        return Ok(Action::requeue(KEPT_RETRY));
    }
    // A cache may not have seen a node that was let announce.
    let current = change_status(&context.client, vip, |vip| proceed(vip, Timestamp::now())).await?;
    let Some(vip) = current else {
        return Ok(Action::await_change());
    };
    let status = vip.status.clone().unwrap_or_default();
    if status.withdrawn_at.is_none() {
        // Clients may still come.
        if let Err(error) = context.leases.renewed(&uid).await {
            warn!(namespace, name, %error, "leases are not renewed");
        }
        return Ok(Action::requeue(left(&vip, Timestamp::now())));
    }
    // The deadlines of announcers are not extended any more.
    context.leases.forget(&uid);
    let (addresses, announcers) = (&status.addresses, &status.announcers);
    let is_told = service::tells(&context.client, &vip, addresses).await?;
    match ending(&vip, is_told, Timestamp::now()) {
        Ending::Wait => return Ok(Action::requeue(LEASE_RETRY)),
        Ending::Release => match context.leases.release(&uid).await {
            Ok(()) => info!(namespace, name, ?addresses, "addresses released"),
            Err(error) if is_late(&vip, Timestamp::now()) => {
                warn!(namespace, name, ?addresses, %error, "not released: the lease ends by itself");
            }
            Err(error) => return Err(error.into()),
        },
        Ending::Leave => warn!(
            namespace,
            name,
            ?addresses,
            ?announcers,
            is_told,
            "nodes do not say that they withdrew, or the Service tells the address: the lease ends by itself"
        ),
    }
    let others = vip.finalizers().iter().filter(|name| *name != FINALIZER);
    let others: Vec<String> = others.cloned().collect();
    match set_finalizers(&vip, &context.client, &others).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        set => drop(set?),
    }
    Ok(Action::await_change())
}

/// Writes that a deleted Vip waits for its Service. Returns whether anything changed.
pub fn keep(vip: &mut Vip, now: Timestamp) -> bool {
    let (name, generation) = (vip.name_any(), vip.metadata.generation);
    let status = vip.status.get_or_insert_default();
    let before = status.clone();
    let message = format!(
        "the Service {name} outlives the Vip and keeps its addresses: delete the Service, or its annotation \
         {SERVICE_IP_ANNOTATION}"
    );
    let said = (
        ConditionStatus::False,
        "ServiceKeepsAddresses".to_owned(),
        message,
    );
    say(&mut status.conditions, "Accepted", said, generation, now);
    sum_up(vip, now);
    vip.status.as_ref() != Some(&before)
}

/// Writes how far the end of a deleted Vip is. Returns whether anything changed.
pub fn proceed(vip: &mut Vip, now: Timestamp) -> bool {
    if vip.metadata.deletion_timestamp.is_none() {
        return false;
    }
    let wait = wait(vip);
    let status = vip.status.get_or_insert_default();
    // The name goes first.
    if !status.dns_name.is_empty() {
        return false;
    }
    let before = status.clone();
    // A time to come is that of a clock that has jumped.
    let is_past = |text: &String| past(Some(text), now).is_some();
    status.name_removed_at = status.name_removed_at.take().filter(is_past);
    status.withdrawn_at = status.withdrawn_at.take().filter(is_past);
    let removed = status.name_removed_at.get_or_insert_with(|| now.to_string());
    let is_over = past(Some(removed), now).is_some_and(|removed| now.duration_since(removed) >= wait);
    if is_over || before.withdrawn_at.is_some() {
        status.withdrawn_at.get_or_insert_with(|| now.to_string());
    }
    *status != before
}

fn past(text: Option<&String>, now: Timestamp) -> Option<Timestamp> {
    text?.parse().ok().filter(|at| *at <= now)
}

/// Returns how long nodes announce the addresses of a deleted Vip after its name is gone.
fn wait(vip: &Vip) -> SignedDuration {
    let ttl = vip.status.as_ref().and_then(|status| status.dns_ttl_seconds);
    let seconds = i64::from(ttl.unwrap_or(0)) + i64::from(vip.spec.drain_seconds);
    SignedDuration::from_secs(seconds)
}

/// Returns how soon a deleted Vip is looked at again whose addresses are still announced.
fn left(vip: &Vip, now: Timestamp) -> Duration {
    let removed = vip
        .status
        .as_ref()
        .and_then(|status| past(status.name_removed_at.as_ref(), now));
    let left = removed.map(|removed| wait(vip) - now.duration_since(removed));
    let left = left.and_then(|left| Duration::try_from(left).ok());
    // The end of the name is an event.
    left.unwrap_or(RENEW_EVERY)
        .clamp(Duration::from_millis(100), RENEW_EVERY)
}

/// What is to be done about the lease of a Vip that is deleted.
#[derive(Debug, PartialEq, Eq)]
pub enum Ending {
    /// Nothing yet: nodes may still say that they withdrew, and the Service's status may still change.
    Wait,
    /// It is released: nobody announces its addresses.
    Release,
    /// It ends by itself.
    Leave,
}

/// Decides from the API server's copy of a Vip that is deleted. `is_told`: whether its Service tells its addresses.
pub fn ending(vip: &Vip, is_told: bool, now: Timestamp) -> Ending {
    let status = vip.status.clone().unwrap_or_default();
    if status.withdrawn_at.is_none() {
        return Ending::Wait;
    }
    if !is_told && status.announcers.is_empty() {
        return Ending::Release;
    }
    if is_late(vip, now) {
        Ending::Leave
    } else {
        Ending::Wait
    }
}

/// Whether a Vip has waited long enough since nodes were told to withdraw its addresses.
fn is_late(vip: &Vip, now: Timestamp) -> bool {
    let status = vip.status.as_ref();
    let withdrawn = status.and_then(|status| past(status.withdrawn_at.as_ref(), now));
    withdrawn.is_some_and(|withdrawn| now.duration_since(withdrawn) >= WITHDRAW_TIMEOUT)
}

/// Whether nodes are to announce a Vip's addresses no more.
pub fn is_withdrawn(vip: &Vip) -> bool {
    let is_over = |status: &VipStatus| status.withdrawn_at.is_some();
    vip.metadata.deletion_timestamp.is_some() && vip.status.as_ref().is_some_and(is_over)
}

#[cfg(test)]
mod tests;
