//! Droplet: a node that carries Thuban's data plane. A Droplet has the name of its Node.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

/// The properties of the node. The node's own transitd writes them.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Droplet",
    doc = "A node that carries Thuban's data plane. The node's transitd creates the object, under the name of the Node.",
    plural = "droplets",
    shortname = "drop",
    status = "DropletStatus",
    printcolumn(name = "IP", type_ = "string", json_path = ".spec.ip"),
    printcolumn(name = "Interface", type_ = "string", json_path = ".spec.interface"),
    printcolumn(name = "MTU", type_ = "integer", json_path = ".spec.mtu"),
    printcolumn(name = "Transit", type_ = "string", json_path = ".spec.transitHook"),
    printcolumn(name = "Version", type_ = "string", json_path = ".spec.programVersion"),
    printcolumn(name = "Roles", type_ = "integer", json_path = ".status.roleCount"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
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
#[kube(validation = Rule::new("self.spec.node == self.metadata.name")
    .message("spec.node must be metadata.name: a Droplet is named as its Node"))]
#[serde(rename_all = "camelCase")]
pub struct DropletSpec {
    /// The name of the Node. It must be the name of the Droplet.
    #[schemars(length(min = 1, max = 253))]
    pub node: String,
    /// The IPv4 address at which other droplets reach this one.
    /// It must be an InternalIP of the Node, and no other droplet may have it.
    /// If it is not, the condition `Accepted` is False and the droplet is not used.
    #[x_kube(
        validation = Rule::new("isIP(self) && ip(self).family() == 4 && ip(self).isGlobalUnicast()")
            .message("spec.ip must be a unicast IPv4 address, one of the Node's InternalIPs")
    )]
    #[schemars(length(max = 39))]
    pub ip: String,
    /// The name of the network interface that has the address `ip`, such as eth0.
    #[schemars(length(min = 1, max = 15))]
    pub interface: String,
    /// The MTU of that interface in bytes, 626 to 65535. Pods on the node get 50 bytes less.
    #[x_kube(
        validation = Rule::new("self >= 626 && self <= 65535")
            .message("spec.mtu must be 626 to 65535 bytes: pods get 50 less, and IPv4 needs 576; raise the MTU of spec.interface")
    )]
    pub mtu: u32,
    /// Where the program transit runs: `xdp` or `tc`. Transit receives packets at the interface.
    #[x_kube(
        validation = Rule::new("self in ['', 'xdp', 'tc']").message("spec.transitHook must be xdp or tc")
    )]
    #[serde(default)]
    pub transit_hook: String,
    /// Where the agents of new pods run: `xdp` or `tc`. An agent receives packets at a pod's veth.
    #[x_kube(
        validation = Rule::new("self in ['', 'xdp', 'tc']").message("spec.agentHook must be xdp or tc")
    )]
    #[serde(default)]
    pub agent_hook: String,
    /// The queue in which packets of a pod with a bandwidth limit wait: `fq_codel`, which is fair between the pod's
    /// flows, or `fifo` if the node's kernel lacks fq_codel. Empty until the node has had a pod with a limit.
    #[x_kube(
        validation = Rule::new("self in ['', 'fq_codel', 'fifo']").message("spec.limitQueue must be fq_codel or fifo")
    )]
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub limit_queue: String,
    /// The version of transitd and its programs on the node.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub program_version: String,
}

/// The state of the droplet. Only the operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DropletStatus {
    pub phase: Phase,
    /// The latest `spec.ip` that passed the operator's checks. Other droplets send packets to this address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// The names of the Dividers and Bouncers on the droplet.
    pub roles: Vec<String>,
    /// The number of those roles.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_count: Option<u32>,
    /// What the operator says about the object, one condition of each type.
    /// If a condition is False, its message says what to do.
    pub conditions: Vec<Condition>,
    /// The latest `metadata.generation` that the operator has seen. If it is smaller, the status is of an earlier spec.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}
