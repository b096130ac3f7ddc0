//! Endpoint: a member of a network. Named `<pod>-<first 8 of its UID>`.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

/// What kind of member it is. Only simple endpoints exist yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EndpointType {
    /// A pod.
    #[default]
    Simple,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodRef {
    pub name: String,
    /// UID of the Pod object.
    pub uid: String,
    /// UID that kubelet tells the CNI plugin; another one for static pods (their mirror's annotation).
    pub cni_uid: String,
}

#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Endpoint",
    plural = "endpoints",
    shortname = "tep",
    namespaced,
    status = "EndpointStatus",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0]"),
    printcolumn(name = "IPv6", type_ = "string", json_path = ".status.addresses[1]"),
    printcolumn(name = "Droplet", type_ = "string", json_path = ".spec.droplet"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.status=='False')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(validation = Rule::new("self.spec == oldSelf.spec").message("spec is immutable"))]
#[serde(rename_all = "camelCase")]
pub struct EndpointSpec {
    #[serde(rename = "type", default)]
    pub kind: EndpointType,
    /// Empty while the network is not known.
    #[serde(default)]
    pub vpc: String,
    pub network: String,
    pub pod_ref: PodRef,
    /// The node that the pod is bound to.
    pub droplet: String,
}

/// Written by the operator alone. An address counts once it stands here.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointStatus {
    pub phase: Phase,
    /// IPv4, then IPv6 if the network has an IPv6 range.
    pub addresses: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// Of IPv4; that of IPv6 is the same link-local address everywhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// Prefix length of the pod's IPv4 address within its network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length: Option<u8>,
    /// Prefix length of the pod's IPv6 address within its network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length6: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub droplet: Option<String>,
    pub conditions: Vec<Condition>,
}
