//! Keeps the world up to date with endpoints.

use std::net::IpAddr;
use std::sync::Arc;

use kube::runtime::reflector::ObjectRef;
use kube::{Api, ResourceExt};
use thuban_api::cidr::Cidr;
use thuban_api::{ConditionStatus, ENDPOINT_ANNOTATION, Endpoint, EndpointStatus, IpClaim, Phase, condition};

use crate::controller::address::claims_held;
use crate::controller::claim::confirm;
use crate::controller::context::Context;
use crate::controller::endpoint::host::is_wanted_by_node;
use crate::controller::endpoint::status::fill;
use crate::controller::runtime::objects::WriteError;
use crate::controller::wake::wake_service;
use crate::model::allocation::{Owner, addresses_of, ip_claim_name, is_confirmed};
use crate::model::bandwidth::Bandwidth;
use crate::model::cached::Pod;
use crate::model::endpoint::{EndpointKind, droplet_of, holder_uid, name_of, pod_of};
use crate::model::policy::Profile;
use crate::model::ranges::in_force;
use crate::model::validation::parse;
use crate::model::world::{self, EndpointName, Membership, World};
use crate::traces;

/// Reasons of `Ready` by which an Endpoint has no address: ADD fails with them. It waits before, if they may pass
/// (`PASSING` in transitd).
const NO_ADDRESS: [&str; 5] = [
    "NetworkFull",
    "AddressUnfit",
    "AddressTaken",
    "AddressInUseOnNode",
    "ClaimDenied",
];

/// Brings the world up to date with the endpoint of a pod as its store has it now: the last caller shows the newest. An
/// endpoint that is being deleted stays until its reconciler removes it. A Service's endpoint has its own workflow.
pub fn sync_endpoint(endpoint: &Endpoint, context: &Context) {
    if EndpointKind::of(endpoint) == EndpointKind::Service {
        return;
    }
    let name = name_of(endpoint);
    let changed = context.hub.update(|world| {
        let latest = context.stores.endpoints.get(&ObjectRef::from_obj(endpoint));
        sync(latest, &name, world, context)
    });
    wake_services(&name.0, changed.unwrap_or_default(), context);
}

/// Sets an endpoint in the world as its object or its draft is. Returns nothing if there is neither.
fn sync(
    object: Option<Arc<Endpoint>>,
    name: &EndpointName,
    world: &mut World,
    context: &Context,
) -> Option<Vec<IpAddr>> {
    let is_leaving = |object: &Arc<Endpoint>| context.index.is_leaving(&object.uid().unwrap_or_default());
    if object.as_ref().is_some_and(is_leaving) {
        return None;
    }
    let latest = context.drafts.latest(name, object)?;
    let latest = world_endpoint(&latest, world.endpoint(name), context);
    if matches!(latest.membership, Membership::Member(_)) {
        traces::sends_rows(&latest.pod.uid);
    }
    Some(set(world, name, Some(latest)))
}

/// Sends the rows of a pod's Endpoint that is about to be made. Its addresses have just been claimed.
pub fn begin_draft(endpoint: &Endpoint, claimed: &[(IpAddr, Cidr)], context: &Context) {
    let mut draft = endpoint.clone();
    let mut status = EndpointStatus::default();
    fill(&mut status, claimed, &draft);
    draft.status = Some(status);
    context.drafts.begin(name_of(endpoint), draft);
    sync_endpoint(endpoint, context);
}

/// Takes back the rows of an Endpoint that could not be made, or that nobody needs.
pub fn end_draft(name: &EndpointName, context: &Context) {
    if !context.drafts.forget(name) {
        return;
    }
    let (is_made, changed) = context.hub.update(|world| {
        let object = ObjectRef::<Endpoint>::new(&name.1).within(&name.0);
        match context.stores.endpoints.get(&object) {
            Some(endpoint) => (true, sync(Some(endpoint), name, world, context)),
            None => (false, Some(set(world, name, None))),
        }
    });
    if !is_made {
        context.hub.forget_in_use(name);
    }
    wake_services(&name.0, changed.unwrap_or_default(), context);
}

/// Does the same unless the object has been seen: its workflow removes it then.
pub fn end_unseen_draft(name: &EndpointName, context: &Context) {
    let object = ObjectRef::<Endpoint>::new(&name.1).within(&name.0);
    if context.stores.endpoints.get(&object).is_none() {
        end_draft(name, context);
    }
}

/// Removes an endpoint from the world, and its draft.
pub fn remove_endpoint(name: &EndpointName, context: &Context) {
    context.drafts.forget(name);
    let changed = context.hub.update(|world| set(world, name, None));
    wake_services(&name.0, changed, context);
}

/// Brings the world up to date with a pod that has one of the endpoints: what policies see of it, and the bandwidth
/// that it asks for.
pub fn sync_pod(pod: &Pod, context: &Context) {
    let namespace = pod.namespace().unwrap_or_default();
    let named = pod.annotations().get(ENDPOINT_ANNOTATION).cloned();
    let asked = Bandwidth::asked(pod.annotations());
    for endpoint in named.into_iter().chain([pod.endpoint_name()]) {
        let name = (namespace.clone(), endpoint);
        let is_new = context.hub.read(|world| {
            let known = world.endpoint(&name);
            known.is_some_and(|known| known.profile != pod.profile || known.asked != asked)
        });
        let known = ObjectRef::<Endpoint>::new(&name.1).within(&namespace);
        if let Some(endpoint) = context.stores.endpoints.get(&known).filter(|_| is_new) {
            sync_endpoint(&endpoint, context);
        }
    }
}

/// Returns what policies see of the pod of an endpoint, and the bandwidth that it asks for. A pod that is gone keeps
/// what it had.
fn of_pod(
    endpoint: &Endpoint,
    known: Option<&world::Endpoint>,
    context: &Context,
) -> (Option<Arc<Profile>>, Bandwidth) {
    if let Some(pod) = holder(endpoint, context) {
        return (pod.profile.clone(), Bandwidth::asked(pod.annotations()));
    }
    let known = pod_of(endpoint).and_then(|pod| known.filter(|known| known.pod.uid == pod.cni_uid));
    known.map_or_else(Default::default, |known| (known.profile.clone(), known.asked))
}

/// Returns the pod that has an endpoint, while it is there.
pub fn holder(endpoint: &Endpoint, context: &Context) -> Option<Arc<Pod>> {
    let reference = pod_of(endpoint)?;
    let namespace = endpoint.namespace().unwrap_or_default();
    let pod = ObjectRef::<Pod>::new(&reference.name).within(&namespace);
    let pod = context.stores.pods.get(&pod);
    pod.filter(|pod| pod.metadata.uid.as_ref() == Some(&reference.uid))
}

/// Sets an endpoint in the world. Returns the addresses that have, or had, another holder, or have one elsewhere.
fn set(world: &mut World, name: &EndpointName, new: Option<world::Endpoint>) -> Vec<IpAddr> {
    let old = world.endpoint(name);
    let held = |endpoint: Option<&world::Endpoint>| match endpoint.map(|endpoint| &endpoint.membership) {
        Some(Membership::Member(address)) => address.all().collect(),
        _ => Vec::new(),
    };
    let (mut changed, now) = (held(old), held(new.as_ref()));
    let identity = |endpoint: &world::Endpoint| {
        let (network, droplet) = (endpoint.network.clone(), endpoint.droplet.clone());
        (network, droplet, endpoint.pod.clone())
    };
    let is_same = changed == now && old.map(identity) == new.as_ref().map(identity);
    changed.extend(now);
    world.set_endpoint(name, new);
    if is_same { Vec::new() } else { changed }
}

/// Wakes the Services of the namespace that name one of the addresses: the address may be a backend now, or no longer
/// be one.
fn wake_services(namespace: &str, addresses: Vec<IpAddr>, context: &Context) {
    for address in addresses {
        for service in context.slices.naming(namespace, address) {
            wake_service(namespace, &service, context);
        }
    }
}

/// Returns the endpoint's addresses, each with its range of the endpoint's network; none while the network doesn't have
/// them.
pub fn ranges_of(endpoint: &Endpoint, context: &Context) -> Option<Vec<(IpAddr, Cidr)>> {
    let network = context.network(&endpoint.spec.network)?;
    let ranges = parse(in_force(&network)).ok()?;
    let with_range = |address: IpAddr| {
        let range = ranges.iter().find(|range| range.contains_address(address))?;
        Some((address, *range))
    };
    addresses_of(endpoint).into_iter().map(with_range).collect()
}

/// Confirms the claims that the Endpoint was made with. Returns false if one is gone, or another's by now, by the API
/// server's word. Then the claim was released before the Endpoint was there, and the Endpoint needs other addresses.
pub async fn confirm_claims(endpoint: &Endpoint, context: &Context) -> Result<bool, WriteError> {
    let status = endpoint.status.as_ref();
    let is_counted = status.is_some_and(|status| !status.addresses.is_empty());
    if is_counted || endpoint.spec.claimed.is_empty() || claimed(endpoint, context).is_some() {
        return Ok(true);
    }
    let claims: Api<IpClaim> = Api::all(context.client.clone());
    for claim in claims_held(endpoint, &addresses_of(endpoint), context).await? {
        let Some(claim) = claim else {
            return Ok(false);
        };
        if !is_confirmed(&claim, endpoint) {
            confirm(&claims, &claim, endpoint).await?;
        }
    }
    Ok(true)
}

/// The status that follows from claims made before the object, if they are all there and confirmed.
fn claimed(endpoint: &Endpoint, context: &Context) -> Option<EndpointStatus> {
    let network = context.network(&endpoint.spec.network)?;
    let owner = Owner::of(endpoint);
    let is_own = |address: &IpAddr| {
        let name = ip_claim_name(&network.spec.vpc, *address);
        let claim = context.stores.ip_claims.get(&ObjectRef::<IpClaim>::new(&name));
        claim.is_some_and(|claim| owner.holds(&claim) && is_confirmed(&claim, endpoint))
    };
    let addresses = ranges_of(endpoint, context)?;
    if addresses.is_empty() || !addresses.iter().all(|(address, _)| is_own(address)) {
        return None;
    }
    let mut status = EndpointStatus::default();
    fill(&mut status, &addresses, endpoint);
    Some(status)
}

fn member(status: &EndpointStatus) -> Option<Membership> {
    let address6 = status.addresses.iter().find_map(|text| text.parse().ok());
    Some(Membership::Member(world::Address {
        address: status.addresses.iter().find_map(|text| text.parse().ok())?,
        address6: address6.zip(status.prefix_length6),
        prefix_length: status.prefix_length?,
        gateway: status.gateway.as_ref()?.parse().ok()?,
        mac: status.mac.as_ref()?.parse().ok()?,
    }))
}

fn world_endpoint(
    endpoint: &Endpoint,
    known: Option<&world::Endpoint>,
    context: &Context,
) -> world::Endpoint {
    let status = endpoint.status.clone().unwrap_or_default();
    let is_host = EndpointKind::of(endpoint) == EndpointKind::Host;
    let network = context.network(&endpoint.spec.network);
    // A network that is made again under its name in another VPC is another network: there the addresses are not
    // claimed.
    let is_elsewhere =
        network.is_some_and(|network| !endpoint.spec.vpc.is_empty() && network.spec.vpc != endpoint.spec.vpc);
    let membership = if is_elsewhere || is_host && !is_wanted_by_node(endpoint, context) {
        None
    } else if status.addresses.is_empty() {
        claimed(endpoint, context).and_then(|status| member(&status))
    } else {
        member(&status)
    };
    let refused = ["Accepted", "Ready"].into_iter().find_map(|kind| {
        let told = condition::find(&status.conditions, kind)?;
        let is_refused = told.status == ConditionStatus::False
            && (kind == "Accepted" || NO_ADDRESS.contains(&told.reason.as_str()));
        is_refused.then(|| Membership::Refused(told.reason.clone(), told.message.clone()))
    });
    let name = match pod_of(endpoint) {
        Some(pod) => pod.name.clone(),
        None if is_host => endpoint.spec.droplet.clone(),
        None => String::new(),
    };
    let (profile, asked) = of_pod(endpoint, known, context);
    world::Endpoint {
        network: endpoint.spec.network.clone(),
        droplet: droplet_of(endpoint).to_owned(),
        previous: status.previous_droplet,
        pod: world::Pod {
            namespace: endpoint.namespace().unwrap_or_default(),
            name,
            uid: holder_uid(endpoint),
        },
        profile,
        asked,
        is_host,
        membership: membership.or(refused).unwrap_or(Membership::Waiting),
        ready: status.phase == Phase::Provisioned || context.drafts.is_ready(&name_of(endpoint), endpoint),
    }
}
