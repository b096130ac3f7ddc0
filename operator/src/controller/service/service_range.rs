//! Ranges in which Services have their addresses: those of the settings, and those of ServiceCIDR objects, which come
//! and go while the cluster runs.
//!
//! Invariant: no range of a ServiceCIDR is used that touches what nodes talk to, or a node's address: nodes would lose
//! these. For the pods of a VPC no range is used that touches the VPC's ([`World`](crate::model::world::World)).

use std::sync::Arc;

use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use thuban_api::cidr::Cidr;
use tracing::{info, warn};

use crate::controller::context::{Context, addresses_of};
use crate::controller::runtime::error::ReconcileError;
use crate::controller::runtime::watch::Change;
use crate::controller::wake::wake_where;
use crate::model::endpoint::EndpointKind;
use crate::model::ranges::parsed;

/// The reasons of the events on a ServiceCIDR.
const REFUSED: &str = "RangeRefused";
const OVERLAPS: &str = "RangeOverlapsVpc";

pub fn on_service_cidr(context: &Context, change: &Change<ServiceCIDR>) {
    sync(context);
    if let Change::Applied(object) = change {
        context.hub.triggers.service_cidr(&object.name_any());
    }
}

/// Tells the world the ranges as they are now. Wakes what depends on them, if they are others than before.
pub fn sync(context: &Context) {
    let mut ranges = context.service_ranges.clone();
    for (object, range) in of_objects(context) {
        if !ranges.contains(&range) && obstacle(&object, range, context).is_none() {
            ranges.push(range);
        }
    }
    let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
    let told = ranges.join(", ");
    if !context.hub.update(|world| world.set_service_ranges(ranges)) {
        return;
    }
    info!(ranges = told, "ranges of Services have changed");
    wake(context);
    for vpc in context.stores.vpcs.state() {
        context.hub.triggers.vpc(&vpc.name_any());
    }
    wake_where(context, |endpoint| {
        EndpointKind::of(endpoint) == EndpointKind::Service
    });
}

/// Wakes all ServiceCIDRs: a VPC has other ranges now.
pub fn wake(context: &Context) {
    for object in context.stores.service_cidrs.state() {
        context.hub.triggers.service_cidr(&object.name_any());
    }
}

/// Returns the ranges of all ServiceCIDRs, in an order that stays.
pub fn of_objects(context: &Context) -> Vec<(Arc<ServiceCIDR>, Cidr)> {
    let objects = context.stores.service_cidrs.state();
    let ranges = objects.iter().flat_map(|object| {
        let ranges = ranges_of(object).into_iter();
        ranges.map(|range| (Arc::clone(object), range))
    });
    let mut ranges: Vec<_> = ranges.collect();
    ranges.sort_by_key(|(object, range)| (object.name_any(), range.to_string()));
    ranges
}

fn ranges_of(object: &ServiceCIDR) -> Vec<Cidr> {
    let texts = object.spec.as_ref().and_then(|spec| spec.cidrs.as_deref());
    parsed(texts.unwrap_or_default())
}

/// Returns why nodes can't have Services in a range, if they can't. Addresses of younger nodes are no reason: who adds
/// a node must not end the Services of all others.
fn obstacle(object: &ServiceCIDR, range: Cidr, context: &Context) -> Option<String> {
    let underlay = context
        .underlay_ranges
        .iter()
        .find(|underlay| underlay.overlaps(range));
    if let Some(underlay) = underlay {
        return Some(format!("{underlay} (THUBAN_UNDERLAY_CIDRS)"));
    }
    let nodes = context.stores.nodes.state();
    let older = nodes
        .iter()
        .filter(|node| node.metadata.creation_timestamp < object.metadata.creation_timestamp);
    let mut addresses = older.flat_map(|node| addresses_of(node));
    let (node, address) = addresses.find(|(_, address)| range.contains_address(*address))?;
    Some(format!("the address {address} of node {node}"))
}

/// Tells by events on the ServiceCIDR who can't use its ranges.
pub async fn reconcile(object: Arc<ServiceCIDR>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    if object.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let own: Vec<_> = ranges_of(&object)
        .into_iter()
        .filter(|range| !context.service_ranges.contains(range))
        .collect();
    let generation = object.metadata.generation.unwrap_or_default();
    for range in &own {
        let Some(obstacle) = obstacle(&object, *range, &context) else {
            continue;
        };
        let note = format!(
            "Services in {range} are served nowhere: the range touches {obstacle}. Make a ServiceCIDR with another range"
        );
        warn_once(
            &object,
            &format!("{generation}.refused"),
            (REFUSED, &note),
            &context,
        )
        .await?;
    }
    for vpc in context.stores.vpcs.state() {
        let ranges = context
            .hub
            .read(|world| parsed(world.vpc_ranges(&vpc.name_any())));
        let overlap = own.iter().find_map(|range| {
            let other = ranges.iter().find(|other| other.overlaps(*range))?;
            Some((range, other))
        });
        let Some((range, other)) = overlap else { continue };
        let name = vpc.name_any();
        let note = format!(
            "VPC {name} has {other}: its pods reach no Service in {range}, and Services of this VPC are not served there. \
             Make a ServiceCIDR with another range, or a VPC with other ranges"
        );
        warn_once(
            &object,
            &format!("{generation}.{name}"),
            (OVERLAPS, &note),
            &context,
        )
        .await?;
    }
    Ok(Action::await_change())
}

async fn warn_once(
    object: &ServiceCIDR,
    key: &str,
    (reason, note): (&str, &str),
    context: &Context,
) -> Result<(), ReconcileError> {
    if context.events.warn_once(object, key, reason, note).await? {
        warn!(service_cidr = object.name_any(), reason, note);
    }
    Ok(())
}
