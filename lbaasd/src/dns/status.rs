//! The condition of each DnsZone: whether its server takes writes.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::runtime::controller::Action;
use kube::{Api, ResourceExt};
use thuban_api::{ConditionStatus, DnsZone, DnsZoneStatus};
use tracing::warn;

use super::DnsError;
use super::names::Context;
use crate::objects::change_status_by;
use crate::vip::say;

/// How often a server is asked.
const EVERY: Duration = Duration::from_mins(1);
/// How soon a server is asked that had enough to do.
const STATUS_RETRY: Duration = Duration::from_secs(2);

/// Asks a DnsZone's server and says what became of it.
pub async fn reconcile(zone: Arc<DnsZone>, context: Arc<Context>) -> Result<Action, kube::Error> {
    let uids: BTreeSet<String> = context
        .zones
        .state()
        .iter()
        .filter_map(|zone| zone.uid())
        .collect();
    context
        .servers
        .retain(|uid| uids.contains(uid) || zone.uid().as_deref() == Some(uid));
    let asked = match context.servers.turn(&zone).await {
        Ok(turn) => turn.check().await,
        Err(error) => Err(error),
    };
    let said = match asked {
        Ok(()) => {
            let message = "the server takes writes of the zone".to_owned();
            (ConditionStatus::True, "Answered".to_owned(), message)
        }
        Err(DnsError::Busy | DnsError::Paused(_)) => return Ok(Action::requeue(STATUS_RETRY)),
        Err(error) => {
            warn!(zone = zone.name_any(), %error, "the DNS server can't be used");
            (
                ConditionStatus::False,
                error.reason().to_owned(),
                error.to_string(),
            )
        }
    };
    let now = Timestamp::now();
    let change = |zone: &mut DnsZone| {
        let generation = zone.metadata.generation;
        let status = zone.status.get_or_insert_with(DnsZoneStatus::default);
        let before = status.clone();
        status.observed_generation = generation;
        say(&mut status.conditions, "Ready", said.clone(), generation, now);
        *status != before
    };
    if change(&mut DnsZone::clone(&zone)) {
        change_status_by(&Api::all(context.client.clone()), &*zone, change).await?;
    }
    Ok(Action::requeue(EVERY))
}
