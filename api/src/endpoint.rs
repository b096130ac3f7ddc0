//! Endpoint: a member of a network. The operator makes a pod's Endpoint, named `<pod>-<first 8 of its UID>`; a
//! Service's (a scaled one), named `<service>-<first 8 of its UID>`; and a node's, named as the node. Users make and
//! name the others. Such an Endpoint serves the pods that name it by annotation, one after the other.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

/// The kind of member that the Endpoint is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum EndpointType {
    /// A pod.
    #[default]
    Simple,
    /// A Service: its addresses stand for backends.
    Scaled,
    /// A node, in the VPC that nodes are in: it has the node's name, and is made by the operator.
    Host,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodRef {
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// UID of the Pod object.
    #[schemars(length(min = 1, max = 63))]
    pub uid: String,
    /// UID that kubelet tells the CNI plugin; another one for static pods (their mirror's annotation).
    #[schemars(length(min = 1, max = 63))]
    pub cni_uid: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRef {
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// UID of the Service object.
    #[schemars(length(min = 1, max = 63))]
    pub uid: String,
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
    selectable = ".spec.network",
    printcolumn(name = "VPC", type_ = "string", json_path = ".spec.vpc"),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0]"),
    printcolumn(name = "Second", type_ = "string", json_path = ".status.addresses[1]"),
    printcolumn(name = "Droplet", type_ = "string", json_path = ".status.droplet"),
    printcolumn(
        name = "Backends",
        type_ = "integer",
        json_path = ".status.backends",
        priority = 1
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.status=='False')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("self.spec == oldSelf.spec")
        .message("spec is immutable: delete the Endpoint and make it again"),
    validation = Rule::new("(has(self.spec.podRef) || self.spec.type == 'Host') == (has(self.spec.droplet) && self.spec.droplet != '')")
        .message("spec.podRef and spec.droplet go together: the operator sets both, people leave both out"),
    validation = Rule::new("self.spec.type != 'Host' || !has(self.spec.podRef)")
        .message("spec.type Host is of nodes: the operator makes such Endpoints, people leave it out"),
    validation = Rule::new("has(self.spec.serviceRef) == (self.spec.type == 'Scaled')")
        .message("spec.serviceRef and spec.type Scaled go together: the operator sets both for a Service, people leave both out"),
    validation = Rule::new("!has(self.spec.serviceRef) || !has(self.spec.podRef) && !has(self.spec.mac)")
        .message("spec.podRef and spec.mac are of pods: leave them out of an Endpoint of type Scaled, which has its Service's addresses")
)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSpec {
    #[serde(rename = "type", default)]
    pub kind: EndpointType,
    /// Empty while the network is not known, and if a user made it.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub vpc: String,
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// The pod that it was made for; none if a user made it, or if it is a Service's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_ref: Option<PodRef>,
    /// The Service that it was made for, of the same namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_ref: Option<ServiceRef>,
    /// For a pod: its node. For type Host: the node itself. Otherwise empty.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub droplet: String,
    /// Asked for by annotation or by its user, at most one of each family; the network must allow it. None: the
    /// operator picks; a Service has those of the cluster alone.
    #[x_kube(
        validation = Rule::new("self.all(a, isIP(a))")
            .message("spec.addresses must be addresses such as 10.0.1.7 or fd00:1::7, without prefix length"),
        validation = Rule::new("self.size() < 2 || !self.all(a, isIP(a)) || ip(self[0]).family() != ip(self[1]).family()")
            .message("spec.addresses may have one address of each family, not two of one: make an Endpoint for each")
    )]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2), inner(length(max = 39)))]
    pub addresses: Vec<String>,
    /// Claimed by the operator before it made the object, or the Service's; `status.addresses` goes before it.
    #[x_kube(
        validation = Rule::new("self.all(a, isIP(a))").message("spec.claimed must be IP addresses")
    )]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2), inner(length(max = 39)))]
    pub claimed: Vec<String>,
    /// A unicast MAC address, as 02:00:00:00:00:01. None: made from the address.
    #[x_kube(
        validation = Rule::new("self.matches('^[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}$') && self != '00:00:00:00:00:00'")
            .message("spec.mac must be a unicast MAC address, such as 02:00:00:00:00:01: six bytes, the first one even"),
        validation = Rule::new("self != '02:54:68:75:62:61'")
            .message("spec.mac is the gateway's, 02:54:68:75:62:61: choose another one")
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 17))]
    pub mac: Option<String>,
}

/// Written by the operator alone. An address counts once it stands here.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointStatus {
    pub phase: Phase,
    /// IPv4, then IPv6 if the network has an IPv6 range; of a Service its cluster IPs, in their order.
    pub addresses: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The IPv4 gateway; the IPv6 gateway is the same link-local address everywhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// Prefix length of the pod's IPv4 address within its network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length: Option<u8>,
    /// Prefix length of the pod's IPv6 address within its network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length6: Option<u8>,
    /// Where it lives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub droplet: Option<String>,
    /// The pod that has it now, if a user made it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_ref: Option<PodRef>,
    /// Where it lived before: packets follow it from there until all who had it there know.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_droplet: Option<String>,
    /// How many addresses new connections to the Service go to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backends: Option<u32>,
    /// The lowest five of these addresses.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub first_backends: Vec<String>,
    /// Ports of nodes that lead to the Service, as 30080/TCP. A port that was another VPC's until lately is not among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_ports: Option<Vec<String>>,
    pub conditions: Vec<Condition>,
}
