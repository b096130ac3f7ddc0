//! Objects of Thuban (group `thuban.dev`, version `v1alpha1`), their newtypes and conditions. No I/O.
//!
//! Rules that one object can state about itself are CEL in the CRD; rules across objects are the operator's.

// Each column of a kind is an attribute of its own.
#![allow(clippy::duplicated_attributes)]

pub mod bandwidth;
pub mod bgp_peer;
pub mod bouncer;
pub mod cidr;
pub mod claim;
pub mod cluster_dns;
pub mod cluster_network_policy;
pub mod condition;
pub mod divider;
pub mod dns_zone;
pub mod droplet;
pub mod dscp;
pub mod endpoint;
pub mod health_check;
pub mod identifiers;
pub mod ip_lease;
pub mod ip_pool;
pub mod network;
pub mod path_trace;
pub mod phase;
pub mod policy_state;
pub mod proxies;
pub mod reasons;
mod reference;
pub mod refused_ranges;
pub mod routes;
pub mod vip;
pub mod vip_profile;
pub mod vpc;

pub use bandwidth::{BitRate, BitRateError, NetworkBandwidth, VpcBandwidth};
pub use bgp_peer::{BgpPeer, BgpPeerSpec};
pub use bouncer::{Bouncer, BouncerSpec, RoleStatus};
pub use claim::{IpClaim, IpClaimSpec, IpClaimStatus, VniClaim, VniClaimSpec, VniClaimStatus};
pub use cluster_network_policy::{ClusterNetworkPolicy, ClusterNetworkPolicySpec};
pub use condition::{Condition, ConditionStatus};
pub use divider::{Divider, DividerSpec};
pub use dns_zone::{DnsZone, DnsZoneSpec, DnsZoneStatus, DynamicUpdates, EtcdRecords, ZoneNames};
pub use droplet::{Droplet, DropletSpec, DropletStatus};
pub use dscp::Dscp;
pub use endpoint::{Endpoint, EndpointSpec, EndpointStatus, EndpointType, PodRef, ServiceRef};
pub use health_check::{HEALTH_CHECK_ANNOTATION, HealthCheck, HealthCheckType};
pub use ip_lease::{IpLease, IpLeaseSpec, IpLeaseStatus, LeaseHolder, LeaseState};
pub use ip_pool::{AnnounceBy, IpPool, IpPoolSpec, IpPoolStatus, PoolClass, PoolDriver};
pub use network::{BouncerAutoscale, Network, NetworkSpec, NetworkStatus};
pub use path_trace::{
    PathHop, PathObject, PathProtocol, PathSource, PathStep, PathStepState, PathTarget, PathTrace,
    PathTraceSpec, PathTraceStatus, PathVerdict,
};
pub use phase::Phase;
pub use policy_state::{
    Denied, DeniedPeer, PacketDirection, PolicyState, PolicyStateSpec, PolicyStateStatus,
};
pub use vip::{
    Announcer, IpFamily, MAX_VIP_MEMBERS, MemberState, Vip, VipDns, VipMember, VipMode, VipPort, VipProtocol,
    VipSpec, VipStatus,
};
pub use vip_profile::{ClientLimits, ProxyProtocol, TlsVersion, VipProfile, VipProfileSpec, VipSsl};
pub use vpc::{DeniedTraffic, DividerAutoscale, Vpc, VpcSpec, VpcStatus};

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::env;
use std::sync::LazyLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceDefinitionVersion, JSON,
};
use kube::CustomResourceExt;

pub const GROUP: &str = "thuban.dev";
/// UDP port of Geneve (RFC 8926) between droplets; nothing else uses the port there.
pub const OVERLAY_PORT: u16 = 6081;
/// Finalizer of every object that must be taken out of droplets before it goes.
pub const FINALIZER: &str = "thuban.dev/rows";
/// Annotation of pods, Services and namespaces: the network of the pod or Service.
pub const NETWORK_ANNOTATION: &str = "thuban.dev/network";
/// Annotation of pods: their addresses, at most one of each family, separated by a comma.
pub const IP_ANNOTATION: &str = "thuban.dev/ip";
/// Condition of Services that lbaasd sets: their load balancer's addresses are fronts, whose packets droplets take at
/// their NICs.
pub const FRONT_CONDITION: &str = "thuban.dev/Front";
/// Annotation of Services: their additional addresses in their network, at most one of each family, separated by a
/// comma.
pub const SERVICE_IP_ANNOTATION: &str = "thuban.dev/service-ip";
/// Annotation of Services: the IpPool of their load balancer's addresses.
pub const IP_POOL_ANNOTATION: &str = "thuban.dev/ip-pool";
/// Annotation of Services: the addresses that their load balancer wants, at most one of each family, separated by a
/// comma.
pub const LOAD_BALANCER_IPS_ANNOTATION: &str = "thuban.dev/load-balancer-ips";
/// Annotation of Services: how clients outside reach the load balancer's backends, `Dsr`, `Tunnel` or `Node`.
pub const LOAD_BALANCER_MODE_ANNOTATION: &str = "thuban.dev/load-balancer-mode";
/// The mode `Dsr`, also as the reason of [`FRONT_CONDITION`]: answers leave from the backends' nodes.
pub const DSR_MODE: &str = "Dsr";
/// The mode `Tunnel`, also as the reason of [`FRONT_CONDITION`]: answers leave from the nodes that take the clients'
/// packets.
pub const TUNNEL_MODE: &str = "Tunnel";
/// The mode `Node`: nodes' own stacks serve the addresses.
pub const NODE_MODE: &str = "Node";
/// Annotation of Services: the name of their load balancer's addresses in DNS.
pub const DNS_NAME_ANNOTATION: &str = "thuban.dev/dns-name";
/// Annotation of Services: the seconds for which clients are still answered after the name is gone.
pub const DRAIN_SECONDS_ANNOTATION: &str = "thuban.dev/drain-seconds";
/// Label of Services that a Vip has, and of their EndpointSlices: what serves the Vip's addresses in place of nodes.
pub const DRIVER_LABEL: &str = "thuban.dev/driver";
/// Annotation of pods: their MAC address.
pub const MAC_ANNOTATION: &str = "thuban.dev/mac";
/// Annotation of pods: the rate at which they may send, a quantity of bits per second.
pub const EGRESS_BANDWIDTH_ANNOTATION: &str = "kubernetes.io/egress-bandwidth";
/// Annotation of pods: the rate at which they may receive, a quantity of bits per second.
pub const INGRESS_BANDWIDTH_ANNOTATION: &str = "kubernetes.io/ingress-bandwidth";
/// Annotation of pods: the Endpoint of their namespace that they have while they run, made by a user.
pub const ENDPOINT_ANNOTATION: &str = "thuban.dev/endpoint";
/// Annotation of NetworkPolicies and ClusterNetworkPolicies: `true` has the policy's PolicyState show what it denies.
pub const REPORT_DENIED_ANNOTATION: &str = "thuban.dev/report-denied";
/// Name of the VPC and of the network for pods that name none.
pub const DEFAULT_NAME: &str = "default";
/// Number of dividers of a VPC, and of bouncers of a network, whose spec gives none: one may die.
pub const DEFAULT_ROLES: u32 = 2;
/// Namespace of Thuban's own processes where nothing else is said.
pub const SYSTEM_NAMESPACE: &str = "thuban-system";
/// Namespace of the heartbeat Leases that droplets had once. It goes with the next version.
pub const HEARTBEAT_NAMESPACE: &str = "thuban-heartbeats";
/// Lease of the leading operator, with the three annotations below.
pub const OPERATOR_LEASE: &str = "thuban-operator";
/// Annotation with the `host:port` of the leading operator's stream server.
pub const ADDRESS_ANNOTATION: &str = "thuban.dev/address";
/// Annotation with the version of the leading operator.
pub const VERSION_ANNOTATION: &str = "thuban.dev/version";
/// Annotation with the PEM bundle that verifies the server.
pub const CA_BUNDLE_ANNOTATION: &str = "thuban.dev/ca-bundle";

/// Returns the CRDs of load balancers.
pub fn load_balancer_crds() -> Vec<CustomResourceDefinition> {
    finish(vec![
        IpPool::crd(),
        IpLease::crd(),
        Vip::crd(),
        VipProfile::crd(),
        BgpPeer::crd(),
        DnsZone::crd(),
    ])
}

/// Returns all CRDs, in the order of installation.
pub fn crds() -> Vec<CustomResourceDefinition> {
    let mut crds = finish(vec![
        Vpc::crd(),
        Network::crd(),
        Endpoint::crd(),
        Divider::crd(),
        Bouncer::crd(),
        Droplet::crd(),
        IpClaim::crd(),
        VniClaim::crd(),
        PolicyState::crd(),
        PathTrace::crd(),
    ]);
    for version in crds.iter_mut().flat_map(|crd| &mut crd.spec.versions) {
        default_phase(version);
    }
    crds
}

/// Kinds that only processes of Thuban write and read.
const BOOKS: [&str; 3] = ["IpClaim", "VniClaim", "IpLease"];

/// Adds what all kinds have in common: the category `thuban`, conditions that are merged by their types, and that
/// objects of tenants outlive a removal of the chart.
fn finish(mut crds: Vec<CustomResourceDefinition>) -> Vec<CustomResourceDefinition> {
    for crd in &mut crds {
        let annotations = crd.metadata.annotations.get_or_insert_default();
        annotations.insert("helm.sh/resource-policy".to_owned(), "keep".to_owned());
        if !BOOKS.contains(&crd.spec.names.kind.as_str()) {
            crd.spec.names.categories = Some(vec!["thuban".to_owned()]);
        }
        for version in &mut crd.spec.versions {
            merge_conditions_by_type(version);
        }
    }
    crds
}

fn merge_conditions_by_type(version: &mut CustomResourceDefinitionVersion) -> Option<()> {
    let schema = version.schema.as_mut()?.open_api_v3_schema.as_mut()?;
    let status = schema.properties.as_mut()?.get_mut("status")?;
    let conditions = status.properties.as_mut()?.get_mut("conditions")?;
    conditions.x_kubernetes_list_type = Some("map".to_owned());
    conditions.x_kubernetes_list_map_keys = Some(vec!["type".to_owned()]);
    Some(())
}

/// Makes an object without a status show the phase Init. The API server fills this in when it reads the object, so it
/// costs no write.
fn default_phase(version: &mut CustomResourceDefinitionVersion) -> Option<()> {
    let schema = version.schema.as_mut()?.open_api_v3_schema.as_mut()?;
    let status = schema.properties.as_mut()?.get_mut("status")?;
    status.properties.as_ref()?.get("phase")?;
    status.default = Some(JSON(serde_json::json!({"phase": Phase::default()})));
    Some(())
}

/// Returns the namespace of the operator, transitd and their Leases: that of the process's own pod, which its manifest
/// writes into `THUBAN_NAMESPACE`.
pub fn system_namespace() -> &'static str {
    static NAMESPACE: LazyLock<String> =
        LazyLock::new(|| env::var("THUBAN_NAMESPACE").unwrap_or_else(|_| SYSTEM_NAMESPACE.to_owned()));
    &NAMESPACE
}

/// Returns the manifests that are generated: their paths within the repository, and their texts.
pub fn manifests() -> Result<BTreeMap<String, String>, serde_yaml_ng::Error> {
    let mut made = BTreeMap::new();
    for (file, crds, condition) in [
        ("10-crds.yaml", crds(), ".Values.crds.install"),
        (
            "load-balancers/10-crds.yaml",
            load_balancer_crds(),
            "and .Values.crds.install .Values.loadBalancers.enabled",
        ),
    ] {
        let text = manifest(&crds)?;
        let template = format!("{{{{- if {condition} }}}}\n{text}{{{{- end }}}}\n");
        made.insert(format!("install/{file}"), text);
        made.insert(format!("charts/thuban/templates/{file}"), template);
    }
    let all: Vec<_> = crds().into_iter().chain(load_balancer_crds()).collect();
    made.insert("docs/api.md".to_owned(), reference::page(&all));
    made.insert("docs/reasons.md".to_owned(), reasons::page());
    Ok(made)
}

fn manifest(crds: &[CustomResourceDefinition]) -> Result<String, serde_yaml_ng::Error> {
    let mut manifest = "# Generated by `cargo xtask crds` from api/; do not edit.\n".to_owned();
    for crd in crds {
        manifest += "---\n";
        for line in serde_yaml_ng::to_string(crd)?.lines() {
            manifest += &quoted(line);
            manifest += "\n";
        }
    }
    Ok(manifest)
}

/// Quotes the item of a list that kubectl, which reads YAML 1.1, takes for true or false.
fn quoted(line: &str) -> Cow<'_, str> {
    const BOOLEANS: [&str; 6] = ["y", "yes", "on", "n", "no", "off"];
    match line.trim_start().strip_prefix("- ") {
        Some(item) if BOOLEANS.contains(&item.to_lowercase().as_str()) => {
            let indent = " ".repeat(line.len().saturating_sub(item.len() + 2));
            Cow::Owned(format!("{indent}- \"{item}\""))
        }
        _ => Cow::Borrowed(line),
    }
}
