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
#[kube(
    validation = Rule::new("self.spec == oldSelf.spec").message("spec is immutable: a claim is what it was made for, or is deleted"),
    validation = Rule::new("!isIP(self.spec.address) || (ip(self.spec.address).family() == 4 ? self.metadata.name == self.spec.vpc + '.' + self.spec.address : self.metadata.name.startsWith(self.spec.vpc + '.') && self.metadata.name.size() == self.spec.vpc.size() + 33 && self.metadata.name.matches('[.][0-9a-f]{32}$'))")
        .message("metadata.name must be <spec.vpc>.<spec.address>, IPv6 as 32 hex digits, such as red.10.0.1.2")
)]
#[serde(rename_all = "camelCase")]
pub struct IpClaimSpec {
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    #[x_kube(
        validation = Rule::new("isIP(self) && ip.isCanonical(self)")
            .message("spec.address must be an IP address in its shortest form, such as 10.0.1.2 or fd00::2")
    )]
    #[schemars(length(max = 39))]
    pub address: String,
    #[schemars(length(min = 1, max = 63))]
    pub endpoint_namespace: String,
    #[schemars(length(min = 1, max = 253))]
    pub endpoint_name: String,
    /// Name of the pod; empty if a user made the Endpoint.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub pod: String,
    /// UID of the pod; of the Endpoint, if a user made it.
    #[schemars(length(min = 1, max = 63))]
    pub owner_uid: String,
    /// Node that the Endpoint is on for life. Without its Endpoint, the claim waits for its word; for that of all if empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub droplet: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IpClaimStatus {
    /// UID of the Endpoint that took the address some time after the claim was made. An operator may have decided before that nobody takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmed_for: Option<String>,
    /// RFC 3339: when `confirmedFor` was written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmed_at: Option<String>,
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
#[kube(
    validation = Rule::new("self.spec == oldSelf.spec").message("spec is immutable: a claim is what it was made for, or is deleted"),
    validation = Rule::new("self.metadata.name.matches('^[1-9][0-9]{0,7}$') && int(self.metadata.name) < 16777216")
        .message("metadata.name must be the VNI, a number from 1 to 16777215")
)]
#[serde(rename_all = "camelCase")]
pub struct VniClaimSpec {
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    #[schemars(length(min = 1, max = 63))]
    pub vpc_uid: String,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VniClaimStatus {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released_at: Option<String>,
}
