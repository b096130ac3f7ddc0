//! Network: a subnet of a VPC.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bandwidth::NetworkBandwidth;
use crate::{Condition, Phase};

/// What the network is to be.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev", version = "v1alpha1", kind = "Network", plural = "networks", shortname = "net",
    doc = "A subnet of a VPC. Pods get their addresses from a network.",
    status = "NetworkStatus",
    selectable = ".spec.vpc",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "Ranges", type_ = "string", json_path = ".status.ranges"),
    printcolumn(name = "Allocated", type_ = "integer", json_path = ".status.allocated"),
    printcolumn(name = "Capacity", type_ = "integer", json_path = ".status.capacity"),
    printcolumn(name = "Bouncers", type_ = "integer", json_path = ".status.bouncers", priority = 1),
    printcolumn(name = "Working", type_ = "integer", json_path = ".status.workingBouncers", priority = 1),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "Deleting",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Deleting')].reason"
    ),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.status=='False')].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')")
        .message("metadata.name must be a DNS label: at most 63 of a-z, 0-9 and -"),
    validation = Rule::new("!has(self.status) || !has(self.status.cidrs) || self.status.cidrs.size() == 0 || self.spec.cidrs[0] == self.status.cidrs[0] && self.status.cidrs.all(c, c in self.spec.cidrs)")
        .message("spec.cidrs may only be appended to: ranges in force (status.cidrs) can not be taken away"),
    validation = Rule::new("!has(self.spec.autoscale) || self.spec.autoscale.maxBouncers >= self.spec.bouncers")
        .message("spec.autoscale.maxBouncers must be at least spec.bouncers, the least number: raise it, or lower spec.bouncers"),
    validation = Rule::new("!has(self.spec.bandwidth) || !has(self.spec.bandwidth.defaultEgress) || !has(self.spec.bandwidth.maxEgress) || !isQuantity(self.spec.bandwidth.defaultEgress) || !isQuantity(self.spec.bandwidth.maxEgress) || quantity(self.spec.bandwidth.defaultEgress).compareTo(quantity(self.spec.bandwidth.maxEgress)) <= 0")
        .message("spec.bandwidth.defaultEgress must be at most spec.bandwidth.maxEgress: lower it, or raise spec.bandwidth.maxEgress"),
    validation = Rule::new("!has(self.spec.bandwidth) || !has(self.spec.bandwidth.defaultIngress) || !has(self.spec.bandwidth.maxIngress) || !isQuantity(self.spec.bandwidth.defaultIngress) || !isQuantity(self.spec.bandwidth.maxIngress) || quantity(self.spec.bandwidth.defaultIngress).compareTo(quantity(self.spec.bandwidth.maxIngress)) <= 0")
        .message("spec.bandwidth.defaultIngress must be at most spec.bandwidth.maxIngress: lower it, or raise spec.bandwidth.maxIngress")
)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    /// The name of the VPC that the network belongs to. It can't be changed.
    /// If that VPC does not exist, the condition `Accepted` is False and the network waits.
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.vpc is immutable: delete the Network and make it again in the other VPC"))]
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    /// The address ranges of the network: 1 to 8 networks in CIDR notation, without host bits, within the VPC's ranges.
    /// The first range is IPv4 of /30 or larger, such as 10.0.1.0/24. An IPv6 range is /64 to /120.
    /// A range may not overlap a range of another network of the VPC.
    /// Ranges can be appended. A range in force (`status.cidrs`) can't be removed or changed.
    /// Endpoints that are created while the network has an IPv6 range get an IPv4 and an IPv6 address.
    /// The operator refuses a bad range by the condition `Accepted` False. The ranges in force then stay as they are.
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
    /// The number of bouncers, 1 to 8. Default: 2, so that one may fail.
    /// With `autoscale`, this is the least number.
    #[serde(default = "crate::vpc::default_roles")]
    #[schemars(range(min = 1, max = 8))]
    pub bouncers: u32,
    /// Lets the operator add bouncers under load, or when the network has many endpoints.
    /// Without this field, the network always has as many bouncers as `bouncers` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscale: Option<BouncerAutoscale>,
    /// Whether pods reach addresses outside of the VPC. `false` closes the way out for the pods of this network alone.
    /// What nodes serve for the VPC, such as Services that it shares, stays reachable.
    /// Default: as `spec.egress` of the VPC says. `true` has no effect while the VPC has no egress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<bool>,
    /// The limits of the bandwidth of each of the network's pods. Without this field, a pod is limited only by its
    /// annotations `kubernetes.io/egress-bandwidth` and `kubernetes.io/ingress-bandwidth`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<NetworkBandwidth>,
    /// A selector of the namespaces whose pods, Services and Endpoints may enter the network.
    /// The VPC must admit them, too.
    /// Without this field, no namespace may enter, except in the network `default`, which admits all. `{}` admits all.
    /// When a namespace is no longer admitted, its running pods stay and no new pod enters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
    /// Whether pods, Services and Endpoints may ask for addresses of their choice. Default: false.
    /// If it is false, a pod that asks for an address does not start, and an event on the pod says why.
    #[serde(default, rename = "allowStaticIPs")]
    pub allow_static_ips: bool,
}

/// The bounds and the measures for the number of bouncers.
/// The operator adds bouncers at once when they are needed.
/// It removes them after five minutes in which fewer are enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BouncerAutoscale {
    /// The largest number of bouncers, 1 to 8. It must be at least `bouncers`.
    #[schemars(range(min = 1, max = 8))]
    pub max_bouncers: u32,
    /// The number of endpoints that one bouncer should serve at most. Default: 2000.
    /// The operator adds a bouncer when the network has more.
    #[serde(default = "endpoints_per_bouncer")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub endpoints_per_bouncer: u32,
    /// The number of packets per second that one bouncer should forward at most. Default: 200000.
    /// The operator adds a bouncer when the load that droplets report is larger.
    #[serde(default = "crate::vpc::packets_per_second")]
    #[schemars(range(min = 1, max = 100_000_000))]
    pub packets_per_second: u32,
}

fn endpoints_per_bouncer() -> u32 {
    2000
}

/// The state of the network. Only the operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct NetworkStatus {
    pub phase: Phase,
    /// The ranges in force: the latest `spec.cidrs` that passed the operator's checks.
    #[schemars(length(max = 8), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    /// The ranges in force as one text, such as `10.0.1.0/24, fd00:0:0:1::/64`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ranges: String,
    /// The number of IPv4 addresses that endpoints can have in the ranges in force. IPv6 addresses are not counted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capacity: Option<u64>,
    /// The number of IPv4 addresses that are reserved now, with those of deleted pods that wait to be used again.
    /// The operator writes it at most once per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// The number of bouncers that the network should have now, by `spec` and by the number of droplets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bouncers: Option<u32>,
    /// The number of those bouncers that work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_bouncers: Option<u32>,
    /// The latest `metadata.generation` that the operator has seen. If it is smaller, the status is of an earlier spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What the operator says about the object, one condition of each type.
    /// If a condition is False, its message says what to do.
    pub conditions: Vec<Condition>,
}
