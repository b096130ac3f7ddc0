//! Claims: objects whose name is the thing allocated, so that the API server makes it unique.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An address of a VPC, named `<vpc>.<address>`, IPv6 as 32 hex digits. It counts once it stands in the status of the Endpoint that it names.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "IpClaim",
    plural = "ipclaims",
    shortname = "ipc",
    status = "IpClaimStatus",
    printcolumn(name = "Namespace", type_ = "string", json_path = ".spec.endpointNamespace"),
    printcolumn(name = "Endpoint", type_ = "string", json_path = ".spec.endpointName"),
    printcolumn(name = "Released", type_ = "string", json_path = ".status.releasedAt"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(validation = Rule::new("self.spec == oldSelf.spec").message("spec is immutable"))]
#[serde(rename_all = "camelCase")]
pub struct IpClaimSpec {
    pub vpc: String,
    pub network: String,
    pub address: String,
    pub endpoint_namespace: String,
    pub endpoint_name: String,
    /// Name of the pod; empty if a user made the Endpoint.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub pod: String,
    /// UID of the pod; of the Endpoint, if a user made it.
    pub owner_uid: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IpClaimStatus {
    /// RFC 3339: when its rows were gone everywhere. From then it rests, then it is deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released_at: Option<String>,
}

/// A VNI, named by its number.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "VniClaim",
    plural = "vniclaims",
    shortname = "vnic",
    status = "VniClaimStatus",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(validation = Rule::new("self.spec == oldSelf.spec").message("spec is immutable"))]
#[serde(rename_all = "camelCase")]
pub struct VniClaimSpec {
    pub vpc: String,
    pub vpc_uid: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VniClaimStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released_at: Option<String>,
}
