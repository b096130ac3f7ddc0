//! Divider: a droplet's role for one VPC. Named `<vpc>-d<number>`.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::RoleStatus;

/// Where the operator placed the divider.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Divider",
    doc = "The role of one droplet as a router of a VPC: it sends packets on to the bouncers of the destination's network. The operator creates Dividers.",
    plural = "dividers",
    shortname = "div",
    status = "RoleStatus",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
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
#[kube(validation = Rule::new("self.metadata.name.startsWith(self.spec.vpc + '-d') && self.metadata.name.size() == self.spec.vpc.size() + 3 && self.metadata.name.matches('[0-7]$')")
    .message("metadata.name must be <spec.vpc>-d<number>, 0 to 7, such as red-d0"))]
#[serde(rename_all = "camelCase")]
pub struct DividerSpec {
    /// The name of the VPC that the divider serves. It can't be changed.
    #[x_kube(validation = Rule::new("self == oldSelf").message("spec.vpc is immutable: a Divider serves one VPC all its life"))]
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    /// The droplet that the divider should be on. The operator sets it, and changes it to move the divider.
    /// Absent while no droplet can take the divider.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub droplet: Option<String>,
}
