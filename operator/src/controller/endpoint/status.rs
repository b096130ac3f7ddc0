//! Fills and writes an Endpoint's status: the fields that follow from its addresses, and conditions.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{Api, Resource, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::condition::set;
use thuban_api::identifiers::MacAddr;
use thuban_api::{Condition, Endpoint, EndpointStatus};

use crate::controller::context::Context;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::objects::{WriteError, condition, update_status};
use crate::model::asked::unicast;
use crate::model::endpoint::{EndpointKind, name_of, pod_of};

/// How long the workflow waits for a change of which acks and watches should have woken it.
pub const ACK_RETRY: Duration = Duration::from_secs(2);
/// How long the workflow waits for a fix by a person.
pub const USER_RETRY: Duration = Duration::from_secs(10);

/// Fills the fields that follow from the addresses.
pub fn fill(status: &mut EndpointStatus, claimed: &[(IpAddr, Cidr)], endpoint: &Endpoint) {
    status.addresses = claimed.iter().map(|(address, _)| address.to_string()).collect();
    let asked = endpoint.spec.mac.as_deref().and_then(unicast);
    for (address, range) in claimed {
        match address {
            IpAddr::V4(address) => {
                status.mac = Some(asked.unwrap_or_else(|| MacAddr::of(*address)).to_string());
                status.gateway = Some(range.gateway().to_string());
                status.prefix_length = Some(range.prefix_length());
            }
            IpAddr::V6(_) => status.prefix_length6 = Some(range.prefix_length()),
        }
    }
    if EndpointKind::of(endpoint) != EndpointKind::User {
        status.droplet = Some(endpoint.spec.droplet.clone());
    }
}

/// Writes a status, and with it the VPC that the Endpoint's network has now.
pub async fn write(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    context: &Context,
) -> Result<(), WriteError> {
    let vpc = context.vpc_name_of(endpoint);
    if !vpc.is_empty() {
        status.vpc = Some(vpc);
    }
    let mut changed = endpoint.clone();
    changed.status = Some(status);
    update_status(endpoints, endpoint, &changed).await.map(|_| ())
}

/// Writes a condition if it is news, and then an event if the caller asks for one.
pub async fn say(
    endpoint: &Endpoint,
    endpoints: &Api<Endpoint>,
    mut status: EndpointStatus,
    told: Condition,
    with_event: bool,
    context: &Context,
) -> Result<(), WriteError> {
    let (reason, message) = (told.reason.clone(), told.message.clone());
    let admitted = condition("Accepted", true, "Admitted", "", None);
    // Other addresses may be told of in the same words.
    let known = endpoint.status.as_ref().map(|known| &known.addresses);
    let mut is_news = known.map_or(&[][..], Vec::as_slice) != status.addresses;
    is_news |= told.kind != "Accepted" && set(&mut status.conditions, admitted);
    is_news |= set(&mut status.conditions, told);
    if !is_news {
        return Ok(());
    }
    write(endpoint, endpoints, status, context).await?;
    if with_event {
        let about = match pod_of(endpoint) {
            Some(pod) => pod_reference(endpoint, &pod.name, &pod.uid),
            None => endpoint.object_ref(&()),
        };
        context.events.event_about(about, true, &reason, &message);
    }
    Ok(())
}

pub fn waits_for_acks() -> Condition {
    let message = "waits until its droplet and its bouncers have its rows";
    condition("Ready", false, "WaitsForAcks", message, None)
}

pub fn unattached() -> Condition {
    let message = "no running pod has it, and its addresses are kept; a pod gets it by the annotation \
                   thuban.dev/endpoint";
    condition("Ready", false, "Unattached", message, None)
}

/// Writes an event at the pod if so many rules of network policies apply to it that all its packets are denied.
pub fn tell_too_many_rules(endpoint: &Endpoint, context: &Context) {
    let (name, uid) = (name_of(endpoint), endpoint.uid().unwrap_or_default());
    let closed = context
        .hub
        .read(|world| world.too_many_rules(&name).map(str::to_owned));
    let Some(note) = closed else {
        context.clocks.forget(Timed::TooManyRules, &uid);
        return;
    };
    if context.clocks.known_for(Timed::TooManyRules, &uid).is_zero() {
        let about = match pod_of(endpoint) {
            Some(pod) => pod_reference(endpoint, &pod.name, &pod.uid),
            None => endpoint.object_ref(&()),
        };
        context.events.event_about(about, true, "TooManyRules", &note);
    }
}

/// Returns a reference to a pod of the endpoint's namespace, for events that the pod's owner reads.
pub fn pod_reference(endpoint: &Endpoint, name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Pod".into()),
        name: Some(name.to_owned()),
        namespace: endpoint.namespace(),
        uid: Some(uid.to_owned()),
        ..ObjectReference::default()
    }
}
