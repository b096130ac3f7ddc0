//! Claims: objects whose name is the thing allocated, so that the API server makes it unique.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The address, and the Endpoint that it is reserved for. It can't be changed.
/// The object's name is `<vpc>.<address>`, with an IPv6 address as 32 hex digits.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "IpClaim",
    doc = "The reservation of one address in one VPC. The object's name is the address, so nobody else can reserve it. The operator creates and deletes IpClaims.",
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
    /// The name of the VPC that the address belongs to.
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    /// The name of the network that the address belongs to.
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// The reserved IPv4 or IPv6 address in its shortest form, such as 10.0.1.2 or fd00::2.
    #[x_kube(
        validation = Rule::new("isIP(self) && ip.isCanonical(self)")
            .message("spec.address must be an IP address in its shortest form, such as 10.0.1.2 or fd00::2")
    )]
    #[schemars(length(max = 39))]
    pub address: String,
    /// The namespace of the Endpoint that the address is reserved for.
    #[schemars(length(min = 1, max = 63))]
    pub endpoint_namespace: String,
    /// The name of the Endpoint that the address is reserved for.
    /// The address is in use once that Endpoint's status has it.
    #[schemars(length(min = 1, max = 253))]
    pub endpoint_name: String,
    /// The name of the pod that the address is reserved for. Empty for Endpoints of users, Services and nodes.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub pod: String,
    /// The UID of the pod that the address is reserved for. If there is no pod: the UID of the Endpoint.
    #[schemars(length(min = 1, max = 63))]
    pub owner_uid: String,
    /// The node that the Endpoint stays on for all its life. Empty if the Endpoint may move, or is a Service's.
    /// If the Endpoint is gone, the address is released when this node confirms that it no longer uses the address.
    /// If the field is empty, all nodes must confirm it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub droplet: String,
}

/// The state of the reservation. Only the operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IpClaimStatus {
    /// The UID of the Endpoint that uses the address. Written only if the reservation was some seconds old by then.
    /// It prevents a late release of the address by an operator that did not know of the Endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmed_for: Option<String>,
    /// The time at which `confirmedFor` was written, in RFC 3339 format.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub confirmed_at: Option<String>,
    /// The time from which no droplet used the address any more, in RFC 3339 format.
    /// The operator deletes the IpClaim THUBAN_CLAIM_REST_SECONDS later (default: 30). Then the address is free.
    /// Absent if the operator that removed the Endpoint counts this time itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released_at: Option<String>,
}

/// The VPC that the VNI is reserved for. It can't be changed. The object's name is the VNI, 1 to 16777215.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "VniClaim",
    doc = "The reservation of one VNI, the number that marks a VPC's packets on the underlay. The object's name is the VNI. The operator creates and deletes VniClaims.",
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
    /// The name of the VPC.
    #[schemars(length(min = 1, max = 63))]
    pub vpc: String,
    /// The UID of the Vpc object. A new VPC of the same name does not get the VNI.
    #[schemars(length(min = 1, max = 63))]
    pub vpc_uid: String,
}

/// The state of the reservation. Only the operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct VniClaimStatus {
    /// The time from which no droplet used the VNI any more, in RFC 3339 format.
    /// The operator deletes the VniClaim THUBAN_CLAIM_REST_SECONDS later (default: 30). Then the VNI is free.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub released_at: Option<String>,
}
