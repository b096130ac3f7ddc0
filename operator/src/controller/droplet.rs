//! Droplet: registered by transitd in Init, Provisioned here once it is known to be its Node's.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::condition::{find, set};
use thuban_api::{ConditionStatus, Droplet, Phase};

use super::context::{Context, ReconcileError, internal_ips};
use super::objects::{condition, owner, replace, replace_status};
use crate::model::validation::parse;

/// Why a droplet is not used: (reason, message).
type Refusal = (&'static str, String);

pub async fn reconcile(droplet: Arc<Droplet>, context: Arc<Context>) -> Result<Action, ReconcileError> {
    if droplet.metadata.deletion_timestamp.is_some() {
        return Ok(Action::await_change());
    }
    let name = droplet.name_any();
    let droplets: Api<Droplet> = Api::all(context.client.clone());
    let Some(node) = context.stores.nodes.get(&ObjectRef::new(&droplet.spec.node)) else {
        return Ok(Action::requeue(Duration::from_secs(5)));
    };
    if droplet.owner_references().is_empty() {
        let mut owned = (*droplet).clone();
        owned.metadata.owner_references = owner(&*node).map(|reference| vec![reference]);
        replace(&droplets, &owned).await?;
        return Ok(Action::await_change());
    }
    let mut status = droplet.status.clone().unwrap_or_default();
    let verdict = judge(&droplet, &internal_ips(&node), &context);
    let generation = droplet.metadata.generation;
    let accepted = match &verdict {
        Ok(()) => condition(
            "Accepted",
            true,
            "Registered",
            "the droplet is its node's and may carry roles",
            generation,
        ),
        Err((reason, message)) => condition("Accepted", false, reason, message, generation),
    };
    let is_news = set(&mut status.conditions, accepted);
    if verdict.is_ok() {
        status.phase = Phase::Provisioned;
        status.address = Some(droplet.spec.ip.clone());
    }
    status.roles = context.hub.read(|world| world.roles(&name));
    status.observed_generation = generation;
    if droplet.status.as_ref() != Some(&status) {
        let mut changed = (*droplet).clone();
        changed.status = Some(status);
        replace_status(&droplets, &changed).await?;
    }
    if let (true, Err((reason, message))) = (is_news, &verdict) {
        context.event(&*droplet, true, reason, message).await;
    }
    Ok(Action::await_change())
}

fn judge(droplet: &Droplet, node_addresses: &[IpAddr], context: &Context) -> Result<(), Refusal> {
    let name = droplet.name_any();
    if droplet.spec.node != name {
        return Err((
            "WrongNode",
            format!("spec.node: expected {name:?}, the object's own name"),
        ));
    }
    let address = droplet
        .spec
        .ip
        .parse::<Ipv4Addr>()
        .ok()
        .filter(|address| node_addresses.contains(&IpAddr::from(*address)));
    let Some(address) = address else {
        let message = format!(
            "spec.ip: {:?} is not an InternalIP of node {name}: {node_addresses:?}",
            droplet.spec.ip
        );
        return Err(("WrongAddress", message));
    };
    let others = context.stores.droplets.state();
    if let Some(other) = others
        .iter()
        .find(|other| other.name_any() != name && other.spec.ip == droplet.spec.ip)
    {
        let is_older = |a: &Droplet, b: &Droplet| {
            (&a.metadata.creation_timestamp, a.name_any()) < (&b.metadata.creation_timestamp, b.name_any())
        };
        if is_older(other, droplet) {
            let message = format!(
                "spec.ip: {address} is the address of droplet {} already",
                other.name_any()
            );
            return Err(("AddressTaken", message));
        }
    }
    for vpc in context.stores.vpcs.state() {
        let in_force = vpc
            .status
            .as_ref()
            .map(|status| status.cidrs.clone())
            .unwrap_or_default();
        let ranges = parse(&in_force).unwrap_or_default();
        let within = |address: &IpAddr| {
            let range = ranges.iter().find(|range| range.contains_address(*address));
            range.map(|range| (*address, *range))
        };
        if vpc.status.as_ref().is_some_and(|status| status.vni.is_some())
            && let Some((address, range)) = node_addresses.iter().find_map(within)
        {
            let message = format!(
                "InternalIP {address} of the node lies in {range} of VPC {}; give the node another address or remove the VPC",
                vpc.name_any()
            );
            return Err(("AddressConflict", message));
        }
    }
    Ok(())
}

/// Whether it may be given roles.
pub fn is_accepted(droplet: &Droplet) -> bool {
    let status = droplet.status.as_ref();
    let accepted = status.and_then(|status| find(&status.conditions, "Accepted"));
    accepted.is_some_and(|accepted| accepted.status == ConditionStatus::True)
}
