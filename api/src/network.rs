//! Network: a subnet of a VPC.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev", version = "v1alpha1", kind = "Network", plural = "networks", shortname = "net",
    status = "NetworkStatus",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "CIDRs", type_ = "string", json_path = ".spec.cidrs"),
    printcolumn(name = "Allocated", type_ = "integer", json_path = ".status.allocated"),
    printcolumn(name = "Capacity", type_ = "integer", json_path = ".status.capacity"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.status=='False')].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')")
        .message("metadata.name must be a DNS label: at most 63 of a-z, 0-9 and -"),
    validation = Rule::new("!has(self.status) || !has(self.status.cidrs) || self.status.cidrs.size() == 0 || self.spec.cidrs[0] == self.status.cidrs[0] && self.status.cidrs.all(c, c in self.spec.cidrs)")
        .message("spec.cidrs may only be appended to: ranges in force (status.cidrs) can not be taken away"),
    validation = Rule::new("!has(self.spec.autoscale) || self.spec.autoscale.maxBouncers >= self.spec.bouncers")
        .message("spec.autoscale.maxBouncers must be at least spec.bouncers, the least number: raise it, or lower spec.bouncers")
)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// The VPC; never changes.
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.vpc is immutable: delete the Network and make it again in the other VPC"))]
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    /// Ranges within the VPC's: networks without host bits, at most 8; only appended. The first one is IPv4; endpoints
    /// that are created while there is an IPv6 range get an address of both families.
    #[x_kube(
        validation = Rule::new("self.size() >= 1 && self.size() <= 8").message("spec.cidrs must have 1 to 8 ranges"),
        validation = Rule::new("self.all(c, isCIDR(c) && cidr(c).masked() == cidr(c) && (cidr(c).ip().family() == 4 ? cidr(c).prefixLength() <= 30 : cidr(c).prefixLength() >= 64 && cidr(c).prefixLength() <= 120))")
            .message("spec.cidrs must be networks without host bits: IPv4 of /30 or larger, such as 10.0.1.0/24, or IPv6 of /64 to /120, such as fd00:0:0:1::/64"),
        validation = Rule::new("self.size() == 0 || !isCIDR(self[0]) || cidr(self[0]).ip().family() == 4")
            .message("spec.cidrs must begin with an IPv4 range, which every network needs; put IPv6 ranges after it"),
        validation = Rule::new("self.size() > 8 || self.all(c, self.filter(d, isCIDR(c) && isCIDR(d) && cidr(c).containsCIDR(d)).size() <= 1)")
            .message("spec.cidrs has a range twice, or one within another: keep the larger one alone")
    )]
    #[schemars(length(max = 8), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    /// How many bouncers serve the network; the least, with `autoscale`.
    #[serde(default = "crate::vpc::default_roles")]
    #[schemars(range(min = 1, max = 8))]
    pub bouncers: u32,
    /// Lets the operator add bouncers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscale: Option<BouncerAutoscale>,
    /// Namespaces whose pods may enter, if the VPC admits them too: none admits nobody, `{}` admits all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
    /// Whether pods and endpoints may ask for addresses of their choice.
    #[serde(default, rename = "allowStaticIPs")]
    pub allow_static_ips: bool,
}

/// When a network gets more bouncers than `bouncers`: at once by need, fewer again after five minutes without need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BouncerAutoscale {
    /// The most.
    #[schemars(range(min = 1, max = 8))]
    pub max_bouncers: u32,
    /// Endpoints for each bouncer.
    #[serde(default = "endpoints_per_bouncer")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub endpoints_per_bouncer: u32,
    /// Packets a second that a bouncer of the network may pass on, as its droplet reports.
    #[serde(default = "crate::vpc::packets_per_second")]
    #[schemars(range(min = 1, max = 100_000_000))]
    pub packets_per_second: u32,
}

fn endpoints_per_bouncer() -> u32 {
    2000
}

/// Written by the operator alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkStatus {
    pub phase: Phase,
    /// Ranges in force: those of the spec, as they last passed the checks.
    #[schemars(length(max = 8), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    /// IPv4 addresses that endpoints can have; IPv6 ranges are not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// IPv4 addresses claimed, resting ones included; written at most once a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// How many bouncers there should be now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bouncers: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    pub conditions: Vec<Condition>,
}
