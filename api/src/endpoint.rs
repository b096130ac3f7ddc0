//! Endpoint: a member of a network. The operator makes a pod's Endpoint, named `<pod>-<first 8 of its UID>`; a
//! Service's (a scaled one), named `<service>-<first 8 of its UID>`; and a node's, named as the node. Users make and
//! name the others. Such an Endpoint serves the pods that name it by annotation, one after the other.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Condition, Phase};

/// The kind of member. Default: Simple, a pod.
/// Scaled is a Service: its addresses stand for backends. Host is a node, in the VPC `default`.
/// The operator creates Endpoints of the types Scaled and Host. Users leave this field out.
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

/// A pod of the Endpoint's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodRef {
    /// The pod's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The UID of the Pod object.
    #[schemars(length(min = 1, max = 63))]
    pub uid: String,
    /// The UID that kubelet passes to the CNI plugin. It differs from `uid` only for static pods.
    #[schemars(length(min = 1, max = 63))]
    pub cni_uid: String,
}

/// A Service of the Endpoint's namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServiceRef {
    /// The Service's name.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// The UID of the Service object.
    #[schemars(length(min = 1, max = 63))]
    pub uid: String,
}

/// What the endpoint is: its kind, its network and its place. It never changes.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "Endpoint",
    doc = "A member of a network: a pod, a Service or a node. The operator creates an Endpoint for each of them. Users create Endpoints whose addresses outlive pods.",
    plural = "endpoints",
    shortname = "tep",
    namespaced,
    status = "EndpointStatus",
    selectable = ".spec.network",
    printcolumn(name = "VPC", type_ = "string", json_path = ".status.vpc"),
    printcolumn(name = "Network", type_ = "string", json_path = ".spec.network"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0]"),
    printcolumn(name = "Second", type_ = "string", json_path = ".status.addresses[1]"),
    printcolumn(name = "Droplet", type_ = "string", json_path = ".status.droplet"),
    printcolumn(
        name = "Pod",
        type_ = "string",
        json_path = ".status.podRef.name",
        priority = 1
    ),
    printcolumn(
        name = "Backends",
        type_ = "integer",
        json_path = ".status.backends",
        priority = 1
    ),
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
    /// The name of the network's VPC. The operator sets it. Users leave it out.
    /// It is empty if a user created the Endpoint, or if the network did not exist when the operator created it.
    /// `status.vpc` is the VPC that the network has.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub vpc: String,
    /// The name of the network that the Endpoint is a member of.
    /// If the network does not exist or does not admit the namespace, the condition `Accepted` is False and says why.
    #[schemars(length(min = 1, max = 63))]
    pub network: String,
    /// The pod that the operator created the Endpoint for. Users leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_ref: Option<PodRef>,
    /// The Service that the operator created the Endpoint for. Users leave it out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_ref: Option<ServiceRef>,
    /// The node of the pod, or the node itself for the type Host. The operator sets it. Users leave it out.
    /// For an Endpoint that a user created, `status.droplet` says where it is.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 253))]
    pub droplet: String,
    /// The addresses that the Endpoint asks for: at most one IPv4 and one IPv6 address, such as 10.0.1.50.
    /// They must be in the network's ranges, and the network must have `allowStaticIPs: true`.
    /// If an address can't be had, a condition says why: `AddressUnfit`, `AddressTaken` or `AddressInUseOnNode`.
    /// Default: none, and the operator chooses the addresses. A Service then has its ClusterIPs only.
    #[x_kube(
        validation = Rule::new("self.all(a, isIP(a))")
            .message("spec.addresses must be addresses such as 10.0.1.7 or fd00:1::7, without prefix length"),
        validation = Rule::new("self.size() < 2 || !self.all(a, isIP(a)) || ip(self[0]).family() != ip(self[1]).family()")
            .message("spec.addresses may have one address of each family, not two of one: make an Endpoint for each")
    )]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2), inner(length(max = 39)))]
    pub addresses: Vec<String>,
    /// The addresses that the operator reserved before it created the Endpoint. Users leave it out.
    /// `status.addresses` is the current list. It differs if an address had to be replaced.
    #[x_kube(
        validation = Rule::new("self.all(a, isIP(a))").message("spec.claimed must be IP addresses")
    )]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 2), inner(length(max = 39)))]
    pub claimed: Vec<String>,
    /// The MAC address, such as 02:00:00:00:00:01. It must be unicast: the first byte is even.
    /// Default: a MAC address that follows from the IPv4 address.
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

/// The state of the Endpoint. Only the operator writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct EndpointStatus {
    pub phase: Phase,
    /// The name of the VPC of the Endpoint's network. Absent while the operator has not found the network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vpc: Option<String>,
    /// The addresses of the Endpoint: IPv4, then IPv6 if the network had an IPv6 range at its creation.
    /// For a Service: its ClusterIPs, then its addresses in the network (annotation `thuban.dev/service-ip`).
    /// Empty until the operator has given addresses out.
    pub addresses: Vec<String>,
    /// The MAC address of the Endpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<String>,
    /// The IPv4 gateway of the pod. The IPv6 gateway is fe80::5468:7562:6101 in every network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// The prefix length of the range that the IPv4 address is from, such as 24.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length: Option<u8>,
    /// The prefix length of the range that the IPv6 address is from, such as 64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix_length6: Option<u8>,
    /// The droplet that the Endpoint is on. Absent while no pod has an Endpoint that a user created.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub droplet: Option<String>,
    /// The pod that has the Endpoint now, if a user created the Endpoint. Absent while no pod has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod_ref: Option<PodRef>,
    /// The droplet that an Endpoint of a user was on before it moved. That droplet forwards packets to the new one.
    /// The field goes away when all droplets that knew the old place know the new one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub previous_droplet: Option<String>,
    /// For a Service: the number of addresses that receive new connections.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backends: Option<u32>,
    /// For a Service: the lowest five of the addresses that receive new connections.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub first_backends: Vec<String>,
    /// For a Service: the ports of nodes that lead to it, such as 30080/TCP.
    /// A NodePort that another VPC had shortly before is missing until all nodes know the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_ports: Option<Vec<String>>,
    /// What the operator says about the object, one condition of each type.
    /// If a condition is False, its message says what to do.
    pub conditions: Vec<Condition>,
}
