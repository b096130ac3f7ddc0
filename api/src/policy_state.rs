//! PolicyState: how far a NetworkPolicy is enforced, and what it denies. A NetworkPolicy has no status of its own.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// Nothing: the NetworkPolicy says what is wanted.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "PolicyState",
    doc = "How far Thuban enforces the NetworkPolicy of the same name, and what the policy denies. The operator creates the object and deletes it with the NetworkPolicy. In the namespace thuban-system the policy may be a ClusterNetworkPolicy with the annotation thuban.dev/report-denied.",
    plural = "policystates",
    shortname = "pst",
    namespaced,
    status = "PolicyStateStatus",
    printcolumn(name = "Droplets", type_ = "integer", json_path = ".status.droplets"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyDroplets"),
    printcolumn(
        name = "Accepted",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Accepted')].status"
    ),
    printcolumn(
        name = "Provisioned",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Provisioned')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.status=='False')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
pub struct PolicyStateSpec {}

/// How far the policy is enforced. The numbers are those of the moment when a condition changed. Only the operator
/// writes them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct PolicyStateStatus {
    /// How many pods the policy selects.
    pub pods: u32,
    /// How many droplets must know the policy: those with pods of the selected pods' VPCs.
    pub droplets: u32,
    /// How many of these droplets enforce the policy.
    pub ready_droplets: u32,
    /// `Accepted`: all fields are understood, and the namespace is within its limits; if not, the message says why.
    /// `Provisioned`: all droplets enforce the policy; if not, the message says which do not.
    pub conditions: Vec<Condition>,
    /// The latest `metadata.generation` of the NetworkPolicy that the operator has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// The packets that the policy denied, while its annotation `thuban.dev/report-denied` is `true`. Nodes report
    /// about once a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub denied: Option<Denied>,
}

/// The packets that a policy denied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Denied {
    /// The time since which packets are counted, in RFC 3339 format.
    pub since: String,
    /// How many packets were denied, as far as nodes have reported them.
    pub packets: u64,
    /// The peers of the last of these packets, the latest first, at most 10.
    pub last_peers: Vec<DeniedPeer>,
}

/// The direction of a packet, as its pod sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PacketDirection {
    #[default]
    Ingress,
    Egress,
}

/// A peer is who sent a packet that was denied, or who was to get it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DeniedPeer {
    /// The time of one of the peer's last packets, in RFC 3339 format.
    pub time: String,
    /// `Ingress`: the peer sent the packet to `pod`. `Egress`: `pod` sent the packet to the peer.
    pub direction: PacketDirection,
    /// The pod that the policy selects, as namespace/name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The peer's address.
    pub address: String,
    /// The peer, as namespace/name, if it is a pod of the same VPC.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_pod: Option<String>,
    /// The protocol, such as `TCP`, or the number of another one than TCP, UDP, SCTP, ICMP and ICMPv6.
    pub protocol: String,
    /// The port that the packet was for, if the protocol has ports.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
}
