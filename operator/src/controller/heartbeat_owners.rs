//! Owners of heartbeats' Leases. A Lease goes with its Node. transitd may not write owners, so the leader does.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, ResourceExt};
use tokio::time::MissedTickBehavior;
use tracing::{info, warn};

use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::heartbeat::{PREFIX, leases};
use crate::controller::runtime::objects::{WriteError, delete, get, list, owner, update};

/// How often the owners of all heartbeats are looked at.
const LOOK_EVERY: Duration = Duration::from_mins(1);

/// Gives each heartbeat's Lease its Node as owner, and deletes those whose Node is gone. Runs as long as it leads.
pub async fn tend(context: Arc<Context>) {
    let mut turns = tokio::time::interval(LOOK_EVERY);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        turns.tick().await;
        if let Err(error) = tend_all(&context).await {
            warn!(%error, "not all heartbeats have an owner; they are looked at again");
        }
    }
}

async fn tend_all(context: &Context) -> Result<(), WriteError> {
    let leases = leases(context.client.clone());
    for lease in list(&leases).await? {
        let tended = tend_one(&lease, &leases, context).await;
        // Its transitd may have renewed it meanwhile.
        if tended.as_ref().is_err_and(WriteError::is_conflict) {
            if let Some(lease) = get(&leases, &lease.name_any()).await? {
                tend_one(&lease, &leases, context).await?;
            }
        } else {
            tended?;
        }
    }
    Ok(())
}

async fn tend_one(lease: &Lease, leases: &Api<Lease>, context: &Context) -> Result<(), WriteError> {
    let name = lease.name_any();
    let Some(node) = name.strip_prefix(PREFIX) else {
        return Ok(());
    };
    if let Some(node) = context.node(node) {
        context.clocks.forget(Timed::HeartbeatOrphaned, &name);
        if lease.owner_references().is_empty() {
            let mut owned = lease.clone();
            owned.metadata.owner_references = owner(&*node).map(|reference| vec![reference]);
            update(leases, lease, &owned).await?;
        }
        return Ok(());
    }
    // The watch of Nodes may be late.
    if context.clocks.known_for(Timed::HeartbeatOrphaned, &name) >= LOOK_EVERY / 2 {
        delete(leases, lease).await?;
        context.clocks.forget(Timed::HeartbeatOrphaned, &name);
        info!(node, "heartbeat of a node that is gone deleted");
    }
    Ok(())
}
