//! Writes what became of IpPools into their status.

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use thuban_api::condition::set;
use thuban_api::ip_lease::IpLease;
use thuban_api::ip_pool::{IpPool, IpPoolStatus};
use thuban_api::{Condition, ConditionStatus};
use tracing::{debug, info};

use crate::pools::{Counts, Surroundings, check, usage};

/// Returns the status that a pool should have.
pub fn wanted(pool: &IpPool, around: &Surroundings, counts: &Counts, now: Timestamp) -> IpPoolStatus {
    let mut conditions = pool
        .status
        .as_ref()
        .map(|status| status.conditions.clone())
        .unwrap_or_default();
    let (status, reason, message) = match check(pool, around) {
        Ok(_) => (
            ConditionStatus::True,
            "Valid",
            "addresses can be leased".to_owned(),
        ),
        Err(error) => (ConditionStatus::False, error.reason(), error.to_string()),
    };
    let generation = pool.metadata.generation;
    let accepted = Condition {
        kind: "Accepted".to_owned(),
        status,
        reason: reason.to_owned(),
        message,
        last_transition_time: now.to_string(),
        observed_generation: generation,
    };
    set(&mut conditions, accepted);
    IpPoolStatus {
        ranges: pool.spec.cidrs.join(", "),
        conditions,
        observed_generation: generation,
        ..usage(pool, counts)
    }
}

/// Writes the status of each pool that has another one. What fails is written at the next call.
pub async fn write(api: &Api<IpPool>, around: &Surroundings, leases: &[Arc<IpLease>]) {
    let counts = Counts::new(leases);
    for pool in &around.pools {
        let status = wanted(pool, around, &counts, Timestamp::now());
        if pool.status.as_ref() == Some(&status) {
            continue;
        }
        let mut changed = IpPool::clone(pool);
        changed.status = Some(status);
        let written = api
            .replace_status(&pool.name_any(), &PostParams::default(), &changed)
            .await;
        match written {
            Ok(_) => info!(pool = pool.name_any(), "status written"),
            // Another cidrd wrote it, or it will be written soon.
            Err(error) => debug!(pool = pool.name_any(), %error, "status not written"),
        }
    }
}
