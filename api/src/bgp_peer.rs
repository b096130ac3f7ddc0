//! BgpPeer: a router to which nodes announce addresses of Vips.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The router, the nodes that peer with it, and the session's terms.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "BgpPeer",
    doc = "A router to which nodes announce the addresses of Vips by BGP.",
    plural = "bgppeers",
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "ASN", type_ = "integer", json_path = ".spec.asn"),
    printcolumn(name = "Local ASN", type_ = "integer", json_path = ".spec.localAsn"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("!has(self.spec.ebgpMultihop) || self.spec.asn != self.spec.localAsn")
        .message("spec.ebgpMultihop is for external BGP: leave it out if spec.asn and spec.localAsn are equal"),
    validation = Rule::new("!has(self.spec.ebgpMultihop) || !has(self.spec.bfd)")
        .message("spec.bfd looks for routers on the same link: leave it out with spec.ebgpMultihop")
)]
#[serde(rename_all = "camelCase")]
pub struct BgpPeerSpec {
    /// The router's IPv4 or IPv6 address in its shortest form, such as 192.0.2.1.
    #[x_kube(
        validation = Rule::new("isIP(self) && ip.isCanonical(self)")
            .message("spec.address must be an IP address in its shortest form, such as 192.0.2.1")
    )]
    #[schemars(length(max = 39))]
    pub address: String,
    /// The router's TCP port. Default: 179.
    #[serde(default = "default_port")]
    #[schemars(range(min = 1, max = 65_535))]
    pub port: u16,
    /// The router's autonomous system, 1 to 4294967295.
    #[schemars(range(min = 1))]
    pub asn: u32,
    /// The nodes' autonomous system, 1 to 4294967295. All BgpPeers of a node must have the same one. If it equals
    /// `asn`, nodes speak internal BGP.
    #[schemars(range(min = 1))]
    pub local_asn: u32,
    /// A selector of the nodes that peer with the router. Default: all.
    #[serde(default)]
    pub node_selector: LabelSelector,
    /// The seconds after which a silent session ends, 3 to 90. Default: 9.
    #[serde(default = "default_hold_seconds")]
    #[schemars(range(min = 3, max = 90))]
    pub hold_seconds: u16,
    /// The seconds for which the router keeps a node's routes after the session broke, 0 to 180, if the router can.
    /// Default: 0. With BFD, a node that is silent loses its routes all the same.
    #[serde(default)]
    #[schemars(range(max = 180))]
    pub graceful_restart_seconds: u16,
    /// Has node and router look for each other by BFD (RFC 5880). Default: no BFD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bfd: Option<BgpPeerBfd>,
    /// The name of a Secret in the namespace thuban-bgp. Its key `password` has the session's password (TCP MD5,
    /// RFC 2385), 1 to 80 bytes. Its type is Opaque or kubernetes.io/basic-auth. Without the password, nodes set up no
    /// session. Default: sessions without a password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(
        validation = Rule::new("self.matches('^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$')")
            .message("spec.passwordSecret must be the name of a Secret in the namespace thuban-bgp, such as leaf-1")
    )]
    #[schemars(length(min = 1, max = 253))]
    pub password_secret: Option<String>,
    /// The TTL of packets to a router that is not on the nodes' link, 2 to 255: one more than the number of routers in
    /// between. Default: the router of external BGP is on the link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 255))]
    pub ebgp_multihop: Option<u8>,
}

/// How soon a silent neighbour counts as gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BgpPeerBfd {
    /// The milliseconds between two packets, 50 to 60000. Default: 300.
    #[serde(default = "default_interval")]
    #[schemars(range(min = 50, max = 60_000))]
    pub interval_ms: u32,
    /// How many packets in a row are lost when the neighbour is gone, 2 to 255. Default: 3.
    #[serde(default = "default_multiplier")]
    #[schemars(range(min = 2, max = 255))]
    pub multiplier: u32,
}

fn default_interval() -> u32 {
    300
}

fn default_multiplier() -> u32 {
    3
}

fn default_port() -> u16 {
    179
}

fn default_hold_seconds() -> u16 {
    9
}
