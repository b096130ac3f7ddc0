//! The node's own endpoint: a member of its VPC as pods are. It is made when the operator's row for it comes, and
//! removed when the row goes. By it the node reaches pods and services on all nodes, and sends on packets of others to
//! services.
//!
//! Invariant: no CNI verb makes or removes the endpoint. A transitd that starts finds the endpoint of its predecessor
//! and changes nothing of it.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use thuban_rows::LocalEndpoint;
use tracing::{info, warn};

use crate::attachments::{Attachment, AttachmentId};
use crate::cni::error::AttachmentError;
use crate::cni::wiring;
use crate::netlink::host_end::{self, HOST_END, HostPlan};
use crate::netlink::{NetlinkError, find_link};
use crate::node::Node;
use crate::state::State;

/// The time between two looks at whether the interface or routes were removed by others.
const LOOK_INTERVAL: Duration = Duration::from_secs(10);

#[derive(Debug, Error)]
enum HostEndpointError {
    #[error(transparent)]
    Attachment(#[from] AttachmentError),
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut changes = node.watch();
    let mut applied = None;
    loop {
        changes.mark_unchanged();
        let plan = plan(&node.state());
        if applied.as_ref() != Some(&plan) {
            applied = match apply(&node).await {
                Ok(()) => Some(plan),
                Err(error) => {
                    warn!(
                        error = &error as &dyn std::error::Error,
                        "the node's own endpoint is not as it should be, it is tried again"
                    );
                    None
                }
            };
        }
        match tokio::time::timeout(LOOK_INTERVAL, changes.changed()).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) => return,
            Err(_) => applied = None,
        }
    }
}

/// The wanted endpoint and interface, if they are known.
type Wanted = Option<(LocalEndpoint, HostPlan)>;

/// Returns what is wanted; `None` before the first snapshot, which brings the ranges.
fn plan(state: &State) -> Wanted {
    if !state.synced {
        return None;
    }
    let endpoint = state.program.host().filter(|endpoint| endpoint.ready)?;
    let (ranges, services) = state.program.ranges(endpoint.vni);
    let plan = HostPlan {
        addresses: endpoint.addresses().collect(),
        ranges: ranges.iter().copied().collect(),
        services: services.iter().copied().collect(),
    };
    Some((endpoint.clone(), plan))
}

/// Brings the node's endpoint in line with the plan.
async fn apply(node: &Arc<Node>) -> Result<(), HostEndpointError> {
    let id = AttachmentId::host(HOST_END);
    let _lock = node.lock(&id).await;
    let (wanted, held, is_gone) = {
        let state = node.state();
        let is_gone = state.synced && state.program.host().is_none();
        (plan(&state), state.attachments.get(&id).cloned(), is_gone)
    };
    let Some((endpoint, plan)) = wanted else {
        if let Some(held) = held.filter(|_| is_gone) {
            wiring::teardown(node, &id, Some(held)).await?;
            info!("the node's own endpoint is gone");
        }
        return Ok(());
    };
    let is_same = match &held {
        Some(held) => is_of(held, &endpoint, node) && is_there(node, held).await?,
        None => false,
    };
    if !is_same {
        wiring::teardown(node, &id, held).await?;
        let made = wiring::setup_host(node, endpoint).await?;
        info!(address = %made.address, vni = made.vni, "the node has an endpoint of its own");
    }
    host_end::setup(&node.netlink, &plan, &node.settings.proc_sys_net).await?;
    Ok(())
}

fn is_of(held: &Attachment, endpoint: &LocalEndpoint, node: &Node) -> bool {
    (held.vni, held.network, held.address, held.address6, held.mac)
        == (
            endpoint.vni.get(),
            endpoint.network.get(),
            endpoint.address,
            endpoint.address6,
            endpoint.mac.0,
        )
        && held.pod_uid == endpoint.pod_uid
        && held.mtu == node.pod_mtu()
}

async fn is_there(node: &Node, held: &Attachment) -> Result<bool, NetlinkError> {
    let link = find_link(&node.netlink, &held.host_interface).await?;
    let is_same = link.is_some_and(|link| link.header.index == held.host_ifindex);
    Ok(is_same && find_link(&node.netlink, HOST_END).await?.is_some())
}
