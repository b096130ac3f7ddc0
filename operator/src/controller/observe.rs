//! What a change of an object means: rows of the world, and whom to wake.

use std::net::Ipv4Addr;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::{
    Bouncer, ConditionStatus, DEFAULT_NAME, Divider, Droplet, Endpoint, IpClaim, Network, Phase, Vpc,
    condition,
};

use super::context::Context;
use super::network::{id, in_force, is_accepted};
use super::pod::endpoint_name;
use super::watch::Change;
use crate::model::world::{self, EndpointName, Membership};

pub fn on_pod(context: &Context, change: Change<Pod>) {
    let triggers = &context.hub.triggers;
    match change {
        Change::Applied(pod) => {
            if let Some(namespace) = pod.namespace() {
                triggers.endpoint(&(namespace, endpoint_name(&pod)));
            }
            let _ = triggers.pods.send(ObjectRef::from_obj(&pod));
        }
        Change::Gone(pod) => {
            let namespace = pod.namespace.clone().unwrap_or_default();
            let all = context.stores.endpoints.state();
            let own = all.iter().filter(|endpoint| {
                endpoint
                    .spec
                    .pod_ref
                    .as_ref()
                    .is_some_and(|own| own.name == pod.name)
                    && endpoint.namespace().as_deref() == Some(&namespace)
            });
            own.for_each(|endpoint| triggers.endpoint(&(namespace.clone(), endpoint.name_any())));
        }
    }
}

pub fn on_namespace(context: &Context, change: Change<Namespace>) {
    let Change::Applied(space) = change else { return };
    wake_endpoints(context, |endpoint| endpoint.namespace() == space.metadata.name);
}

pub fn on_node(context: &Context, change: Change<Node>) {
    let name = match change {
        Change::Applied(node) => node.name_any(),
        Change::Gone(node) => {
            context.hub.disconnect(&node.name);
            node.name
        }
    };
    let _ = context.hub.triggers.droplets.send(ObjectRef::new(&name));
}

/// Endpoints that have no address yet and might get one now.
fn wake_endpoints(context: &Context, concerns: impl Fn(&Endpoint) -> bool) {
    for endpoint in context.stores.endpoints.state() {
        let is_waiting = endpoint
            .status
            .as_ref()
            .is_none_or(|status| status.phase == Phase::Init);
        if is_waiting && concerns(&endpoint) {
            context
                .hub
                .triggers
                .endpoint(&(endpoint.namespace().unwrap_or_default(), endpoint.name_any()));
        }
    }
}

pub fn on_vpc(context: &Context, change: Change<Vpc>) {
    let (name, vpc) = match change {
        Change::Applied(vpc) => {
            let status = vpc.status.clone().unwrap_or_default();
            let vni = status.vni;
            let name = vpc.name_any();
            let host_access = name == DEFAULT_NAME;
            (
                name,
                vni.map(|vni| world::Vpc {
                    vni,
                    cidrs: status.cidrs,
                    host_access,
                }),
            )
        }
        Change::Gone(vpc) => (vpc.name, None),
    };
    context.hub.update(|world| world.set_vpc(&name, vpc));
    let triggers = &context.hub.triggers;
    let _ = triggers.vpcs.send(ObjectRef::new(&name));
    for network in context
        .stores
        .networks
        .state()
        .iter()
        .filter(|network| network.spec.vpc == name)
    {
        let _ = triggers.networks.send(ObjectRef::from_obj(&**network));
        let network = network.name_any();
        wake_endpoints(context, |endpoint| endpoint.spec.network == network);
    }
}

pub fn on_network(context: &Context, change: Change<Network>) {
    let triggers = &context.hub.triggers;
    let name = match change {
        Change::Applied(network) => {
            let name = network.name_any();
            let is_leaving = network.metadata.deletion_timestamp.is_some();
            let row = id(&network).map(|id| world::Network {
                vpc: network.spec.vpc.clone(),
                id,
                cidrs: in_force(&network).to_vec(),
            });
            context.hub.update(|world| {
                let is_wanted = !is_leaving || world.is_in_use(&name);
                world.set_network(&name, row.filter(|_| is_wanted));
            });
            let _ = triggers.vpcs.send(ObjectRef::new(&network.spec.vpc));
            name
        }
        Change::Gone(network) => {
            context.hub.update(|world| world.set_network(&network.name, None));
            for vpc in context.stores.vpcs.state() {
                let _ = triggers.vpcs.send(ObjectRef::from_obj(&*vpc));
            }
            // One that it overlapped may be accepted now.
            for other in context
                .stores
                .networks
                .state()
                .iter()
                .filter(|other| !is_accepted(other))
            {
                let _ = triggers.networks.send(ObjectRef::from_obj(&**other));
            }
            network.name
        }
    };
    let _ = triggers.networks.send(ObjectRef::new(&name));
    wake_endpoints(context, |endpoint| endpoint.spec.network == name);
}

pub fn on_divider(context: &Context, change: Change<Divider>) {
    let triggers = &context.hub.triggers;
    let name = match change {
        Change::Applied(divider) => {
            let name = divider.name_any();
            let parent = divider.spec.vpc.clone();
            let role = divider.spec.droplet.clone().map(|droplet| world::Role {
                parent: parent.clone(),
                droplet,
            });
            context.hub.update(|world| world.set_divider(&name, role));
            let _ = triggers.vpcs.send(ObjectRef::new(&parent));
            divider
                .spec
                .droplet
                .map(|droplet| triggers.droplets.send(ObjectRef::new(&droplet)));
            name
        }
        Change::Gone(divider) => {
            context.hub.update(|world| world.set_divider(&divider.name, None));
            for vpc in context.stores.vpcs.state() {
                let _ = triggers.vpcs.send(ObjectRef::from_obj(&*vpc));
            }
            divider.name
        }
    };
    let _ = triggers.dividers.send(ObjectRef::new(&name));
}

pub fn on_bouncer(context: &Context, change: Change<Bouncer>) {
    let triggers = &context.hub.triggers;
    let name = match change {
        Change::Applied(bouncer) => {
            let name = bouncer.name_any();
            let parent = bouncer.spec.network.clone();
            let role = bouncer.spec.droplet.clone().map(|droplet| world::Role {
                parent: parent.clone(),
                droplet,
            });
            context.hub.update(|world| world.set_bouncer(&name, role));
            let _ = triggers.networks.send(ObjectRef::new(&parent));
            bouncer
                .spec
                .droplet
                .map(|droplet| triggers.droplets.send(ObjectRef::new(&droplet)));
            name
        }
        Change::Gone(bouncer) => {
            context.hub.update(|world| world.set_bouncer(&bouncer.name, None));
            for network in context.stores.networks.state() {
                let _ = triggers.networks.send(ObjectRef::from_obj(&*network));
            }
            bouncer.name
        }
    };
    let _ = triggers.bouncers.send(ObjectRef::new(&name));
}

pub fn on_droplet(context: &Context, change: Change<Droplet>) {
    let (name, address) = match change {
        Change::Applied(droplet) => {
            let status = droplet.status.clone().unwrap_or_default();
            (
                droplet.name_any(),
                status
                    .address
                    .and_then(|address| address.parse::<Ipv4Addr>().ok()),
            )
        }
        Change::Gone(droplet) => {
            context.hub.disconnect(&droplet.name);
            (droplet.name, None)
        }
    };
    let was = context.hub.update(|world| {
        let was = world.is_droplet(&name);
        world.set_droplet(&name, address);
        was
    });
    let triggers = &context.hub.triggers;
    let _ = triggers.droplets.send(ObjectRef::new(&name));
    if was != address.is_some() {
        for divider in context.stores.dividers.state() {
            let _ = triggers.dividers.send(ObjectRef::from_obj(&*divider));
        }
        for bouncer in context.stores.bouncers.state() {
            let _ = triggers.bouncers.send(ObjectRef::from_obj(&*bouncer));
        }
        for endpoint in context
            .stores
            .endpoints
            .state()
            .iter()
            .filter(|endpoint| endpoint.spec.droplet == name)
        {
            triggers.endpoint(&(endpoint.namespace().unwrap_or_default(), endpoint.name_any()));
        }
    }
}

pub fn on_endpoint(context: &Context, change: Change<Endpoint>) {
    let (name, endpoint): (EndpointName, _) = match change {
        Change::Applied(endpoint) => {
            let name = (endpoint.namespace().unwrap_or_default(), endpoint.name_any());
            if endpoint.metadata.deletion_timestamp.is_some() {
                let _ = context
                    .hub
                    .triggers
                    .networks
                    .send(ObjectRef::new(&endpoint.spec.network));
            }
            (name, Some(world_endpoint(&endpoint)))
        }
        Change::Gone(endpoint) => {
            let namespace = endpoint.namespace.clone().unwrap_or_default();
            // A pod that lives on, or was created again under its name, gets a new one.
            for pod in context.stores.pods.state() {
                if pod.namespace().as_deref() == Some(&namespace) && endpoint_name(&pod) == endpoint.name {
                    let _ = context.hub.triggers.pods.send(ObjectRef::from_obj(&*pod));
                }
            }
            for network in context.stores.networks.state() {
                if network.metadata.deletion_timestamp.is_some() {
                    let _ = context.hub.triggers.networks.send(ObjectRef::from_obj(&*network));
                }
            }
            ((namespace, endpoint.name), None)
        }
    };
    context.hub.update(|world| world.set_endpoint(&name, endpoint));
    context.hub.triggers.endpoint(&name);
}

/// What the world knows of an endpoint. One that is being deleted stays until its reconciler takes it out.
fn world_endpoint(endpoint: &Endpoint) -> world::Endpoint {
    let status = endpoint.status.clone().unwrap_or_default();
    let refused = condition::find(&status.conditions, "Accepted")
        .filter(|accepted| accepted.status == ConditionStatus::False)
        .map(|accepted| Membership::Refused(accepted.reason.clone(), accepted.message.clone()));
    let member = || {
        let address6 = status.addresses.iter().find_map(|text| text.parse().ok());
        Some(Membership::Member(world::Address {
            address: status.addresses.iter().find_map(|text| text.parse().ok())?,
            address6: address6.zip(status.prefix_length6),
            prefix_length: status.prefix_length?,
            gateway: status.gateway.as_ref()?.parse().ok()?,
            mac: status.mac.as_ref()?.parse().ok()?,
        }))
    };
    let reference = endpoint.spec.pod_ref.clone().unwrap_or_default();
    world::Endpoint {
        network: endpoint.spec.network.clone(),
        droplet: endpoint.spec.droplet.clone(),
        pod: world::Pod {
            namespace: endpoint.namespace().unwrap_or_default(),
            name: reference.name,
            uid: reference.cni_uid,
        },
        membership: member().or(refused).unwrap_or(Membership::Waiting),
        ready: status.phase == Phase::Provisioned,
    }
}

pub fn on_ip_claim(context: &Context, change: Change<IpClaim>) {
    let triggers = &context.hub.triggers;
    match change {
        Change::Applied(claim) => {
            let _ = triggers.networks.send(ObjectRef::new(&claim.spec.network));
            let _ = triggers.claims.send(ObjectRef::from_obj(&claim));
        }
        // Its network isn't known any more; numbers are few.
        Change::Gone(claim) => {
            let vpc = claim.name.split('.').next().unwrap_or_default().to_owned();
            for network in context
                .stores
                .networks
                .state()
                .iter()
                .filter(|network| network.spec.vpc == vpc)
            {
                let _ = triggers.networks.send(ObjectRef::from_obj(&**network));
            }
        }
    }
}
