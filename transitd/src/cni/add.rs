//! ADD: wait for the pod's endpoint, then wire it; a failure leaves nothing.

use std::net::Ipv6Addr;
use std::sync::Arc;
use std::time::Duration;

use thuban_common::tables::{GATEWAY_MAC, HOST_SOURCE_V6};
use thuban_proto::cni::{AddRequest, Address, Attached, Route};
use thuban_rows::LocalEndpoint;
use thuban_telemetry::traces::Span;
use tracing::info;

use super::error::AttachmentError;
use super::request::ValidatedAdd;
use super::{spool, wiring};
use crate::attachments::{Attachment, AttachmentId, mac_text};
use crate::netlink::namespace;
use crate::node::Node;
use crate::state::Readiness;

/// Adds an attachment. Dropping the returned future cancels the wait, but not the wiring: the wiring runs to its end
/// or is undone.
pub async fn run(node: &Arc<Node>, request: AddRequest) -> Result<Attached, AttachmentError> {
    let request = ValidatedAdd::try_from(request)?;
    // A DEL that waits in the spool is older than this ADD.
    spool::drain_one(node, &request.id).await;
    exists(node, &request.id)?;
    // Refuse a bad namespace before waiting.
    drop(namespace::open(request.netns.as_ref())?);
    let span = Span::begin(&request.pod_uid, "wait for endpoint");
    let endpoint = wait(node, &request).await;
    span.end_with(&endpoint);
    let endpoint = endpoint?;
    let span = Span::begin(&request.pod_uid, "wire");
    let node = Arc::clone(node);
    let wiring = tokio::spawn(async move {
        let _lock = node.lock(&request.id).await;
        exists(&node, &request.id)?;
        wiring::setup(&node, request, endpoint).await
    });
    let wired = wiring.await.map_err(|_| AttachmentError::Interrupted).flatten();
    span.end_with(&wired);
    let attachment = wired?;
    info!(
        container_id = attachment.id.container_id,
        pod = attachment.pod_name,
        namespace = attachment.pod_namespace,
        vni = attachment.vni,
        address = %attachment.address,
        address6 = attachment.address6.map(tracing::field::display),
        interface = attachment.host_interface,
        "ADD done"
    );
    Ok(attached(&attachment))
}

fn exists(node: &Node, id: &AttachmentId) -> Result<(), AttachmentError> {
    if node.state().attachments.contains_key(id) {
        let AttachmentId { container_id, ifname } = id.clone();
        return Err(AttachmentError::Exists { container_id, ifname });
    }
    Ok(())
}

/// Reasons of refusals that often pass by themselves, because an address is freed: ADD waits, and then fails with them.
const PASSING: [&str; 4] = ["AddressInUseOnNode", "AddressTaken", "ClaimDenied", "NetworkFull"];

async fn wait(node: &Node, request: &ValidatedAdd) -> Result<LocalEndpoint, AttachmentError> {
    let seconds = node.settings.add_deadline;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(seconds);
    let mut changes = node.watch();
    let (namespace, name) = (request.pod_namespace.clone(), request.pod_name.clone());
    loop {
        changes.mark_unchanged();
        let readiness = node.state().readiness(&request.pod_uid);
        let failed = match readiness {
            Readiness::Ready(endpoint) => return Ok(endpoint),
            Readiness::Refused { reason, message } => {
                let passes = PASSING.contains(&reason.as_str());
                let refused = AttachmentError::Refused {
                    namespace: namespace.clone(),
                    name: name.clone(),
                    reason,
                    message,
                };
                if !passes {
                    return Err(refused);
                }
                refused
            }
            Readiness::NotYet(missing) => AttachmentError::NotReady {
                namespace: namespace.clone(),
                name: name.clone(),
                seconds,
                missing,
            },
        };
        if !matches!(
            tokio::time::timeout_at(deadline, changes.changed()).await,
            Ok(Ok(()))
        ) {
            return Err(failed);
        }
    }
}

fn attached(attachment: &Attachment) -> Attached {
    let gateway = attachment.gateway.to_string();
    let mut addresses = vec![Address {
        address: format!("{}/{}", attachment.address, attachment.prefix_length),
        gateway: gateway.clone(),
    }];
    let mut routes = vec![Route {
        destination: "0.0.0.0/0".into(),
        gateway,
    }];
    if let Some(address) = attachment.address6 {
        let gateway = Ipv6Addr::from(HOST_SOURCE_V6).to_string();
        addresses.push(Address {
            address: address.to_string(),
            gateway: gateway.clone(),
        });
        routes.push(Route {
            destination: "::/0".into(),
            gateway,
        });
    }
    Attached {
        host_interface: attachment.host_interface.clone(),
        host_mac: mac_text(GATEWAY_MAC),
        pod_mac: mac_text(attachment.mac),
        mtu: attachment.mtu,
        addresses,
        routes,
    }
}
