//! The objects of all kinds, as the watches brought them.

use k8s_openapi::api::core::v1::{Namespace, Node};
use k8s_openapi::api::networking::v1::ServiceCIDR;
use kube::runtime::reflector::Store;
use thuban_api::{
    Bouncer, ClusterNetworkPolicy, Divider, Droplet, Endpoint, IpClaim, Network, PolicyState, VniClaim, Vpc,
};

use crate::model::cached::{NetworkPolicy, Pod};
use crate::model::service::{EndpointSlice, Service};

/// Caches of all kinds that reconcilers read.
pub struct Stores {
    pub pods: Store<Pod>,
    pub namespaces: Store<Namespace>,
    pub nodes: Store<Node>,
    pub vpcs: Store<Vpc>,
    pub networks: Store<Network>,
    pub endpoints: Store<Endpoint>,
    pub dividers: Store<Divider>,
    pub bouncers: Store<Bouncer>,
    pub droplets: Store<Droplet>,
    pub ip_claims: Store<IpClaim>,
    pub vni_claims: Store<VniClaim>,
    pub services: Store<Service>,
    pub slices: Store<EndpointSlice>,
    pub service_cidrs: Store<ServiceCIDR>,
    pub network_policies: Store<NetworkPolicy>,
    pub cluster_policies: Store<ClusterNetworkPolicy>,
    pub policy_states: Store<PolicyState>,
}
