//! Wakes objects: there is a sender of references for each controller.

use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::reflector::ObjectRef;
use thuban_api::{
    Bouncer, ClusterNetworkPolicy, Divider, Droplet, Endpoint, IpClaim, Network, VniClaim, Vpc,
};
use tokio::sync::mpsc::UnboundedSender;

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

/// One sender of references for each controller. A closed channel means that the operator is stopping.
#[derive(Clone, Debug)]
pub struct Triggers {
    pub vpcs: UnboundedSender<ObjectRef<Vpc>>,
    pub networks: UnboundedSender<ObjectRef<Network>>,
    pub dividers: UnboundedSender<ObjectRef<Divider>>,
    pub bouncers: UnboundedSender<ObjectRef<Bouncer>>,
    pub droplets: UnboundedSender<ObjectRef<Droplet>>,
    pub endpoints: UnboundedSender<ObjectRef<Endpoint>>,
    pub pods: UnboundedSender<ObjectRef<Pod>>,
    pub claims: UnboundedSender<ObjectRef<IpClaim>>,
    pub vni_claims: UnboundedSender<ObjectRef<VniClaim>>,
    pub services: UnboundedSender<ObjectRef<Service>>,
    pub service_cidrs: UnboundedSender<ObjectRef<ServiceCIDR>>,
    pub network_policies: UnboundedSender<ObjectRef<NetworkPolicy>>,
    pub cluster_policies: UnboundedSender<ObjectRef<ClusterNetworkPolicy>>,
}

impl Triggers {
    pub fn vpc(&self, name: &str) {
        let _ = self.vpcs.send(ObjectRef::new(name));
    }

    pub fn network(&self, name: &str) {
        let _ = self.networks.send(ObjectRef::new(name));
    }

    pub fn role(&self, kind: RoleKind, name: &str) {
        match kind {
            RoleKind::Divider => drop(self.dividers.send(ObjectRef::new(name))),
            RoleKind::Bouncer => drop(self.bouncers.send(ObjectRef::new(name))),
        }
    }

    pub fn droplet(&self, name: &str) {
        let _ = self.droplets.send(ObjectRef::new(name));
    }

    pub fn endpoint(&self, (namespace, name): &EndpointName) {
        let _ = self.endpoints.send(ObjectRef::new(name).within(namespace));
    }

    pub fn pod(&self, namespace: &str, name: &str) {
        let _ = self.pods.send(ObjectRef::new(name).within(namespace));
    }

    pub fn service(&self, namespace: &str, name: &str) {
        let _ = self.services.send(ObjectRef::new(name).within(namespace));
    }

    pub fn service_cidr(&self, name: &str) {
        let _ = self.service_cidrs.send(ObjectRef::new(name));
    }

    pub fn network_policy(&self, namespace: &str, name: &str) {
        let _ = self.network_policies.send(ObjectRef::new(name).within(namespace));
    }

    pub fn cluster_policy(&self, name: &str) {
        let _ = self.cluster_policies.send(ObjectRef::new(name));
    }

    pub(super) fn waiter(&self, waiter: &Waiter) {
        match waiter {
            Waiter::Vpc(name) => self.vpc(name),
            Waiter::Network(name) => self.network(name),
            Waiter::Role(kind, name) => self.role(*kind, name),
            Waiter::Endpoint(name) => self.endpoint(name),
            Waiter::IpClaim(name) => drop(self.claims.send(ObjectRef::new(name))),
            Waiter::VniClaim(name) => drop(self.vni_claims.send(ObjectRef::new(name))),
        }
    }
}
