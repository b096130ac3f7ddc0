//! What the status of a Service's Endpoint says besides its phase: conditions and NodePorts. A condition that something
//! is not as it was asked for is there only while that is so, and news of it become events.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt;
use thuban_api::condition::{find, set};
use thuban_api::{Condition, Endpoint, EndpointStatus, OVERLAY_PORT, Phase};

use crate::controller::admission::admitted;
use crate::controller::context::Context;
use crate::controller::runtime::objects::condition;
use crate::hub::{Missing, TABLE_FULL};
use crate::model::admission::Refusal;
use crate::model::endpoint::name_of;
use crate::model::service::{protocol_name, protocol_number};
use crate::model::world::NodePort;

/// The reason in the condition and the event.
pub(super) const OVERLAY_PORT_REASON: &str = "OverlayPort";
pub(super) const PORT_RESTS_REASON: &str = "PortRests";

/// Returns whether its network admits the Endpoint now, as a condition. The Endpoint keeps what it has while its
/// network exists.
pub(super) fn accepted(endpoint: &Endpoint, context: &Context) -> Condition {
    let (network, namespace) = (&endpoint.spec.network, name_of(endpoint).0);
    match admitted(&namespace, network, context.network(network).as_deref(), context) {
        Ok(()) => condition("Accepted", true, "Admitted", "", None),
        Err(refusal @ (Refusal::VpcForbids { .. } | Refusal::NetworkForbids { .. })) => {
            let message =
                format!("{refusal}. The Service keeps its addresses and backends until it is deleted");
            condition("Accepted", false, refusal.reason(), &message, None)
        }
        Err(refusal) => condition("Accepted", false, refusal.reason(), &refusal.to_string(), None),
    }
}

/// Sets the condition with the number of left-out backends. Returns the message for an event, if it is news.
pub(super) fn leave_out(status: &mut EndpointStatus, count: usize, endpoint: &Endpoint) -> Option<String> {
    let message = (count > 0).then(|| {
        format!(
            "{count} ready addresses of its EndpointSlices are left out: no pod of namespace {} has them in the VPC of \
             network {:?}; run the Service's pods in that VPC, or name a network of the pods' VPC in the Service's \
             annotation thuban.dev/network",
            name_of(endpoint).0,
            endpoint.spec.network
        )
    });
    lacks(status, "Complete", "BackendsLeftOut", message)
}

/// Sets the condition for a port that droplets would take for the overlay's. Returns the message for an event, if it is
/// news.
pub(super) fn refuse_overlay_port(status: &mut EndpointStatus, is_used: bool) -> Option<String> {
    let message = is_used.then(|| {
        format!(
            "nodes need UDP port {OVERLAY_PORT} for the overlay. It has no effect as a port of backends outside of the \
             VPC, as the port of a Service with such backends, as a NodePort, or at a node's own address; use another \
             port"
        )
    });
    lacks(status, "Ports", OVERLAY_PORT_REASON, message)
}

/// Says which NodePorts were another VPC's until lately and rest. Returns the message, if it is news.
pub(super) fn await_rest(status: &mut EndpointStatus, resting: &BTreeSet<NodePort>) -> Option<String> {
    let message = (!resting.is_empty()).then(|| {
        let ports: Vec<_> = resting.iter().copied().map(node_port_text).collect();
        format!(
            "nodes take nothing at {} yet: a node may still lead this port to a Service of another VPC. The port opens \
             when all nodes have acknowledged the change, at the latest a minute after the lease of NodePorts \
             (THUBAN_NODE_PORT_LEASE_SECONDS)",
            ports.join(", ")
        )
    });
    lacks(status, "NodePorts", PORT_RESTS_REASON, message)
}

/// Says which droplets have no room for the Service as it is now. They keep what they had of it. Returns the message,
/// if it is news.
pub(super) fn await_room(status: &mut EndpointStatus, full: &Missing) -> Option<String> {
    let message = (!full.is_empty()).then(|| full.message());
    lacks(status, "Room", TABLE_FULL, message)
}

/// Writes down the Service's ports for the next leader, which gives these at once.
pub(super) fn record_node_ports(status: &mut EndpointStatus, ports: &BTreeSet<NodePort>) {
    status.node_ports = Some(ports.iter().copied().map(node_port_text).collect());
}

fn node_port_text((protocol, number): NodePort) -> String {
    format!("{number}/{}", protocol_name(protocol).unwrap_or("?"))
}

fn node_port_of(text: &str) -> Option<NodePort> {
    let (number, name) = text.split_once('/')?;
    Some((protocol_number(name)?, number.parse().ok()?))
}

/// Returns the ports that an earlier leader recorded for the Service. A Service that was Provisioned by an operator
/// that recorded nothing had its ports: none then.
pub(super) fn recorded_node_ports(endpoint: &Endpoint) -> Option<BTreeSet<NodePort>> {
    let status = endpoint.status.as_ref();
    if let Some(ports) = status.and_then(|status| status.node_ports.as_ref()) {
        return Some(ports.iter().filter_map(|text| node_port_of(text)).collect());
    }
    let is_older = status.is_some_and(|status| status.phase == Phase::Provisioned);
    (!is_older).then(BTreeSet::new)
}

/// Sets a condition that something is not as it was asked for, or takes it away; the message, if it is news.
fn lacks(status: &mut EndpointStatus, kind: &str, reason: &str, message: Option<String>) -> Option<String> {
    let is_news = find(&status.conditions, kind).is_none();
    let Some(message) = message else {
        status.conditions.retain(|condition| condition.kind != kind);
        return None;
    };
    set(
        &mut status.conditions,
        condition(kind, false, reason, &message, None),
    );
    is_news.then_some(message)
}

/// Writes events on the Service and on its Endpoint.
pub(super) fn tell(endpoint: &Endpoint, reason: &str, message: &str, context: &Context) {
    if let Some(service) = &endpoint.spec.service_ref {
        let about = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Service".into()),
            name: Some(service.name.clone()),
            namespace: endpoint.namespace(),
            uid: Some(service.uid.clone()),
            ..ObjectReference::default()
        };
        context.events.event_about(about, true, reason, message);
    }
    context.events.event(endpoint, true, reason, message);
}

/// Writes the same events for each message that is news.
pub(super) fn tell_news<const N: usize>(
    endpoint: &Endpoint,
    news: [(&str, Option<String>); N],
    context: &Context,
) {
    for (reason, message) in news {
        if let Some(message) = message {
            tell(endpoint, reason, &message, context);
        }
    }
}
