//! Handles changes of objects: updates rows of the world, and wakes other objects.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::identifiers::Vni;
use thuban_api::{
    BitRate, DEFAULT_NAME, DeniedTraffic, Droplet, Dscp, ENDPOINT_ANNOTATION, Endpoint, IpClaim, Network,
    VniClaim, Vpc, VpcSpec, system_namespace,
};

use crate::controller::admission::admitted;
use crate::controller::annotations;
use crate::controller::cache::last_seen::{DefaultNetwork, Entrance, VpcState};
use crate::controller::context::Context;
use crate::controller::denial;
use crate::controller::droplet::{address_in_force, node_address6};
use crate::controller::endpoint::sync::{end_unseen_draft, remove_endpoint, sync_endpoint, sync_pod};
use crate::controller::node::forget_droplet;
use crate::controller::ranges::are_in_force;
use crate::controller::role::kind::Role;
use crate::controller::role::placement::crowded_by;
use crate::controller::runtime::clocks::Timed;
use crate::controller::runtime::watch::Change;
use crate::controller::service::service_range;
use crate::controller::shared_services::shared_services;
use crate::controller::vpc::has_egress;
use crate::controller::wake::{
    wake_endpoints, wake_hosts, wake_members, wake_services_of, wake_unplaced, wake_where,
};
use crate::model::admission::network_of;
use crate::model::allocation::{self, Family, Owner};
use crate::model::annotations::Holder;
use crate::model::bandwidth::Limits;
use crate::model::cached::Pod;
use crate::model::endpoint::{EndpointKind, has_addresses, name_of};
use crate::model::ranges::{id, in_force};
use crate::model::validation::parse;
use crate::model::world::{self, EndpointName, RoleKind};

pub fn on_pod(context: &Context, change: &Change<Pod>) {
    let triggers = &context.hub.triggers;
    let (pod, is_there) = match change {
        Change::Applied(pod) => (pod, true),
        Change::Gone(pod) => (&**pod, false),
    };
    let namespace = pod.namespace().unwrap_or_default();
    let name = pod.name_any();
    if let Some(named) = pod.annotations().get(ENDPOINT_ANNOTATION) {
        let named = (namespace.clone(), named.clone());
        context.index.pod(named.clone(), &name, is_there);
        triggers.endpoint(&named);
    }
    let endpoint = (namespace.clone(), pod.endpoint_name());
    triggers.endpoint(&endpoint);
    if !(is_there && pod.is_alive()) {
        // If its object is there, or comes, that is removed by its workflow.
        end_unseen_draft(&endpoint, context);
    }
    if is_there {
        sync_pod(pod, context);
        triggers.pod(&namespace, &name);
        annotations::tell(pod, Holder::Pod, context);
    } else {
        let uid = pod.uid().unwrap_or_default();
        context.reservations.forget(&uid);
        denial::forget(pod, context);
        context.last_seen.remarks.forget(&uid);
        annotations::forget(pod, context);
        for told in [
            Timed::EndpointMissing,
            Timed::AnnotationUnread,
            Timed::EndpointInUse,
        ] {
            context.clocks.forget(told, &uid);
        }
    }
}

pub fn on_namespace(context: &Context, change: &Change<Namespace>) {
    let space = match change {
        Change::Applied(space) => space,
        Change::Gone(space) => {
            let name = space.name_any();
            sync_namespace(context, space);
            context.last_seen.labels.forget(&name);
            annotations::forget(&**space, context);
            context
                .hub
                .update(|world| world.set_namespace_labels(&name, None));
            return;
        }
    };
    let name = space.name_any();
    sync_namespace(context, space);
    annotations::tell(space, Holder::Namespace, context);
    context
        .hub
        .update(|world| world.set_namespace_labels(&name, Some(space.labels().clone())));
    let labels = context.last_seen.labels.replace(&name, space.labels().clone());
    let is_first = labels.is_none();
    if labels.is_some_and(|labels| labels != *space.labels()) {
        wake_where(context, |endpoint| {
            endpoint.metadata.namespace.as_ref() == Some(&name)
        });
    }
    let waiting = context.index.all_waiting();
    let own = waiting
        .iter()
        .filter(|(namespace, _)| Some(namespace) == space.metadata.name.as_ref());
    for name in own {
        context.hub.triggers.endpoint(name);
    }
    wake_services_of(&space.name_any(), context);
    if name == system_namespace() && is_first {
        wake_hosts(context);
    }
}

/// Tells the world which network the namespace's names belong to: none while its network doesn't let it in.
fn sync_namespace(context: &Context, space: &Namespace) {
    let name = space.name_any();
    // This is judged under the lock, by the stores as they are then: the last caller is right.
    context.hub.update(|world| {
        let space = context.stores.namespaces.get(&ObjectRef::from_obj(space));
        let network = space.map(|space| network_of(&BTreeMap::new(), space.annotations()));
        let network = network.filter(|network| {
            let known = context.network(network);
            admitted(&name, network, known.as_deref(), context).is_ok()
        });
        world.set_namespace(&name, network.as_deref());
    });
}

/// Does the same for all namespaces.
pub fn sync_all_namespaces(context: &Context) {
    for space in context.stores.namespaces.state() {
        sync_namespace(context, &space);
    }
}

/// Does the same for all namespaces of networks that may let others in from now on.
fn sync_namespaces(context: &Context, networks: &[String]) {
    if context.hub.is_filling() {
        return;
    }
    for space in context.stores.namespaces.state() {
        if networks.contains(&network_of(&BTreeMap::new(), space.annotations())) {
            sync_namespace(context, &space);
        }
    }
}

/// Returns the limit of what a VPC's pods send out of a droplet. The API server refuses what is none.
fn egress_per_droplet(spec: &VpcSpec) -> Option<BitRate> {
    let text = spec.bandwidth.as_ref()?.egress_per_droplet.as_ref()?;
    text.parse().ok()
}

pub fn on_vpc(context: &Context, change: &Change<Vpc>) {
    let (name, vpc) = match change {
        Change::Applied(vpc) => {
            let now = &vpc.spec.allowed_namespaces;
            let was = context.last_seen.vpcs.replace(&vpc.name_any(), now.clone());
            if was.as_ref() != Some(now) {
                sync_namespaces(context, &context.index.networks_of(&vpc.name_any()));
            }
            if was.is_some_and(|was| was != *now) {
                let networks = context.index.networks_of(&vpc.name_any());
                wake_where(context, |endpoint| networks.contains(&endpoint.spec.network));
            }
            let status = vpc.status.clone().unwrap_or_default();
            let vni = status.vni.and_then(Vni::new);
            let name = vpc.name_any();
            let ranges = if status.vni.is_some() {
                status.cidrs.as_slice()
            } else {
                &[]
            };
            context.index.ranges(&name, parse(ranges).unwrap_or_default());
            let host_access = name == DEFAULT_NAME;
            let vpc = vni.map(|vni| world::Vpc {
                vni,
                cidrs: status.cidrs,
                host_access,
                egress: has_egress(vpc),
                egress_rate: egress_per_droplet(&vpc.spec),
                reject: vpc.spec.denied_traffic == Some(DeniedTraffic::Reject),
                dscp: Dscp::of_field(vpc.spec.dscp.as_ref()),
                shared: shared_services(&context.shared_by_default, vpc.spec.shared_services.as_deref()),
            });
            (name, vpc)
        }
        Change::Gone(vpc) => {
            context.waits.end(&**vpc);
            let name = vpc.name_any();
            context.last_seen.vpcs.forget(&name);
            context.index.ranges(&name, Vec::new());
            let networks = context.index.networks_of(&name);
            sync_namespaces(context, &networks);
            wake_where(context, |endpoint| networks.contains(&endpoint.spec.network));
            context.index.forget_vnis(&vpc.uid().unwrap_or_default());
            (vpc.name_any(), None)
        }
    };
    let (is_another, has_other_ranges) = context.hub.update(|world| {
        let was = (world.vni(&name), world.vpc_ranges(&name).to_vec());
        world.set_vpc(&name, vpc);
        (was.0 != world.vni(&name), was.1 != world.vpc_ranges(&name))
    });
    let triggers = &context.hub.triggers;
    triggers.vpc(&name);
    if has_other_ranges {
        service_range::wake(context);
    }
    // A VNI claim that the VPC does not count, or no longer counts, is deleted.
    for claim in context.index.vni_claims_of(&name) {
        triggers.vni_claims.wake(ObjectRef::new(&claim));
    }
    // Numbers in the status, and advice, are of no concern to networks.
    let is_news = match change {
        Change::Applied(vpc) => {
            let now = VpcState::of(vpc);
            context.last_seen.vpc_states.replace(&name, now.clone()).as_ref() != Some(&now)
        }
        Change::Gone(_) => {
            context.last_seen.vpc_states.forget(&name);
            true
        }
    };
    let networks = if is_news || is_another {
        context.index.networks_of(&name)
    } else {
        Vec::new()
    };
    for network in networks {
        triggers.network(&network);
        wake_endpoints(context, &network);
        if is_another {
            wake_members(context, &network);
        }
    }
}

pub fn on_network(context: &Context, change: &Change<Network>) {
    let triggers = &context.hub.triggers;
    let vni = |name: &str| context.hub.read(|world| world.network_vni(name));
    let was = vni(&match change {
        Change::Applied(network) => network.name_any(),
        Change::Gone(network) => network.name_any(),
    });
    let name = match change {
        Change::Applied(network) => {
            let name = network.name_any();
            let now = Entrance {
                allowed: network.spec.allowed_namespaces.clone(),
                vpc: network.spec.vpc.clone(),
            };
            let was = context.last_seen.networks.replace(&name, now.clone());
            let limits = Limits::of(&network.spec);
            let old_limits = context.last_seen.limits.replace(&name, limits);
            if was.as_ref().is_some_and(|was| was.allowed != now.allowed)
                || old_limits.is_some_and(|old| old != limits)
            {
                wake_where(context, |endpoint| endpoint.spec.network == name);
            }
            context.index.network(&network.spec.vpc, &name, true);
            if was != Some(now) {
                sync_namespaces(context, std::slice::from_ref(&name));
            }
            let is_leaving = network.metadata.deletion_timestamp.is_some();
            let row = id(network).map(|id| world::Network {
                vpc: network.spec.vpc.clone(),
                id,
                cidrs: in_force(network).to_vec(),
                private: network.spec.egress == Some(false),
                limits,
            });
            context.hub.update(|world| {
                let is_wanted = !is_leaving || world.is_in_use(&name);
                world.set_network(&name, row.filter(|_| is_wanted));
            });
            triggers.vpc(&network.spec.vpc);
            name
        }
        Change::Gone(network) => {
            context.waits.end(&**network);
            let name = network.name_any();
            context.clocks.forget(Timed::AddressesNearlyUsedUp, &name);
            context.last_seen.networks.forget(&name);
            context.last_seen.limits.forget(&name);
            sync_namespaces(context, std::slice::from_ref(&name));
            context.index.network(&network.spec.vpc, &name, false);
            context.hub.update(|world| world.set_network(&name, None));
            triggers.vpc(&network.spec.vpc);
            // Endpoints that an operator let in because it saw the end of the network late report it.
            wake_where(context, |endpoint| endpoint.spec.network == name);
            // Ranges that overlapped this one's may come into force now.
            let networks = context.stores.networks.state();
            let refused = networks.iter().filter(|other| !are_in_force(&***other));
            for other in refused {
                triggers.network(&other.name_any());
            }
            name
        }
    };
    if name == DEFAULT_NAME && is_usable_anew(context, change) {
        wake_hosts(context);
    }
    triggers.network(&name);
    wake_endpoints(context, &name);
    if was != vni(&name) || matches!(change, Change::Gone(_)) {
        wake_members(context, &name);
    }
}

/// Whether nodes may get their endpoints now, or must lose them.
fn is_usable_anew(context: &Context, change: &Change<Network>) -> bool {
    let now = match change {
        Change::Applied(network) => DefaultNetwork::of(network),
        Change::Gone(_) => DefaultNetwork::Gone,
    };
    let was = context.last_seen.default_network.replace(DEFAULT_NAME, now);
    was != Some(now)
}

/// Wakes the role, its parent, and the roles that it crowds, which may have come to rest.
pub fn on_role<R: Role>(context: &Context, change: &Change<R>) {
    let (role, now) = match change {
        Change::Applied(role) => (role, Some(role.in_world())),
        Change::Gone(role) => (&**role, None),
    };
    let name = role.name_any();
    context.index.role(R::KIND, role.parent(), &name, now.is_some());
    let droplet = role.droplet().filter(|_| now.is_some());
    let is_unplaced = droplet.is_none() && now.is_some();
    context.index.unplaced(R::KIND, &name, is_unplaced);
    let named = (role.parent(), name.as_str());
    context.placements.store(R::KIND, named, droplet);
    if droplet.is_some() || now.is_none() {
        context.placements.forget(R::KIND, named);
    }
    context.hub.update(|world| world.set_role(R::KIND, &name, now));
    let triggers = &context.hub.triggers;
    let old = role.status().and_then(|status| status.droplet.as_deref());
    for droplet in old.into_iter().chain(role.droplet()) {
        triggers.droplet(droplet);
    }
    match R::KIND {
        RoleKind::Divider => triggers.vpc(role.parent()),
        RoleKind::Bouncer => triggers.network(role.parent()),
    }
    let crowded = match change {
        Change::Applied(role) => crowded_by(role, context),
        Change::Gone(_) => Vec::new(),
    };
    for name in crowded.iter().chain([&name]) {
        triggers.role(R::KIND, name);
    }
}

pub fn on_droplet(context: &Context, change: &Change<Droplet>) {
    let (name, address) = match change {
        Change::Applied(droplet) => {
            let name = droplet.name_any();
            let address = address_in_force(droplet, context);
            context.placements.droplet(&name, true);
            let now = droplet.spec.ip.clone();
            let was = context.last_seen.droplet_addresses.replace(&name, now.clone());
            if let Some(was) = was.filter(|was| *was != now) {
                context.index.droplet(&was, &name, false);
            }
            context.index.droplet(&now, &name, true);
            (name, address)
        }
        Change::Gone(droplet) => {
            denial::forget(&**droplet, context);
            let name = droplet.name_any();
            context.placements.droplet(&name, false);
            context.last_seen.droplet_addresses.forget(&name);
            context.index.droplet(&droplet.spec.ip, &name, false);
            // Pods must not suffer from an accidental deletion. The droplet's transitd looks at its Droplet when it has
            // a new stream, and makes it again.
            let is_alive = context.node(&name).is_some() && context.hub.is_connected(&name);
            if is_alive {
                context.hub.end_stream(&name);
            } else {
                forget_droplet(context, &name);
            }
            return;
        }
    };
    let address6 = node_address6(&name, context);
    let was = context.hub.update(|world| {
        let was = world.is_droplet(&name);
        world.set_droplet(&name, address);
        world.set_droplet6(&name, address6);
        was
    });
    let triggers = &context.hub.triggers;
    triggers.droplet(&name);
    if !was && address.is_some() {
        wake_unplaced(context);
        let residents = context.hub.read(|world| world.residents(&name));
        for name in &residents {
            triggers.endpoint(name);
        }
    }
}

pub fn on_endpoint(context: &Context, change: &Change<Endpoint>) {
    let triggers = &context.hub.triggers;
    let (object, is_there) = match change {
        Change::Applied(endpoint) => (endpoint, true),
        Change::Gone(endpoint) => (&**endpoint, false),
    };
    let name = name_of(object);
    let is_waiting = is_there && !has_addresses(object);
    context.index.waiting(&object.spec.network, &name, is_waiting);
    if !is_waiting {
        context.reservations.forget(&Owner::of(object).uid);
    }
    if is_there {
        context.drafts.saw(&name, object);
        sync_endpoint(object, context);
    } else {
        context.waits.end(object);
        remove_endpoint(&name, context);
        context.hub.update(|world| world.set_service(&name, None));
        context.index.forget_leaving(&object.uid().unwrap_or_default());
        // A pod that lives on, or was created again under its name, gets a new Endpoint.
        if let Some(pod) = &object.spec.pod_ref {
            triggers.pod(&name.0, &pod.name);
        }
        if let Some(service) = &object.spec.service_ref {
            triggers.service(&name.0, &service.name);
        }
        if EndpointKind::of(object) == EndpointKind::Host {
            triggers.droplet(&object.spec.droplet);
        }
    }
    // Claims that the Endpoint doesn't count, or no longer counts, are released.
    let vpc = context.vpc_name_of(object);
    let counted = allocation::addresses_of(object);
    let counted = counted
        .iter()
        .map(|address| allocation::ip_claim_name(&vpc, *address));
    let counted: Vec<_> = counted.filter(|_| is_there).collect();
    if !context.index.is_leaving(&object.uid().unwrap_or_default()) {
        for claim in &counted {
            context.resting_claims.forget(claim);
        }
    }
    let claims = context.index.owned_by(&Owner::of(object).uid);
    for claim in claims.iter().filter(|claim| !counted.contains(claim)) {
        triggers.claims.wake(ObjectRef::new(claim));
    }
    if !is_there || object.metadata.deletion_timestamp.is_some() {
        triggers.network(&object.spec.network);
    }
    triggers.endpoint(&name);
}

/// Returns the endpoint that a claim names, if its addresses may be counted only now.
fn claimant(context: &Context, claim: &IpClaim) -> Option<EndpointName> {
    let spec = &claim.spec;
    let reference = ObjectRef::<Endpoint>::new(&spec.endpoint_name).within(&spec.endpoint_namespace);
    let endpoint = context.stores.endpoints.get(&reference)?;
    let is_open = endpoint
        .status
        .as_ref()
        .is_none_or(|status| status.addresses.is_empty());
    if is_open {
        sync_endpoint(&endpoint, context);
    }
    is_open.then(|| name_of(&endpoint))
}

pub fn on_ip_claim(context: &Context, change: &Change<IpClaim>) {
    let triggers = &context.hub.triggers;
    let (claim, is_there) = match change {
        Change::Applied(claim) => (claim, true),
        Change::Gone(claim) => (&**claim, false),
    };
    let network = &claim.spec.network;
    if is_there {
        context.resting_claims.saw(claim);
    }
    if allocation::family_of(&claim.spec) == Some(Family::V4) {
        context.index.claim(network, &claim.name_any(), is_there);
    }
    context
        .index
        .owned(&claim.spec.owner_uid, &claim.name_any(), is_there);
    triggers.network(network);
    if is_there {
        triggers.claims.wake(ObjectRef::from_obj(claim));
        if let Some(name) = claimant(context, claim) {
            triggers.endpoint(&name);
        }
    } else {
        context.resting_claims.forget(&claim.name_any());
        if let Ok(address) = claim.spec.address.parse() {
            context.index.drop_floor(network, address);
        }
        // An endpoint may be waiting for the address.
        wake_endpoints(context, network);
    }
}

pub fn on_vni_claim(context: &Context, change: &Change<VniClaim>) {
    let (claim, is_there) = match change {
        Change::Applied(claim) => (claim, true),
        Change::Gone(claim) => (&**claim, false),
    };
    context
        .index
        .vni_claim(&claim.spec.vpc, &claim.name_any(), is_there);
    if is_there {
        context.hub.triggers.vni_claims.wake(ObjectRef::from_obj(claim));
    }
}
