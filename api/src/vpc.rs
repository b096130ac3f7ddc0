//! Vpc: a tenant's address space.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, DEFAULT_ROLES, Phase};

#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev", version = "v1alpha1", kind = "Vpc", plural = "vpcs",
    status = "VpcStatus",
    printcolumn(name = "VNI", type_ = "integer", json_path = ".status.vni"),
    printcolumn(name = "CIDRs", type_ = "string", json_path = ".spec.cidrs"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.status=='False')].reason"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    validation = Rule::new("self.metadata.name.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$')")
        .message("metadata.name must be a DNS label: at most 63 of a-z, 0-9 and -"),
    validation = Rule::new("!has(self.status) || !has(self.status.cidrs) || self.status.cidrs.size() == 0 || self.spec.cidrs[0] == self.status.cidrs[0] && self.status.cidrs.all(c, c in self.spec.cidrs)")
        .message("spec.cidrs may only be appended to: ranges in force (status.cidrs) can not be taken away"),
    validation = Rule::new("!has(self.spec.autoscale) || self.spec.autoscale.maxDividers >= self.spec.dividers")
        .message("spec.autoscale.maxDividers must be at least spec.dividers, the least number: raise it, or lower spec.dividers")
)]
#[serde(rename_all = "camelCase")]
pub struct VpcSpec {
    /// Ranges of the VPC: IPv4 and IPv6 networks without host bits, at most 8; only appended.
    #[x_kube(
        validation = Rule::new("self.size() >= 1 && self.size() <= 8").message("spec.cidrs must have 1 to 8 ranges"),
        validation = Rule::new("self.all(c, isCIDR(c) && cidr(c).masked() == cidr(c) && (cidr(c).ip().family() == 4 || cidr(c).prefixLength() <= 120))")
            .message("spec.cidrs must be networks without host bits: IPv4, such as 10.0.0.0/16, or IPv6 of /120 or larger, such as fd00::/48"),
        validation = Rule::new("self.size() > 8 || self.all(c, self.filter(d, isCIDR(c) && isCIDR(d) && cidr(c).containsCIDR(d)).size() <= 1)")
            .message("spec.cidrs has a range twice, or one within another: keep the larger one alone")
    )]
    #[schemars(length(max = 8), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    /// How many dividers serve the VPC; the least, with `autoscale`.
    #[serde(default = "default_roles")]
    #[schemars(range(min = 1, max = 8))]
    pub dividers: u32,
    /// Lets the operator add dividers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscale: Option<DividerAutoscale>,
    /// Pods reach addresses outside of the VPC in their node's name; nodes, the underlay and other VPCs stay closed. Default:
    /// only those of the VPC `default` do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<bool>,
    /// Services of the VPC `default`, as `namespace/name`, that pods reach at their ordinary addresses. Default:
    /// `default/kubernetes`, and `kube-system/kube-dns` if the installation names its cluster DNS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(max = 16),
        inner(
            length(max = 127),
            regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
        )
    )]
    pub shared_services: Option<Vec<String>>,
    /// Namespaces whose pods may enter: none admits nobody, `{}` admits all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
}

/// When a VPC gets more dividers than `dividers`: at once by need, fewer again after five minutes without need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DividerAutoscale {
    /// The most.
    #[schemars(range(min = 1, max = 8))]
    pub max_dividers: u32,
    /// Packets a second that a divider of the VPC may pass on, as its droplet reports.
    #[serde(default = "packets_per_second")]
    #[schemars(range(min = 1, max = 100_000_000))]
    pub packets_per_second: u32,
}

pub(crate) fn packets_per_second() -> u32 {
    200_000
}

/// Written by the operator alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VpcStatus {
    pub phase: Phase,
    /// Ranges in force: those of the spec, as they last passed the checks.
    #[schemars(length(max = 8), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vni: Option<u32>,
    /// How many dividers there should be now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dividers: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    pub conditions: Vec<Condition>,
}

pub(crate) fn default_roles() -> u32 {
    DEFAULT_ROLES
}
