//! Addresses outside of the cluster whose packets nodes send on to a Service: those of load balancers, and
//! `externalIPs`.
//!
//! Invariant: an address that a Service's user chose counts only within the ranges that the installation allows, and
//! only in the VPC that nodes are in. Otherwise every author of a Service could take any address's packets.

use std::net::IpAddr;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::condition::{find, set};
use thuban_api::{DEFAULT_NAME, Endpoint, EndpointStatus};

use crate::controller::context::Context;
use crate::controller::runtime::objects::condition;
use crate::model::endpoint::name_of;
use crate::model::service::Service;

const CONDITION: &str = "ExternalIPs";
pub const REASON: &str = "ExternalIPsNotAllowed";

#[derive(Debug, Default)]
pub struct Outside {
    pub allowed: Vec<IpAddr>,
    pub refused: Vec<IpAddr>,
}

pub fn outside_of(endpoint: &Endpoint, service: &Service, context: &Context) -> Outside {
    let is_nodes_own = context.vpc_name_of(endpoint) == DEFAULT_NAME;
    let is_allowed = |address: &IpAddr| {
        let mut ranges = context.external_ranges.iter();
        is_nodes_own && ranges.any(|range| range.contains_address(*address))
    };
    let (own, refused) = service.external_ips().into_iter().partition(is_allowed);
    let mut allowed = service.balancers();
    allowed.extend::<Vec<IpAddr>>(own);
    allowed.sort_unstable();
    allowed.dedup();
    Outside { allowed, refused }
}

/// Sets the condition with the addresses that don't count. Returns the message for an event, if it is news.
pub fn say(status: &mut EndpointStatus, endpoint: &Endpoint, context: &Context) -> Option<String> {
    let reference = endpoint.spec.service_ref.as_ref()?;
    let known = ObjectRef::<Service>::new(&reference.name).within(&name_of(endpoint).0);
    let service = context.stores.services.get(&known)?;
    let refused = outside_of(endpoint, &service, context).refused;
    let was_said = find(&status.conditions, CONDITION).is_some();
    if refused.is_empty() {
        status.conditions.retain(|condition| condition.kind != CONDITION);
        return None;
    }
    let refused: Vec<String> = refused.iter().map(ToString::to_string).collect();
    let message = format!(
        "spec.externalIPs {} of Service {} have no effect: only Services of VPC {DEFAULT_NAME:?} may have external \
         IPs, and only in the ranges of THUBAN_EXTERNAL_IP_CIDRS",
        refused.join(", "),
        service.name_any()
    );
    set(
        &mut status.conditions,
        condition(CONDITION, false, REASON, &message, None),
    );
    (!was_said).then_some(message)
}
