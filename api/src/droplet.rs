//! Droplet: a node that carries Thuban's data plane. Named as its Node.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

/// Written by the node's own transitd, which creates the object; the operator writes metadata and status.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Droplet",
    plural = "droplets",
    shortname = "drop",
    status = "DropletStatus",
    printcolumn(name = "IP", type_ = "string", json_path = ".spec.ip"),
    printcolumn(name = "Interface", type_ = "string", json_path = ".spec.interface"),
    printcolumn(name = "MTU", type_ = "integer", json_path = ".spec.mtu"),
    printcolumn(name = "Transit", type_ = "string", json_path = ".spec.transitHook"),
    printcolumn(name = "Roles", type_ = "string", json_path = ".status.roles"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(validation = Rule::new("self.spec.node == self.metadata.name")
    .message("spec.node must be metadata.name: a Droplet is named as its Node"))]
#[serde(rename_all = "camelCase")]
pub struct DropletSpec {
    /// The Node's name; the object has the same.
    #[schemars(length(min = 1, max = 253))]
    pub node: String,
    /// IPv4 of the node on the underlay: one of its Node's InternalIPs, unique among droplets.
    #[x_kube(
        validation = Rule::new("isIP(self) && ip(self).family() == 4 && ip(self).isGlobalUnicast()")
            .message("spec.ip must be a unicast IPv4 address, one of the Node's InternalIPs")
    )]
    #[schemars(length(max = 39))]
    pub ip: String,
    /// Interface that holds it.
    #[schemars(length(min = 1, max = 15))]
    pub interface: String,
    /// MTU of that interface, bytes. Pods get 50 less.
    #[x_kube(
        validation = Rule::new("self >= 626 && self <= 65535")
            .message("spec.mtu must be 626 to 65535 bytes: pods get 50 less, and IPv4 needs 576; raise the MTU of spec.interface")
    )]
    pub mtu: u32,
    /// Where transit runs: `xdp` or `tc`.
    #[x_kube(
        validation = Rule::new("self in ['', 'xdp', 'tc']").message("spec.transitHook must be xdp or tc")
    )]
    #[serde(default)]
    pub transit_hook: String,
    /// Where agents of new pods run: `xdp` or `tc`.
    #[x_kube(
        validation = Rule::new("self in ['', 'xdp', 'tc']").message("spec.agentHook must be xdp or tc")
    )]
    #[serde(default)]
    pub agent_hook: String,
    /// Version of transitd and its programs.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub program_version: String,
}

/// Written by the operator alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DropletStatus {
    pub phase: Phase,
    /// The address that was verified; rows go by it as long as the object is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<String>,
    /// Names of the dividers and bouncers that it carries.
    pub roles: Vec<String>,
    pub conditions: Vec<Condition>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}
