//! Services and their EndpointSlices, reduced to the fields that are read: the whole types are many times as large, and
//! a cluster has a slice for each hundred backends.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt};
use serde::{Deserialize, Serialize};
use thuban_api::{FRONT_CONDITION, HEALTH_CHECK_ANNOTATION, TUNNEL_MODE};
use thuban_rows::{HealthCheck, MAX_CLIENTS};

/// Label of a slice: the name of its Service.
pub const SERVICE_LABEL: &str = "kubernetes.io/service-name";

/// Labels of Services that have addresses, and of slices, that network plugins leave alone: another proxy serves them,
/// or nobody does.
pub const LEFT_ALONE: [&str; 2] = [
    "service.kubernetes.io/service-proxy-name",
    "service.kubernetes.io/headless",
];

fn is_left_alone(labels: &BTreeMap<String, String>) -> bool {
    LEFT_ALONE.iter().any(|label| labels.contains_key(*label))
}

/// The IP protocol number of UDP.
pub const UDP: u8 = 17;
/// The protocols that droplets forward to Services: IP protocol number, and name in Kubernetes.
const PROTOCOLS: [(u8, &str); 3] = [(6, "TCP"), (UDP, "UDP"), (132, "SCTP")];

/// Returns the IP protocol number; none if droplets can't forward the protocol.
pub fn protocol_number(name: &str) -> Option<u8> {
    let known = PROTOCOLS.iter().find(|(_, known)| *known == name);
    known.map(|(number, _)| *number)
}

/// Returns the name in Kubernetes of a protocol that droplets forward.
pub fn protocol_name(number: u8) -> Option<&'static str> {
    let known = PROTOCOLS.iter().find(|(known, _)| *known == number);
    known.map(|(_, name)| *name)
}

#[derive(Clone, Debug, Default, Deserialize, Resource, Serialize)]
#[resource(inherit = k8s_openapi::api::core::v1::Service)]
pub struct Service {
    pub metadata: ObjectMeta,
    pub spec: Option<ServiceSpec>,
    pub status: Option<ServiceStatus>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceStatus {
    pub load_balancer: Option<LoadBalancer>,
    pub conditions: Option<Vec<Condition>>,
}

/// A condition of a Service's status.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    pub status: String,
    pub reason: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct LoadBalancer {
    pub ingress: Option<Vec<Ingress>>,
}

/// An address of a load balancer.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Ingress {
    pub ip: Option<String>,
    /// `Proxy`: packets reach nodes at other addresses.
    pub ip_mode: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSpec {
    #[serde(rename = "type")]
    pub kind: Option<String>,
    #[serde(rename = "clusterIPs")]
    pub cluster_ips: Option<Vec<String>>,
    pub ports: Option<Vec<Port>>,
    pub internal_traffic_policy: Option<String>,
    pub external_traffic_policy: Option<String>,
    pub health_check_node_port: Option<i32>,
    #[serde(rename = "externalIPs")]
    pub external_ips: Option<Vec<String>>,
    pub load_balancer_source_ranges: Option<Vec<String>>,
    pub session_affinity: Option<String>,
    pub session_affinity_config: Option<AffinityConfig>,
}

/// Ranges of clients by their family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clients {
    pub v4: BTreeSet<IpNet>,
    pub v6: BTreeSet<IpNet>,
}

impl Clients {
    /// Returns those of an address's family.
    pub fn of(&self, address: IpAddr) -> &BTreeSet<IpNet> {
        if address.is_ipv4() { &self.v4 } else { &self.v6 }
    }
}

/// Whether a range is of IPv6 addresses that stand for IPv4 addresses: rows have none.
fn is_mapped(range: &IpNet) -> bool {
    matches!(range, IpNet::V6(range) if range.addr().to_ipv4_mapped().is_some())
}

/// A port of a Service, or of a slice.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Port {
    pub name: Option<String>,
    pub protocol: Option<String>,
    /// The port number. A slice without one says nothing of a port.
    pub port: Option<i32>,
    /// The port of a Service at each address of each node.
    pub node_port: Option<i32>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct AffinityConfig {
    #[serde(rename = "clientIP")]
    pub client_ip: Option<ClientIp>,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientIp {
    pub timeout_seconds: Option<i32>,
}

impl Service {
    /// Returns the Service's addresses in this cluster, the first of its preferred family; none for a headless Service,
    /// one that only names another host, or one with a label of [`LEFT_ALONE`].
    pub fn cluster_ips(&self) -> Vec<IpAddr> {
        let spec = self.spec.as_ref().filter(|_| !is_left_alone(self.labels()));
        let spec = spec.filter(|spec| spec.kind.as_deref() != Some("ExternalName"));
        let texts = spec.and_then(|spec| spec.cluster_ips.as_deref());
        let texts = texts.unwrap_or_default().iter();
        texts.filter_map(|text| text.parse().ok()).collect()
    }

    /// Returns the ports as the spec has them.
    pub fn ports(&self) -> &[Port] {
        let ports = self.spec.as_ref().and_then(|spec| spec.ports.as_deref());
        ports.unwrap_or_default()
    }

    /// Whether clients outside reach only the backends of the node that their packets arrive at.
    pub fn is_external_local(&self) -> bool {
        let policy = self.spec.as_ref().map(|spec| &spec.external_traffic_policy);
        policy.is_some_and(|policy| policy.as_deref() == Some("Local"))
    }

    /// Whether pods reach only the backends of their own node.
    pub fn is_internal_local(&self) -> bool {
        let policy = self.spec.as_ref().map(|spec| &spec.internal_traffic_policy);
        policy.is_some_and(|policy| policy.as_deref() == Some("Local"))
    }

    /// Returns the port where load balancers ask nodes whether they have backends.
    pub fn health_port(&self) -> Option<u16> {
        let spec = self.spec.as_ref().filter(|_| self.is_balanced())?;
        let port = spec.health_check_node_port.filter(|_| self.is_external_local())?;
        u16::try_from(port).ok().filter(|port| *port != 0)
    }

    fn is_balanced(&self) -> bool {
        let spec = self.spec.as_ref();
        spec.is_some_and(|spec| spec.kind.as_deref() == Some("LoadBalancer"))
    }

    /// Returns the addresses of which the Service's user says that they lead to nodes.
    pub fn external_ips(&self) -> Vec<IpAddr> {
        let spec = self.spec.as_ref();
        let spec = spec.filter(|spec| spec.kind.as_deref() != Some("ExternalName"));
        let texts = spec.and_then(|spec| spec.external_ips.as_deref());
        let texts = texts.unwrap_or_default().iter();
        texts.filter_map(|text| text.parse().ok()).collect()
    }

    /// Returns the addresses of load balancers whose packets reach nodes as they were sent.
    pub fn balancers(&self) -> Vec<IpAddr> {
        let status = self.status.as_ref().filter(|_| self.is_balanced());
        let ingress = status
            .and_then(|status| status.load_balancer.as_ref()?.ingress.as_deref())
            .unwrap_or_default()
            .iter()
            .filter(|ingress| ingress.ip_mode.as_deref() != Some("Proxy"));
        ingress
            .filter_map(|ingress| ingress.ip.as_ref()?.parse().ok())
            .collect()
    }

    /// Returns the ranges of the clients that may send to load balancers' addresses; none: all clients may. What is no
    /// range, and what is too much, admits nobody.
    pub fn clients(&self) -> Option<Clients> {
        let spec = self.spec.as_ref().filter(|_| self.is_balanced());
        let texts = spec.and_then(|spec| spec.load_balancer_source_ranges.as_deref());
        let texts = texts.filter(|texts| !texts.is_empty())?;
        let ranges = texts.iter().filter_map(|text| text.trim().parse::<IpNet>().ok());
        let ranges: BTreeSet<IpNet> = ranges.map(|range| range.trunc()).collect();
        let of = |is_v4| {
            let own = ranges.iter().filter(|range| range.addr().is_ipv4() == is_v4);
            let own = own.filter(|range| !is_mapped(range));
            own.take(MAX_CLIENTS).copied().collect()
        };
        Some(Clients {
            v4: of(true),
            v6: of(false),
        })
    }

    /// Returns the addresses that are fronts: droplets take their packets at their NICs for any backend.
    pub fn fronts(&self) -> Vec<IpAddr> {
        if self.front_conditions().next().is_some() && !self.is_external_local() {
            self.balancers()
        } else {
            Vec::new()
        }
    }

    /// Whether answers go back through the tunnel to the droplet that took the client's packet as a front.
    pub fn is_front_tunnel(&self) -> bool {
        let mut fronts = self.front_conditions();
        fronts.any(|condition| condition.reason.as_deref() == Some(TUNNEL_MODE))
    }

    /// Yields the conditions by which lbaasd says that the addresses are fronts: at most one.
    fn front_conditions(&self) -> impl Iterator<Item = &Condition> {
        let conditions = self
            .status
            .iter()
            .flat_map(|status| status.conditions.iter().flatten());
        conditions.filter(|condition| condition.kind == FRONT_CONDITION && condition.status == "True")
    }

    /// Returns the check of the backends of fronts. A wrong annotation is none: lbaasd says so.
    pub fn health_check(&self) -> Option<HealthCheck> {
        let text = self.annotations().get(HEALTH_CHECK_ANNOTATION)?;
        let check = thuban_api::HealthCheck::of_annotation(text).ok()?;
        Some((&check).into())
    }

    /// Returns the name of the Service's Endpoint: `<service>-<first 8 of its UID>`.
    pub fn endpoint_name(&self) -> String {
        let uid: String = self.uid().unwrap_or_default().chars().take(8).collect();
        format!("{}-{uid}", self.name_any())
    }
}

#[derive(Clone, Debug, Default, Deserialize, Resource, Serialize)]
#[resource(inherit = k8s_openapi::api::discovery::v1::EndpointSlice)]
#[serde(rename_all = "camelCase")]
pub struct EndpointSlice {
    pub metadata: ObjectMeta,
    pub endpoints: Option<Vec<Backend>>,
    pub ports: Option<Vec<Port>>,
}

/// An endpoint of a slice.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Backend {
    pub addresses: Vec<String>,
    pub conditions: Option<Conditions>,
    pub node_name: Option<String>,
    pub target_ref: Option<Target>,
    pub hints: Option<Hints>,
}

/// The places whose clients a backend is for, by the Service's `trafficDistribution` or topology mode.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Hints {
    pub for_zones: Option<Vec<Named>>,
    pub for_nodes: Option<Vec<Named>>,
}

/// A zone or a node.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Named {
    pub name: String,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Conditions {
    pub ready: Option<bool>,
    pub serving: Option<bool>,
    pub terminating: Option<bool>,
}

/// The object that has the address.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub struct Target {
    pub kind: Option<String>,
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub uid: Option<String>,
}

impl Target {
    /// Whether the reference means this pod, or nothing that is known to be another object.
    pub fn may_be(&self, namespace: &str, name: &str, uid: &str) -> bool {
        let agrees = |said: &Option<String>, is: &str| said.as_ref().is_none_or(|said| said == is);
        self.kind.as_deref().is_none_or(|kind| kind == "Pod")
            && agrees(&self.namespace, namespace)
            && agrees(&self.name, name)
            && agrees(&self.uid, uid)
    }
}

impl EndpointSlice {
    /// Returns the name of the Service that the slice is of; none for a slice with a label of [`LEFT_ALONE`].
    pub fn service(&self) -> Option<&str> {
        let labels = self.metadata.labels.as_ref()?;
        if is_left_alone(labels) {
            return None;
        }
        labels.get(SERVICE_LABEL).map(String::as_str)
    }

    /// Yields the addresses that the slice names, in its order.
    pub fn addresses(&self) -> impl Iterator<Item = IpAddr> {
        self.backends().iter().filter_map(Backend::address)
    }

    pub fn backends(&self) -> &[Backend] {
        self.endpoints.as_deref().unwrap_or_default()
    }
}

impl Backend {
    /// Returns the first address: the others reach the same backend, and kube-proxy doesn't use them either.
    pub fn address(&self) -> Option<IpAddr> {
        self.addresses.first()?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_front_condition_says_whether_answers_take_the_tunnel() {
        let service = |status: &str, reason: &str| {
            let condition = json!({"type": FRONT_CONDITION, "status": status, "reason": reason});
            let service = json!({"metadata": {}, "status": {"conditions": [condition]}});
            serde_json::from_value::<Service>(service).unwrap()
        };
        assert!(service("True", "Tunnel").is_front_tunnel());
        assert!(!service("True", "Dsr").is_front_tunnel());
        assert!(!service("False", "Tunnel").is_front_tunnel());
        assert!(!Service::default().is_front_tunnel());
    }

    #[test]
    fn clients_are_told_by_family_and_nonsense_admits_nobody() {
        let clients = |ranges: &[String]| {
            let service = json!({
                "metadata": {},
                "spec": {"type": "LoadBalancer", "loadBalancerSourceRanges": ranges},
            });
            let service: Service = serde_json::from_value(service).unwrap();
            let texts = |ranges: BTreeSet<IpNet>| ranges.iter().map(ToString::to_string).collect::<Vec<_>>();
            service
                .clients()
                .map(|clients| [texts(clients.v4), texts(clients.v6)])
        };
        assert_eq!(clients(&[]), None, "all clients may send");
        let ranges = [
            " 198.51.100.7/24 ",
            "nonsense",
            "::ffff:198.51.100.0/120",
            "2001:db8:1::/48",
        ];
        let ranges = ranges.map(str::to_owned);
        assert_eq!(
            clients(&ranges),
            Some([vec!["198.51.100.0/24".into()], vec!["2001:db8:1::/48".into()]])
        );
        assert_eq!(clients(&ranges[1..3]), Some([vec![], vec![]]), "nobody may");
        let many: Vec<String> = (0..70).map(|last| format!("198.51.100.{last}/32")).collect();
        assert_eq!(clients(&many).unwrap()[0].len(), MAX_CLIENTS);
    }
}
