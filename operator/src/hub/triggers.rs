//! Wakes objects: there is a trigger for each controller.

use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::reflector::{Lookup, ObjectRef};
use thuban_api::{
    Bouncer, ClusterNetworkPolicy, Divider, Droplet, Endpoint, IpClaim, Network, PathTrace, VniClaim, Vpc,
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::model::cached::{NetworkPolicy, Pod};
use crate::model::service::Service;
use crate::model::world::{EndpointName, RoleKind};

/// An object that waits for a droplet's ack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Waiter {
    Vpc(String),
    Network(String),
    Role(RoleKind, String),
    Endpoint(EndpointName),
    IpClaim(String),
    VniClaim(String),
}

/// Wakes objects of one kind. Nothing happens while nobody listens, or if the operator is stopping.
#[derive(Clone)]
pub struct Trigger<K: Lookup>(UnboundedSender<ObjectRef<K>>);

impl<K: Lookup> Default for Trigger<K> {
    fn default() -> Self {
        Self(unbounded_channel().0)
    }
}

impl<K: Lookup> Trigger<K> {
    /// Returns the references of all objects that are woken from now on. Only the latest listener gets them.
    pub fn listen(&mut self) -> UnboundedReceiver<ObjectRef<K>> {
        let (sender, woken) = unbounded_channel();
        self.0 = sender;
        woken
    }

    pub fn wake(&self, object: ObjectRef<K>) {
        let _ = self.0.send(object);
    }
}

/// One trigger for each controller.
#[derive(Default)]
pub struct Triggers {
    pub vpcs: Trigger<Vpc>,
    pub networks: Trigger<Network>,
    pub dividers: Trigger<Divider>,
    pub bouncers: Trigger<Bouncer>,
    pub droplets: Trigger<Droplet>,
    pub endpoints: Trigger<Endpoint>,
    pub pods: Trigger<Pod>,
    pub claims: Trigger<IpClaim>,
    pub vni_claims: Trigger<VniClaim>,
    pub services: Trigger<Service>,
    pub service_cidrs: Trigger<ServiceCIDR>,
    pub network_policies: Trigger<NetworkPolicy>,
    pub cluster_policies: Trigger<ClusterNetworkPolicy>,
    pub path_traces: Trigger<PathTrace>,
}

impl Triggers {
    pub fn vpc(&self, name: &str) {
        self.vpcs.wake(ObjectRef::new(name));
    }

    pub fn network(&self, name: &str) {
        self.networks.wake(ObjectRef::new(name));
    }

    pub fn role(&self, kind: RoleKind, name: &str) {
        match kind {
            RoleKind::Divider => self.dividers.wake(ObjectRef::new(name)),
            RoleKind::Bouncer => self.bouncers.wake(ObjectRef::new(name)),
        }
    }

    pub fn droplet(&self, name: &str) {
        self.droplets.wake(ObjectRef::new(name));
    }

    pub fn endpoint(&self, (namespace, name): &EndpointName) {
        self.endpoints.wake(ObjectRef::new(name).within(namespace));
    }

    pub fn pod(&self, namespace: &str, name: &str) {
        self.pods.wake(ObjectRef::new(name).within(namespace));
    }

    pub fn service(&self, namespace: &str, name: &str) {
        self.services.wake(ObjectRef::new(name).within(namespace));
    }

    pub fn service_cidr(&self, name: &str) {
        self.service_cidrs.wake(ObjectRef::new(name));
    }

    pub fn network_policy(&self, namespace: &str, name: &str) {
        self.network_policies.wake(ObjectRef::new(name).within(namespace));
    }

    pub fn cluster_policy(&self, name: &str) {
        self.cluster_policies.wake(ObjectRef::new(name));
    }

    pub fn path_trace(&self, namespace: &str, name: &str) {
        self.path_traces.wake(ObjectRef::new(name).within(namespace));
    }

    pub(super) fn waiter(&self, waiter: &Waiter) {
        match waiter {
            Waiter::Vpc(name) => self.vpc(name),
            Waiter::Network(name) => self.network(name),
            Waiter::Role(kind, name) => self.role(*kind, name),
            Waiter::Endpoint(name) => self.endpoint(name),
            Waiter::IpClaim(name) => self.claims.wake(ObjectRef::new(name)),
            Waiter::VniClaim(name) => self.vni_claims.wake(ObjectRef::new(name)),
        }
    }
}
