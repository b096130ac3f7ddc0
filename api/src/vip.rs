//! Vip: an address of a Service outside of its VPC.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// The Service, and which addresses it wants.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Vip",
    doc = "The leased addresses of a load balancer, and who announces them. lbaasd makes a Vip for each Service of type LoadBalancer and class thuban.dev/vip.",
    plural = "vips",
    namespaced,
    status = "VipStatus",
    printcolumn(name = "Service", type_ = "string", json_path = ".spec.service"),
    printcolumn(name = "Addresses", type_ = "string", json_path = ".status.addresses"),
    printcolumn(name = "Pool", type_ = "string", json_path = ".status.pool"),
    printcolumn(name = "Announced by", type_ = "string", json_path = ".status.announcedBy"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.status=='False')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("self.metadata.name.size() <= 63").message("metadata.name must have at most 63 characters")
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
    /// The name of the IpPool that the addresses are from. Empty: the first public pool, in the order of names, that
    /// admits the namespace and has free addresses. It can't be changed.
    #[serde(default)]
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.pool can't be changed: make another Vip"))]
    #[schemars(length(max = 63))]
    pub pool: String,
    /// The families of which the Vip has one address each. Families can be added.
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
}

/// The family of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
pub enum IpFamily {
    #[serde(rename = "IPv4")]
    V4,
    #[serde(rename = "IPv6")]
    V6,
}

/// Which addresses the Vip has, and where they are announced. Only lbaasd writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VipStatus {
    /// The leased addresses, in the order of `spec.ipFamilies`.
    pub addresses: Vec<String>,
    /// The IpPool that they are from.
    pub pool: String,
    /// The nodes that may announce the addresses. No address is released before all of them said that they withdrew it.
    pub announcers: Vec<Announcer>,
    /// The nodes that announce the addresses.
    pub announced_by: Vec<String>,
    /// `Accepted`: there is such a Service. `Leased`: the Vip has all its addresses. `Announced`: a node announces
    /// them.
    pub conditions: Vec<Condition>,
    /// The latest `metadata.generation` that lbaasd has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// A node that may announce addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Announcer {
    pub node: String,
    /// The number of the node's request that was answered by the addresses. Only a later request says that the node
    /// withdrew them.
    pub sequence: u64,
}
