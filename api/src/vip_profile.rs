//! VipProfile: what several Vips of a namespace have in common.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

/// How Vips treat their clients.
#[derive(CustomResource, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "VipProfile",
    doc = "How Vips of the namespace that name it treat their clients.",
    plural = "vipprofiles",
    namespaced,
    printcolumn(name = "Source ranges", type_ = "string", json_path = ".spec.sourceRanges"),
    printcolumn(name = "Affinity", type_ = "integer", json_path = ".spec.affinitySeconds"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("self.metadata.name.size() <= 63").message("metadata.name must have at most 63 characters")
)]
#[serde(rename_all = "camelCase")]
pub struct VipProfileSpec {
    /// The ranges of the clients that may ask, at most 64 networks in CIDR notation. Empty: all clients.
    #[serde(default)]
    #[x_kube(
        validation = Rule::new("self.all(c, isCIDR(c) && cidr(c).masked() == cidr(c))")
            .message("spec.sourceRanges must be networks without host bits, such as 198.51.100.0/24")
    )]
    #[schemars(length(max = 64), inner(length(max = 43)))]
    pub source_ranges: Vec<String>,
    /// The seconds for which a client that asked keeps its backend, 1 to 86400. Without this field, each connection
    /// gets a backend of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub affinity_seconds: Option<u32>,
}
