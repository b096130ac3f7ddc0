//! Bouncer: a droplet's role for one network. Named `<network>-b<number>`.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Bouncer",
    plural = "bouncers",
    shortname = "bnc",
    status = "RoleStatus",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Droplet", type_ = "string", json_path = ".spec.droplet"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(validation = Rule::new("self.metadata.name.startsWith(self.spec.network + '-b') && self.metadata.name.size() == self.spec.network.size() + 3 && self.metadata.name.matches('[0-7]$')")
    .message("metadata.name must be <spec.network>-b<number>, 0 to 7, such as red-web-b0"))]
#[serde(rename_all = "camelCase")]
pub struct BouncerSpec {
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.vpc is immutable: a Bouncer serves one network all its life"))]
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.network is immutable: a Bouncer serves one network all its life"))]
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// Where it is placed; written by the operator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub droplet: Option<String>,
}

/// Status of a role, divider or bouncer. Provisioned: those who use it have acked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct RoleStatus {
    pub phase: Phase,
    /// Where it serves; until this is `spec.droplet`, that one is being made ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub droplet: Option<String>,
    /// Users are told to forget it: written before any of them is, and gone before any is told of it again.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub leaving: bool,
    pub conditions: Vec<Condition>,
}
