//! Wakes objects that a change concerns, where these are more than the object itself.

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::{Endpoint, system_namespace};

use crate::controller::context::Context;
use crate::model::endpoint::name_of;
use crate::model::service::Service;
use crate::model::world::{EndpointName, RoleKind};

/// Wakes the roles on a droplet.
pub fn wake_roles(name: &str, context: &Context) {
    for (kind, role) in context.hub.read(|world| world.roles_on(name)) {
        context.hub.triggers.role(kind, &role);
    }
}

/// Wakes the roles that wait for a droplet.
pub fn wake_unplaced(context: &Context) {
    for kind in [RoleKind::Divider, RoleKind::Bouncer] {
        for name in context.index.all_unplaced(kind) {
            context.hub.triggers.role(kind, &name);
        }
    }
}

/// Wakes the endpoints of a network that have no address yet and might get one now.
pub fn wake_endpoints(context: &Context, network: &str) {
    for name in context.index.waiting_of(network) {
        context.hub.triggers.endpoint(&name);
    }
}

/// Wakes all endpoints for which `is_so` is true. It goes through all of them, so it is for changes that a person
/// makes.
pub fn wake_where(context: &Context, is_so: impl Fn(&Endpoint) -> bool) {
    let all = context.stores.endpoints.state();
    for endpoint in all.iter().filter(|endpoint| is_so(endpoint)) {
        context.hub.triggers.endpoint(&name_of(endpoint));
    }
}

/// Wakes the scaled endpoints and the bouncers of a network whose VPC is another one now, or none: their rows are
/// others. A bouncer may have been made before the network had any.
pub fn wake_members(context: &Context, network: &str) {
    for name in &context.index.roles_of(RoleKind::Bouncer, network) {
        context.hub.triggers.role(RoleKind::Bouncer, name);
    }
    let services: Vec<EndpointName> = context
        .hub
        .read(|world| world.services_of_network(network).cloned().collect());
    for name in &services {
        context.hub.triggers.endpoint(name);
    }
}

/// Wakes the scaled Endpoint of a Service.
pub fn wake_service(namespace: &str, service: &str, context: &Context) {
    let known = ObjectRef::<Service>::new(service).within(namespace);
    if let Some(service) = context.stores.services.get(&known) {
        let name = (namespace.to_owned(), service.endpoint_name());
        context.hub.triggers.endpoint(&name);
    }
}

/// Wakes the Services of a namespace, which may name another network now, or be let into one.
pub fn wake_services_of(namespace: &str, context: &Context) {
    for service in context.slices.services_of(namespace) {
        context.hub.triggers.service(namespace, &service);
        wake_service(namespace, &service, context);
    }
}

/// Wakes all droplets: they may get their endpoints now, or lose them.
pub fn wake_hosts(context: &Context) {
    for droplet in context.stores.droplets.state() {
        let name = droplet.name_any();
        context.hub.triggers.droplet(&name);
        context
            .hub
            .triggers
            .endpoint(&(system_namespace().to_owned(), name));
    }
}
