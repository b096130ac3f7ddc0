//! IpPool: addresses for load balancers, and the terms of their leases.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// The addresses, who may use them, and the terms of their leases.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "IpPool",
    doc = "Addresses that cidrd leases to load balancers.",
    plural = "ippools",
    shortname = "ipp",
    status = "IpPoolStatus",
    printcolumn(name = "Class", type_ = "string", json_path = ".spec.class"),
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "Ranges", type_ = "string", json_path = ".status.ranges"),
    printcolumn(name = "Announce", type_ = "string", json_path = ".spec.announce"),
    printcolumn(name = "Driver", type_ = "string", json_path = ".spec.driver", priority = 1),
    printcolumn(name = "Leased", type_ = "integer", json_path = ".status.leased"),
    printcolumn(name = "Free", type_ = "integer", json_path = ".status.free"),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Accepted')].status"
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
    validation = Rule::new("self.spec.class == oldSelf.spec.class && self.spec.vpc == oldSelf.spec.vpc")
        .message("spec.class and spec.vpc can't be changed: make another IpPool"),
    validation = Rule::new("(self.spec.class == 'private') == (self.spec.vpc != '')")
        .message("spec.vpc must name the VPC of a private pool, and be empty for a public one"),
    validation = Rule::new("self.spec.announce == oldSelf.spec.announce")
        .message("spec.announce can't be changed: make another IpPool"),
    validation = Rule::new("self.spec.class == 'public' || self.spec.announce == 'BGP'")
        .message("spec.announce must be BGP for a private pool: nobody outside reaches its addresses"),
    validation = Rule::new("self.spec.driver == oldSelf.spec.driver")
        .message("spec.driver can't be changed: make another IpPool"),
    validation = Rule::new("self.spec.class == 'public' || self.spec.driver == 'Xdp'")
        .message("spec.driver must be Xdp for a private pool: HAProxy serves clients outside alone")
)]
#[serde(rename_all = "camelCase")]
pub struct IpPoolSpec {
    /// Who reaches the addresses. `public`: clients outside of the cluster, and all that reach these. `private`: the
    /// pods of one VPC.
    pub class: PoolClass,
    /// The name of the VPC that a private pool belongs to. Empty for a public pool.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub vpc: String,
    /// The ranges of addresses: 1 to 16 networks in CIDR notation, without host bits.
    /// All addresses of a range are leased, its first and its last one too. For single addresses use /32 or /128.
    /// If a range is removed, its leases stay until they are released.
    #[x_kube(
        validation = Rule::new("self.size() >= 1 && self.size() <= 16").message("spec.cidrs must have 1 to 16 ranges"),
        validation = Rule::new("self.all(c, isCIDR(c) && cidr(c).masked() == cidr(c))")
            .message("spec.cidrs must be networks without host bits, such as 203.0.113.0/24 or 2001:db8:7::/120"),
        validation = Rule::new("self.size() > 16 || self.all(c, self.filter(d, isCIDR(c) && isCIDR(d) && cidr(c).containsCIDR(d)).size() <= 1)")
            .message("spec.cidrs has a range twice, or one within another: keep the larger one alone")
    )]
    #[schemars(length(max = 16), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    /// The seconds for which a lease is valid without a renewal, 600 to 31536000. Default: 86400, one day.
    /// A change is for later leases.
    #[serde(default = "default_lease_seconds")]
    #[schemars(range(min = 600, max = 31_536_000))]
    pub lease_seconds: u32,
    /// The seconds for which a released address is leased to nobody else, 1 to 604800. Default: 300.
    /// A change is for later leases.
    #[serde(default = "default_quarantine_seconds")]
    #[schemars(range(min = 1, max = 604_800))]
    pub quarantine_seconds: u32,
    /// How clients outside find the node of an address. `BGP`: nodes tell routers. `L2`: the addresses are of the
    /// nodes' own subnet, and one node at a time answers ARP and neighbour discovery for an address.
    /// It can't be changed. Default: `BGP`.
    #[serde(default)]
    pub announce: AnnounceBy,
    /// What takes the connections of clients outside. `Xdp`: the programs and rules of nodes send packets on to
    /// backends. `Haproxy`: HAProxy on the nodes ends the connections and opens others to backends. HAProxy takes TCP
    /// alone, and only Vips that name the pool get its addresses. It can't be changed. Default: `Xdp`.
    #[serde(default)]
    pub driver: PoolDriver,
    /// A selector of the namespaces that may lease addresses of the pool.
    /// Without this field, no namespace may. `{}` admits all.
    /// When a namespace is no longer admitted, its leases stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
}

fn default_lease_seconds() -> u32 {
    86_400
}

fn default_quarantine_seconds() -> u32 {
    300
}

/// Who reaches the addresses of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PoolClass {
    Public,
    Private,
}

/// How clients outside find the node of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum AnnounceBy {
    #[default]
    #[serde(rename = "BGP")]
    Bgp,
    L2,
}

/// What takes the connections of clients outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PoolDriver {
    #[default]
    Xdp,
    Haproxy,
}

impl PoolDriver {
    pub fn is_xdp(&self) -> bool {
        *self == Self::Xdp
    }
}

/// How many addresses are in use. Only cidrd writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IpPoolStatus {
    /// The ranges of the spec as one text, such as `203.0.113.0/24, 2001:db8:7::/120`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ranges: String,
    /// The number of addresses in the ranges, at most 2^53.
    pub size: u64,
    /// How many addresses are leased.
    pub leased: u64,
    /// How many released addresses are in quarantine.
    pub quarantined: u64,
    /// How many addresses can be leased now.
    pub free: u64,
    /// `Accepted`: addresses of the pool can be leased; if not, the message says why.
    pub conditions: Vec<Condition>,
    /// The latest `metadata.generation` that cidrd has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}
