//! Makes the limits of running pods' bandwidth those of their rows. ADD sets the limits of a new pod.
//!
//! After a start of transitd each attachment is looked at once, because its limits may have changed meanwhile. What
//! fails, or has just been changed, comes to its turn at the next scan.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rtnetlink::Handle;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use crate::attachments::{Attachment, AttachmentId};
use crate::netlink::{NetlinkError, aside, find_link, namespace, pod, shaper};
use crate::node::Node;
use crate::shaped::Rates;

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut changes = node.watch();
    let mut scan = interval(Duration::from_secs(node.settings.scan_interval.max(1)));
    scan.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failed = BTreeSet::new();
    loop {
        tokio::select! {
            _ = scan.tick() => {
                failed.clear();
                forget_gone(&node);
            }
            changed = changes.changed() => if changed.is_err() {
                return;
            },
        }
        for (id, generation) in due(&node) {
            if failed.contains(&generation) {
                continue;
            }
            if let Err(error) = shape(&node, &id).await {
                failed.insert(generation);
                warn!(
                    container_id = id.container_id,
                    error = &error as &dyn std::error::Error,
                    "a pod's bandwidth is not limited as its row says, it is tried again at the next scan"
                );
            }
        }
    }
}

/// Returns the attachments, with their generations, whose limits are to be set.
fn due(node: &Node) -> Vec<(AttachmentId, u64)> {
    let state = node.state();
    let attachments = state.attachments.values();
    attachments
        .filter(|attachment| {
            let rates = state.rates(attachment);
            rates.is_some_and(|rates| node.shaped.is_due(attachment.generation, rates))
        })
        .map(|attachment| (attachment.id.clone(), attachment.generation))
        .collect()
}

/// Forgets the limits of attachments that are gone. No later attachment has the generation of one.
fn forget_gone(node: &Node) {
    let state = node.state();
    let generations = state.attachments.values().map(|attachment| attachment.generation);
    node.shaped.retain(&generations.collect());
}

/// Gives an attachment its limits. Waits for an ADD or a DEL of the attachment that is under way, and does nothing if
/// nothing is left to be done then.
async fn shape(node: &Arc<Node>, id: &AttachmentId) -> Result<(), NetlinkError> {
    let _lock = node.lock(id).await;
    let wanted = {
        let state = node.state();
        let attachment = state.attachments.get(id).cloned();
        attachment.and_then(|attachment| Some((state.rates(&attachment)?, attachment)))
    };
    let Some((rates, attachment)) = wanted else {
        return Ok(());
    };
    if !node.shaped.is_due(attachment.generation, rates) {
        return Ok(());
    }
    let path = PathBuf::from(&attachment.netns);
    let (generation, pod) = (attachment.generation, attachment.pod_name.clone());
    let done = aside(async move |netlink| set(&netlink, &attachment, rates).await).await?;
    done.unwrap_or(Err(NetlinkError::Thread { path }))?;
    node.shaped.note(generation, rates);
    info!(
        container_id = id.container_id,
        pod,
        egress = rates.egress.map(u64::from),
        ingress = rates.ingress.map(u64::from),
        "limits of bandwidth set, bytes per second"
    );
    Ok(())
}

async fn set(netlink: &Handle, attachment: &Attachment, rates: Rates) -> Result<(), NetlinkError> {
    let name = &attachment.host_interface;
    let link = find_link(netlink, name).await?;
    let index = link.map(|link| link.header.index);
    let index = index.filter(|index| *index == attachment.host_ifindex);
    let index = index.ok_or_else(|| NetlinkError::NoInterface(name.clone()))?;
    shaper::set(netlink, (index, name), rates.ingress).await?;
    let path = PathBuf::from(&attachment.netns);
    let interface = attachment.id.ifname.clone();
    let shape = async move || pod::shape(&interface, index, rates.egress).await;
    namespace::run(namespace::open(&path)?, &path, shape).await
}
