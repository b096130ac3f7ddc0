//! GC: removes attachments that the runtime does not list, each only if a second source says that it is gone too.
//!
//! The second source: the pod's namespace is gone, the veth is gone, or the operator knows no endpoint of the pod any
//! more. An attachment that no second source calls gone stays and is logged: the runtime may have lost its memory, or
//! another runtime owns the attachment.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use thuban_proto::cni::{AttachmentKey, GcRequest};
use tracing::{info, warn};

use super::del;
use super::error::AttachmentError;
use crate::attachments::{Attachment, AttachmentId};
use crate::metrics::{self, Reclaimed};
use crate::netlink::{find_link, namespace};
use crate::node::Node;

/// Removes the attachments. Goes on when the caller leaves, and after failures on the way.
pub async fn run(node: &Arc<Node>, request: GcRequest) -> Result<(), AttachmentError> {
    let valid = request
        .valid
        .iter()
        .map(|AttachmentKey { container_id, ifname }| AttachmentId::new(container_id, ifname))
        .collect::<Result<BTreeSet<_>, _>>()?;
    let node = Arc::clone(node);
    let collection = tokio::spawn(async move { collect(&node, &request.network, &valid).await });
    collection.await.map_err(|_| AttachmentError::Interrupted)?
}

async fn collect(
    node: &Arc<Node>,
    network: &str,
    valid: &BTreeSet<AttachmentId>,
) -> Result<(), AttachmentError> {
    let unlisted: Vec<Attachment> = node
        .state()
        .attachments
        .values()
        .filter(|a| {
            !valid.contains(&a.id) && !a.is_host() && (a.cni_network == network || a.cni_network.is_empty())
        })
        .cloned()
        .collect();
    let mut errors = Vec::new();
    for attachment in unlisted {
        let id = &attachment.id;
        if !is_gone(node, &attachment).await {
            warn!(
                container_id = id.container_id,
                pod = attachment.pod_name,
                namespace = attachment.pod_namespace,
                "the runtime does not list this attachment, but its pod is there: it stays"
            );
            continue;
        }
        match del::remove(node, id).await {
            Ok(()) => {
                metrics::reclaims(Reclaimed::Collected, 1);
                info!(container_id = id.container_id, "GC removed an attachment");
            }
            Err(error) => errors.push(error),
        }
    }
    if errors.is_empty() {
        Ok(())
    } else {
        Err(AttachmentError::Teardown(errors))
    }
}

async fn is_gone(node: &Node, attachment: &Attachment) -> bool {
    if !namespace::exists(Path::new(&attachment.netns)) {
        return true;
    }
    let no_endpoint = {
        let state = node.state();
        // Without a stream the rows may be old; without a snapshot there are none.
        state.synced && state.stream.is_some() && state.program.local_of_pod(&attachment.pod_uid).is_none()
    };
    let link = find_link(&node.netlink, &attachment.host_interface).await;
    no_endpoint || matches!(link, Ok(None))
}
