//! DnsZone: a zone in which Vips may have names, and the server that has its records.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Condition;

/// The zone, who may have names there, and where the records are written.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "DnsZone",
    doc = "A DNS zone in which lbaasd gives Vips names.",
    plural = "dnszones",
    status = "DnsZoneStatus",
    printcolumn(name = "Zone", type_ = "string", json_path = ".spec.zone"),
    printcolumn(name = "Names", type_ = "string", json_path = ".spec.names"),
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].status"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.status=='False')].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("has(self.spec.etcd) != has(self.spec.rfc2136)")
        .message("spec must have exactly one of etcd and rfc2136: it says where records are written")
)]
#[serde(rename_all = "camelCase")]
pub struct DnsZoneSpec {
    /// The name of the zone in lower case and without a dot at its end, such as apps.example.com. It can't be changed.
    #[x_kube(
        validation = Rule::new("self == oldSelf").message("spec.zone can't be changed: make another DnsZone"),
        validation = Rule::new("self.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$')")
            .message("spec.zone must be a domain in lower case without a dot at its end, such as apps.example.com")
    )]
    #[schemars(length(min = 1, max = 200))]
    pub zone: String,
    /// A selector of the namespaces whose Vips may have names in the zone. Without this field, no namespace may.
    /// `{}` admits all. Names of a namespace that is no longer admitted stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed_namespaces: Option<LabelSelector>,
    /// Which names a namespace may have. `Namespace`: those that end in the namespace's name and the zone, such as
    /// shop.red.apps.example.com. `Any`: all of the zone that nobody has yet. Default: `Namespace`.
    #[serde(default)]
    pub names: ZoneNames,
    /// The seconds for which resolvers keep a record, 1 to 86400. Default: 30.
    #[serde(default = "default_ttl_seconds")]
    #[schemars(range(min = 1, max = 86_400))]
    pub ttl_seconds: u32,
    /// The etcd from which CoreDNS's plugin etcd serves the zone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etcd: Option<EtcdRecords>,
    /// A server that takes dynamic updates (RFC 2136), signed by TSIG (RFC 8945).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rfc2136: Option<DynamicUpdates>,
}

fn default_ttl_seconds() -> u32 {
    30
}

/// Which names of a zone a namespace may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ZoneNames {
    #[default]
    Namespace,
    Any,
}

/// Records as keys of an etcd.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct EtcdRecords {
    /// URLs of the etcd's members, such as <https://192.0.2.10:2379>: 1 to 8.
    #[x_kube(
        validation = Rule::new("self.size() >= 1 && self.size() <= 8").message("etcd.endpoints must have 1 to 8 URLs"),
        validation = Rule::new("self.all(e, isURL(e) && url(e).getScheme() in ['http', 'https'])")
            .message("etcd.endpoints must be URLs such as https://192.0.2.10:2379")
    )]
    #[schemars(length(max = 8), inner(length(max = 256)))]
    pub endpoints: Vec<String>,
    /// The prefix of the keys, `path` in the plugin's configuration. Default: /skydns.
    #[serde(default = "default_path")]
    #[x_kube(
        validation = Rule::new("self.matches('^(/[-._A-Za-z0-9]+)+$')")
            .message("etcd.path must be a path such as /skydns, without a slash at its end")
    )]
    #[schemars(length(max = 128))]
    pub path: String,
    /// The name of a Secret in the namespace thuban-dns with `ca.crt`, and `tls.crt` and `tls.key` if the etcd asks for
    /// a client's certificate. Only endpoints of scheme http need none.
    #[serde(default)]
    #[schemars(length(max = 253))]
    pub secret: String,
}

fn default_path() -> String {
    "/skydns".to_owned()
}

/// A server that takes dynamic updates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct DynamicUpdates {
    /// The server's address and TCP port, such as 192.0.2.53:53 or [2001:db8::53]:53.
    #[x_kube(
        validation = Rule::new("self.matches('^([0-9.]+|[[][0-9a-f:.]+[]]):[0-9]{1,5}$')")
            .message("rfc2136.server must be an address and a port, such as 192.0.2.53:53 or [2001:db8::53]:53")
    )]
    #[schemars(length(max = 64))]
    pub server: String,
    /// The name of a Secret in the namespace thuban-dns with `name`, `algorithm` (hmac-sha256, hmac-sha384 or
    /// hmac-sha512) and `secret` (base64) of the TSIG key.
    #[schemars(length(min = 1, max = 253))]
    pub secret: String,
}

/// Whether the zone's records can be written. Only lbaasd writes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct DnsZoneStatus {
    /// `Ready`: the server was asked for the zone, and answered.
    pub conditions: Vec<Condition>,
    /// The latest `metadata.generation` that lbaasd has seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}
