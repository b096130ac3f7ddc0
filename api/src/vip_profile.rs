//! VipProfile: what several Vips of a namespace have in common.

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
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
    /// gets a backend of its own. With HAProxy, a client keeps the node of its backend.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub affinity_seconds: Option<u32>,
    /// With this field, HAProxy ends TLS, and backends get what was encrypted. Only for Vips of an IpPool with the
    /// driver `Haproxy`, as all fields below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ssl: Option<VipSsl>,
    /// The version of the PROXY protocol by which backends hear of the client's address. Without this field, backends
    /// hear nothing of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proxy_protocol: Option<ProxyProtocol>,
    /// How many connections clients may have. Without this field, only the limits of HAProxy count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client_limits: Option<ClientLimits>,
    /// The seconds after which a connection that carries nothing is closed, 1 to 86400. Default: 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub idle_seconds: Option<u32>,
}

/// How HAProxy ends TLS.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct VipSsl {
    /// The name of a Secret of the namespace, of type `kubernetes.io/tls`, that lbaasd may read.
    #[x_kube(
        validation = Rule::new("self.matches('^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$')")
            .message("spec.ssl.secret must be the name of a Secret")
    )]
    #[schemars(length(min = 1, max = 253))]
    pub secret: String,
    /// The oldest version of TLS that clients may speak. Default: `TLS1.2`.
    #[serde(default)]
    pub min_version: TlsVersion,
}

/// A version of TLS.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum TlsVersion {
    #[default]
    #[serde(rename = "TLS1.2")]
    V12,
    #[serde(rename = "TLS1.3")]
    V13,
}

/// A version of HAProxy's PROXY protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum ProxyProtocol {
    V1,
    V2,
}

/// How many connections clients may have, at each node by itself. What goes beyond is closed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientLimits {
    /// The most connections of all clients to one port, 1 to 100000. Further ones wait. Default: 2000. All ports
    /// of a Vip together have at most 10000 on each node.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub connections: Option<u32>,
    /// The most connections of one client's address to one port, 1 to 100000. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub per_client: Option<u32>,
    /// The most new connections a second of one client's address to one port, 1 to 100000. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000))]
    pub per_client_rate: Option<u32>,
}
