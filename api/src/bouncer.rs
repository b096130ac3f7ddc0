//! Bouncer: a droplet's role for one network. Named `<network>-b<number>`.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

/// Where the operator placed the bouncer.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Bouncer",
    doc = "The role of one droplet as a gateway of a network: it knows on which droplet each endpoint of the network is. The operator creates Bouncers.",
    plural = "bouncers",
    shortname = "bnc",
    status = "RoleStatus",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Droplet", type_ = "string", json_path = ".spec.droplet"),
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
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.status=='False')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(validation = Rule::new("self.metadata.name.startsWith(self.spec.network + '-b') && self.metadata.name.size() == self.spec.network.size() + 3 && self.metadata.name.matches('[0-7]$')")
    .message("metadata.name must be <spec.network>-b<number>, 0 to 7, such as red-web-b0"))]
#[serde(rename_all = "camelCase")]
pub struct BouncerSpec {
    /// The name of the network's VPC. It can't be changed.
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.vpc is immutable: a Bouncer serves one network all its life"))]
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    /// The name of the network that the bouncer serves. It can't be changed.
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.network is immutable: a Bouncer serves one network all its life"))]
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// The droplet that the bouncer should be on. The operator sets it, and changes it to move the bouncer.
    /// Absent while no droplet can take the bouncer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub droplet: Option<String>,
}

/// The state of a Divider or Bouncer. Only the operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RoleStatus {
    pub phase: Phase,
    /// The droplet that other droplets send packets to. If it differs from `spec.droplet`, the role is moving.
    /// It stays in use until the new droplet is ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub droplet: Option<String>,
    /// Whether the role is being removed: other droplets have been told, or will be told, to stop using it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    /// What the operator says about the object, one condition of each type.
    /// If a condition is False, its message says what to do.
    pub conditions: Vec<Condition>,
}
