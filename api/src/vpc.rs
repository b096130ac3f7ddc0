//! Vpc: a tenant's address space.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bandwidth::VpcBandwidth;
use crate::{Condition, DEFAULT_ROLES, Phase};

/// What the VPC is to be.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev", version = "v1alpha1", kind = "Vpc", plural = "vpcs",
    doc = "A virtual private cloud (VPC): the address space of one tenant. Its pods reach each other, and no pod of another VPC.",
    status = "VpcStatus",
    printcolumn(name = "VNI", type_ = "integer", json_path = ".status.vni"),
    printcolumn(name = "Ranges", type_ = "string", json_path = ".status.ranges"),
    printcolumn(name = "Egress", type_ = "boolean", json_path = ".status.egress"),
    printcolumn(name = "Networks", type_ = "integer", json_path = ".status.networks"),
    printcolumn(name = "Dividers", type_ = "integer", json_path = ".status.dividers", priority = 1),
    printcolumn(name = "Working", type_ = "integer", json_path = ".status.workingDividers", priority = 1),
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
    validation = Rule::new("!has(self.spec.autoscale) || self.spec.autoscale.maxDividers >= self.spec.dividers")
        .message("spec.autoscale.maxDividers must be at least spec.dividers, the least number: raise it, or lower spec.dividers")
)]
#[serde(rename_all = "camelCase")]
pub struct VpcSpec {
    /// The address ranges of the VPC: 1 to 8 networks in CIDR notation, without host bits.
    /// A range is IPv4, such as 10.0.0.0/16, or IPv6 of /120 or larger, such as fd00::/48.
    /// Other VPCs may have the same ranges. No range may touch Services, nodes, the underlay or the VPC `default`.
    /// Ranges can be appended. A range in force (`status.cidrs`) can't be removed or changed.
    /// The operator refuses a bad range by the condition `Accepted` False. The ranges in force then stay as they are.
    #[x_kube(
        validation = Rule::new("self.size() >= 1 && self.size() <= 8").message("spec.cidrs must have 1 to 8 ranges"),
        validation = Rule::new("self.all(c, isCIDR(c) && cidr(c).masked() == cidr(c) && (cidr(c).ip().family() == 4 || cidr(c).prefixLength() <= 120))")
            .message("spec.cidrs must be networks without host bits: IPv4, such as 10.0.0.0/16, or IPv6 of /120 or larger, such as fd00::/48"),
        validation = Rule::new("self.size() > 8 || self.all(c, self.filter(d, isCIDR(c) && isCIDR(d) && cidr(c).containsCIDR(d)).size() <= 1)")
            .message("spec.cidrs has a range twice, or one within another: keep the larger one alone")
    )]
    #[schemars(length(max = 8), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    /// The number of dividers, 1 to 8. Default: 2, so that one may fail.
    /// With `autoscale`, this is the least number.
    #[serde(default = "default_roles")]
    #[schemars(range(min = 1, max = 8))]
    pub dividers: u32,
    /// Lets the operator add dividers under load.
    /// Without this field, the VPC always has as many dividers as `dividers` says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autoscale: Option<DividerAutoscale>,
    /// Whether pods reach addresses outside of the VPC. Their packets leave with the node's address as source.
    /// Nodes, the underlay, addresses of cloud metadata and other VPCs stay closed to all VPCs but `default`.
    /// Default: true for the VPC `default`, false for all others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<bool>,
    /// The Services of the VPC `default` that pods of this VPC reach at their ClusterIPs.
    /// The list has at most 16 entries, each in the form `namespace/name`.
    /// These are shared besides `default/kubernetes`, and cluster DNS if the operator knows THUBAN_CLUSTER_DNS.
    /// Cluster DNS is `kube-system/kube-dns`, or the Service that THUBAN_CLUSTER_DNS_SERVICE names.
    /// `-default/kubernetes` or `-kube-system/kube-dns` takes one of them away.
    /// An empty list shares none. A Service that does not exist, or is in another VPC than `default`, has no effect:
    /// the condition `SharedServices` names it.
    /// The VPC `default` reaches all of its own Services without this field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(max = 16),
        inner(
            length(max = 128),
            regex(pattern = r"^-?[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
        )
    )]
    pub shared_services: Option<Vec<String>>,
    /// A selector of the namespaces whose pods, Services and Endpoints may enter the VPC.
    /// The network must admit them, too.
    /// Without this field, no namespace may enter, except in the VPC `default`, which admits all. `{}` admits all.
    /// When a namespace is no longer admitted, its running pods stay and no new pod enters.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
    /// The limits of the bandwidth of the VPC's pods together.
    /// Without this field, pods are limited only each by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<VpcBandwidth>,
    /// The DSCP of the VPC's packets on the underlay: `Copy`, `Clear`, or a number from 0 to 63.
    /// `Copy` takes what the pod wrote into its packet, so that pods choose their priority on the underlay.
    /// `Clear` is the same as 0: no priority. What a pod wrote stays in its own packet.
    /// Default: `Copy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("type(self) == int ? self >= 0 && self <= 63 : self in ['Copy', 'Clear']")
            .message("spec.dscp must be Copy, Clear, or a number from 0 to 63")
    )]
    pub dscp: Option<IntOrString>,
    /// What becomes of packets that a network policy denies: `Drop` or `Reject`.
    /// With `Reject` the sender hears so at once, by a TCP reset or an ICMP error.
    /// At most 100 packets a second are answered for a rule and a pod.
    /// With `Drop` it hears nothing, as in a network without a host at the address.
    /// Default: `Drop`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub denied_traffic: Option<DeniedTraffic>,
}

/// What becomes of packets that a network policy denies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DeniedTraffic {
    Drop,
    Reject,
}

/// The bounds and the measure for the number of dividers.
/// The operator adds dividers at once when they are needed.
/// It removes them after five minutes in which fewer are enough.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DividerAutoscale {
    /// The largest number of dividers, 1 to 8. It must be at least `dividers`.
    #[schemars(range(min = 1, max = 8))]
    pub max_dividers: u32,
    /// The number of packets per second that one divider should forward at most. Default: 200000.
    /// The operator adds a divider when the load that droplets report is larger.
    #[serde(default = "packets_per_second")]
    #[schemars(range(min = 1, max = 100_000_000))]
    pub packets_per_second: u32,
}

pub(crate) fn packets_per_second() -> u32 {
    200_000
}

/// The state of the VPC. Only the operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VpcStatus {
    pub phase: Phase,
    /// The ranges in force: the latest `spec.cidrs` that passed the operator's checks.
    #[schemars(length(max = 8), inner(length(max = 43)))]
    pub cidrs: Vec<String>,
    /// The ranges in force as one text, such as `10.0.0.0/16, fd00::/48`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub ranges: String,
    /// Whether pods reach addresses outside of the VPC now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<bool>,
    /// The number of the VPC's networks, refused ones included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub networks: Option<u32>,
    /// The number that marks the VPC's packets on the underlay, 1 to 16777215. Absent until the operator has chosen it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vni: Option<u32>,
    /// The number of dividers that the VPC should have now, by `spec` and by the number of droplets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dividers: Option<u32>,
    /// The number of those dividers that work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub working_dividers: Option<u32>,
    /// The latest `metadata.generation` that the operator has seen. If it is smaller, the status is of an earlier spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What the operator says about the object, one condition of each type.
    /// If a condition is False, its message says what to do.
    pub conditions: Vec<Condition>,
}

pub(crate) fn default_roles() -> u32 {
    DEFAULT_ROLES
}
