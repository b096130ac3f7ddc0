//! Vip: an address of a Service outside of its VPC.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{AnnounceBy, Condition, DSR_MODE, HealthCheck, NODE_MODE, PoolDriver, TUNNEL_MODE};

/// The Service, and which addresses it wants.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Vip",
    doc = "The leased addresses of a load balancer, its name, and who announces it. lbaasd makes a Vip for each Service of type LoadBalancer and class thuban.dev/vip. A Vip that a user makes gets such a Service of its own name.",
    plural = "vips",
    namespaced,
    status = "VipStatus",
    printcolumn(name = "Service", type_ = "string", json_path = ".spec.service"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0]"),
    printcolumn(name = "Pool", type_ = "string", json_path = ".status.pool"),
    printcolumn(name = "Name", type_ = "string", json_path = ".status.dnsName"),
    printcolumn(name = "Announce", type_ = "string", json_path = ".status.announce"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodes"),
    printcolumn(
        name = "Announced By",
        type_ = "string",
        json_path = ".status.announcedBy",
        priority = 1
    ),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.status=='False')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("self.metadata.name.size() <= 63").message("metadata.name must have at most 63 characters"),
    validation = Rule::new("!has(self.spec.healthCheck) || !has(self.spec.mode) || self.spec.mode != 'Node'")
        .message("spec.healthCheck has no effect in spec.mode Node: choose Dsr or Tunnel, or a readiness probe of the pods")
)]
#[serde(rename_all = "camelCase")]
pub struct VipSpec {
    /// The name of a Service in the same namespace. It can't be changed.
    #[x_kube(
        validation = Rule::new("self == oldSelf").message("spec.service can't be changed: make another Vip"),
        validation = Rule::new("self.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')").message("spec.service must be the name of a Service")
    )]
    #[schemars(length(min = 1, max = 63))]
    pub service: String,
    /// The name of the IpPool that the addresses are from. If it is private, only pods of its VPC reach the addresses.
    /// Empty: the first public pool, in the order of names, that
    /// admits the namespace and has free addresses. It can't be changed.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.pool can't be changed: make another Vip"))]
    #[schemars(length(max = 63))]
    pub pool: String,
    /// The families of which the Vip has one address each. Families can be added. Default: IPv4.
    #[serde(default = "default_families")]
    #[x_kube(
        validation = Rule::new("self.size() >= 1 && self.size() <= 2 && self.all(f, self.exists_one(g, f == g))")
            .message("spec.ipFamilies must have one or two different families"),
        validation = Rule::new("oldSelf.all(f, f in self)").message("spec.ipFamilies can only grow: make another Vip")
    )]
    #[schemars(length(max = 2))]
    pub ip_families: Vec<IpFamily>,
    /// Addresses of the pool that are wanted, at most one of each family. They can't be changed.
    #[serde(default, rename = "requestedIPs")]
    #[x_kube(
        validation = Rule::new("self.all(a, isIP(a) && ip.isCanonical(a))")
            .message("spec.requestedIPs must be IP addresses in their shortest form, such as 203.0.113.7 or 2001:db8:7::7"),
        validation = Rule::new("self.all(a, isIP(a)) && self.filter(a, isIP(a) && ip(a).family() == 4).size() <= 1 && self.filter(a, isIP(a) && ip(a).family() == 6).size() <= 1")
            .message("spec.requestedIPs must have at most one address of each family"),
        validation = Rule::new("self == oldSelf").message("spec.requestedIPs can't be changed: make another Vip")
    )]
    #[schemars(length(max = 2), inner(length(max = 39)))]
    pub requested_ips: Vec<String>,
    /// The ports of the Service that clients outside reach, at most 100. Empty: all of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(
        validation = Rule::new("self.all(p, self.exists_one(q, q == p))")
            .message("spec.ports has a port and protocol twice")
    )]
    #[schemars(length(max = 100))]
    pub ports: Vec<VipPort>,
    /// Names of VipProfiles of the namespace, at most 8. Of two that set the same field, the later one counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), inner(length(min = 1, max = 63)))]
    pub profiles: Vec<String>,
    /// How clients outside reach backends. `Dsr`: nodes send their packets on to any backend, which answers from its
    /// own node. `Tunnel`: the same, but answers go back by the node that got the client's packet, for underlays that
    /// check source addresses. `Node`: the node that gets a packet translates it. Default: `Dsr`.
    #[serde(default)]
    pub mode: VipMode,
    /// How the nodes of backends check them. A backend that fails gets no new connections by the Vip, as long as others
    /// are left. Without this field only readiness counts. It has no effect while the Service's externalTrafficPolicy
    /// is Local.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_check: Option<HealthCheck>,
    /// The name of the addresses in DNS. Without this field they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dns: Option<VipDns>,
    /// The seconds for which clients are still answered after the name of a deleted Vip is gone, 0 to 3600. Default: 0.
    #[serde(default)]
    #[schemars(range(max = 3600))]
    pub drain_seconds: u32,
}

fn default_families() -> Vec<IpFamily> {
    vec![IpFamily::V4]
}

/// A port of a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct VipPort {
    /// 1 to 65535.
    #[schemars(range(min = 1, max = 65_535))]
    pub port: u16,
    /// Default: TCP.
    #[serde(default)]
    pub protocol: VipProtocol,
}

/// The protocol of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum VipProtocol {
    #[default]
    Tcp,
    Udp,
    Sctp,
}

/// How clients outside reach backends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VipMode {
    #[default]
    Dsr,
    Tunnel,
    Node,
}

impl VipMode {
    /// Returns the mode as Services' annotations have it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Dsr => DSR_MODE,
            Self::Tunnel => TUNNEL_MODE,
            Self::Node => NODE_MODE,
        }
    }
}

/// The name of a Vip's addresses in DNS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VipDns {
    /// A name in the zone of a DnsZone that admits the namespace, in lower case and without a dot at its end, such as
    /// shop.red.apps.example.com.
    #[x_kube(
        validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)+$')")
            .message("spec.dns.name must be a name in lower case without a dot at its end, such as shop.red.apps.example.com")
    )]
    #[schemars(length(min = 1, max = 240))]
    pub name: String,
    /// The seconds for which resolvers keep the record, 1 to 86400. Default: that of the DnsZone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub ttl_seconds: Option<u32>,
}

/// The family of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum IpFamily {
    #[serde(rename = "IPv4")]
    V4,
    #[serde(rename = "IPv6")]
    V6,
}

/// The most members that a status lists.
pub const MAX_VIP_MEMBERS: usize = 64;

/// Which addresses the Vip has, and where they are announced. lbaasd writes it, except for the members, which the
/// operator writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VipStatus {
    /// The leased addresses, in the order of `spec.ipFamilies`.
    pub addresses: Vec<String>,
    /// The IpPool that they are from.
    pub pool: String,
    /// The VPC whose pods alone reach the addresses, if the IpPool is private.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub vpc: String,
    /// How nodes announce the addresses, as the IpPool said when they were leased. `L2`: `announcers` has one node at
    /// most.
    pub announce: AnnounceBy,
    /// What takes the connections of clients, as the IpPool said when the addresses were leased.
    #[serde(skip_serializing_if = "PoolDriver::is_xdp")]
    pub driver: PoolDriver,
    /// The nodes that may announce the addresses. No address is released before all of them said that they withdrew it.
    pub announcers: Vec<Announcer>,
    /// The nodes that announce the addresses.
    pub announced_by: Vec<String>,
    /// How many nodes these are.
    pub nodes: u32,
    /// Ready backends, those first that get no new connections, at most 64. None while nodes' own stacks serve the
    /// addresses: in the mode Node, or if the Service's externalTrafficPolicy is Local.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<VipMember>,
    /// How many ready backends there are, those that are not listed among them.
    #[serde(skip_serializing_if = "is_zero")]
    pub member_count: u32,
    /// How many of them fail their check.
    #[serde(skip_serializing_if = "is_zero")]
    pub failing_members: u32,
    /// The name in DNS that has, or may have, the addresses. The lease is released only after the name is gone.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub dns_name: String,
    /// The DnsZone whose server has the name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub dns_zone: String,
    /// The most seconds for which resolvers keep the name, or a name that the Vip had before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dns_ttl_seconds: Option<u32>,
    /// When the name of a deleted Vip went from DNS, or was found to be none, in RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name_removed_at: Option<String>,
    /// When nodes were told to withdraw the addresses of a deleted Vip, in RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub withdrawn_at: Option<String>,
    /// `Accepted`: there is such a Service. `Leased`: the Vip has all its addresses. `Announced`: a node announces
    /// them, if the IpPool is public. `DnsReady`: DNS has the name, if there is to be one. `Ready`: all of these.
    /// `Healthy`: no member fails its check, if there is to be one. `CertificateReady`: the Secret of a VipProfile's
    /// `ssl` has a certificate and its key; it is part of `Ready`, too.
    pub conditions: Vec<Condition>,
    /// The latest `metadata.generation` that lbaasd has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

impl VipStatus {
    /// Whether the addresses are from a private pool: pods of its VPC reach them, and nobody announces them.
    pub fn is_private(&self) -> bool {
        !self.vpc.is_empty()
    }
}

/// A node that may announce addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Announcer {
    /// The name of the node.
    pub node: String,
    /// The number of the node's request that was answered by the addresses. Only a later request says that the node
    /// withdrew them.
    pub sequence: u64,
}

/// A backend that Kubernetes calls ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct VipMember {
    /// The name of its Endpoint in the Vip's namespace.
    pub endpoint: String,
    /// Its address in the VPC.
    pub address: String,
    /// The droplet that it is on, and that checks it.
    pub droplet: String,
    /// `Ready`: it gets new connections. `Failing`: it fails the check. `Suspect`: its droplet is suspect. Where all
    /// members are Failing or Suspect, all get new connections.
    pub state: MemberState,
    /// Why it is not ready.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub why: String,
}

/// Whether a backend gets new connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum MemberState {
    Failing,
    Suspect,
    #[default]
    Ready,
}

#[allow(clippy::trivially_copy_pass_by_ref)] // the signature of serde
fn is_zero(number: &u32) -> bool {
    *number == 0
}
