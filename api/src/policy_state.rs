//! PolicyState: how far a NetworkPolicy is enforced. A NetworkPolicy has no status of its own.

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
    doc = "How far Thuban enforces the NetworkPolicy of the same name. The operator creates the object and deletes it with the NetworkPolicy.",
    plural = "policystates",
    shortname = "pst",
    namespaced,
    status = "PolicyStateStatus",
    printcolumn(name = "Pods", type_ = "integer", json_path = ".status.pods"),
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
}
