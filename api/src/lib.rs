//! Objects of Thuban (group `thuban.dev`, version `v1alpha1`), their newtypes and conditions. No I/O.
//!
//! Rules that one object can state about itself are CEL in the CRD; rules across objects are the operator's.

// Each column of a kind is an attribute of its own.
#![allow(clippy::duplicated_attributes)]

pub mod bouncer;
pub mod cidr;
pub mod claim;
pub mod condition;
pub mod divider;
pub mod droplet;
pub mod endpoint;
pub mod identifiers;
pub mod network;
pub mod phase;
pub mod vpc;

pub use bouncer::{Bouncer, BouncerSpec, RoleStatus};
pub use claim::{IpClaim, IpClaimSpec, IpClaimStatus, VniClaim, VniClaimSpec, VniClaimStatus};
pub use condition::{Condition, ConditionStatus};
pub use divider::{Divider, DividerSpec};
pub use droplet::{Droplet, DropletSpec, DropletStatus};
pub use endpoint::{Endpoint, EndpointSpec, EndpointStatus, EndpointType, PodRef, ServiceRef};
pub use network::{BouncerAutoscale, Network, NetworkSpec, NetworkStatus};
pub use phase::Phase;
pub use vpc::{DividerAutoscale, Vpc, VpcSpec, VpcStatus};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

pub const GROUP: &str = "thuban.dev";
/// UDP port of Geneve (RFC 8926) between droplets; nobody else uses it there.
pub const OVERLAY_PORT: u16 = 6081;
/// Finalizer of every object that must be taken out of droplets before it goes.
pub const FINALIZER: &str = "thuban.dev/rows";
/// Annotation of pods, Services and namespaces: the network of the pod or Service.
pub const NETWORK_ANNOTATION: &str = "thuban.dev/network";
/// Annotation of pods: their addresses, at most one of each family, separated by a comma.
pub const IP_ANNOTATION: &str = "thuban.dev/ip";
/// Annotation of Services: addresses in their network that they have besides, at most one of each family, separated by a
/// comma.
pub const SERVICE_IP_ANNOTATION: &str = "thuban.dev/service-ip";
/// Annotation of pods: their MAC address.
pub const MAC_ANNOTATION: &str = "thuban.dev/mac";
/// Annotation of pods: the Endpoint of their namespace that they have while they run, made by a user.
pub const ENDPOINT_ANNOTATION: &str = "thuban.dev/endpoint";
/// Name of the VPC and of the network for pods that name none.
pub const DEFAULT_NAME: &str = "default";
/// Namespace of the operator, transitd and their Leases.
pub const SYSTEM_NAMESPACE: &str = "thuban-system";
/// Namespace of the droplets' heartbeat Leases.
pub const HEARTBEAT_NAMESPACE: &str = "thuban-heartbeats";
/// Lease of the leading operator, with the two annotations below.
pub const OPERATOR_LEASE: &str = "thuban-operator";
/// `host:port` of the leading operator's stream server.
pub const ADDRESS_ANNOTATION: &str = "thuban.dev/address";
/// PEM bundle that verifies it.
pub const CA_BUNDLE_ANNOTATION: &str = "thuban.dev/ca-bundle";

/// All CRDs, in the order of installation.
pub fn crds() -> Vec<CustomResourceDefinition> {
    vec![
        Vpc::crd(),
        Network::crd(),
        Endpoint::crd(),
        Divider::crd(),
        Bouncer::crd(),
        Droplet::crd(),
        IpClaim::crd(),
        VniClaim::crd(),
    ]
}
