//! The drivers of load balancers: what they ask of a Vip's Service, and what they refuse.
//!
//! With `Xdp` nodes serve the addresses themselves. With `Haproxy` nodes serve NodePorts alone, and HAProxy serves the
//! addresses with nodes as its members. A Vip's Service is the record of what was accepted: what HAProxy does with
//! clients is in an annotation. So a change that is refused leaves everything as it was.

use k8s_openapi::api::core::v1::{Service, ServicePort};
use kube::ResourceExt;
use thuban_api::cidr::Cidr;
use thuban_api::{DRIVER_LABEL, PoolDriver, VipProfileSpec};

use crate::derived::{Refusal, protocol_of};

/// Annotation of a Vip's Service: what HAProxy does with clients, as a VipProfile says it.
pub const TREATMENT_ANNOTATION: &str = "thuban.dev/haproxy";
/// The most ports of a Vip that HAProxy serves: it checks each one at each member, and each one is a NodePort.
pub const MAX_PORTS: usize = 16;
/// The value of the label of Services and EndpointSlices for HAProxy.
pub const HAPROXY: &str = "Haproxy";
/// The limits of VipProfiles, as their CRD has them.
const MAX_RANGES: usize = 64;
const MAX_SECONDS: u32 = 86_400;
const MAX_CONNECTIONS: u32 = 100_000;
/// The length of the longest name of a Secret.
const MAX_NAME: usize = 253;

/// What differs between drivers.
pub trait Driver: Sync {
    /// Refuses what the driver does not serve.
    fn admit(&self, treatment: &VipProfileSpec, ports: &[ServicePort]) -> Result<(), Refusal>;

    /// Makes a Vip's public Service one of the driver. `has`: the ports as the API server has them.
    fn shape(&self, service: &mut Service, treatment: &VipProfileSpec, has: &[ServicePort]);

    /// Returns how the Service's status tells addresses. Nodes serve those of the mode `VIP`.
    fn ip_mode(&self) -> &'static str;

    /// Whether nodes may send packets to the addresses on as fronts.
    fn has_fronts(&self) -> bool;
}

/// Returns what HAProxy does with the clients of a Vip's Service; `None`: HAProxy does not serve the Service.
///
/// Tenants can write the annotation, and lbaasd takes a moment to revert it. So an annotation counts only if a
/// VipProfile can say the same: HAProxy would refuse other numbers, and an unreadable range must admit nobody.
pub fn treatment_of(service: &Service) -> Option<VipProfileSpec> {
    let label = service.labels().get(DRIVER_LABEL)?;
    let said = service.annotations().get(TREATMENT_ANNOTATION)?;
    let treatment: VipProfileSpec = serde_json::from_str(said).ok()?;
    (label == HAPROXY && is_valid(&treatment)).then_some(treatment)
}

/// Whether a VipProfile can say this.
fn is_valid(treatment: &VipProfileSpec) -> bool {
    let within = |number: Option<u32>, most: u32| number.is_none_or(|number| (1..=most).contains(&number));
    let limits = treatment.client_limits.unwrap_or_default();
    let counts = [limits.connections, limits.per_client, limits.per_client_rate];
    let ranges = &treatment.source_ranges;
    let secret = treatment.ssl.as_ref().map(|ssl| ssl.secret.as_str());
    within(treatment.affinity_seconds, MAX_SECONDS)
        && within(treatment.idle_seconds, MAX_SECONDS)
        && counts.into_iter().all(|count| within(count, MAX_CONNECTIONS))
        && ranges.len() <= MAX_RANGES
        && ranges.iter().all(|range| range.parse::<Cidr>().is_ok())
        && secret.is_none_or(is_name)
}

/// Whether a text is the name of a Secret.
fn is_name(text: &str) -> bool {
    let is_usual = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    bytes.len() <= MAX_NAME
        && ends.iter().all(|end| end.is_some_and(|end| is_usual(*end)))
        && bytes.iter().all(|byte| is_usual(*byte) || b"-.".contains(byte))
}

/// Returns a driver.
pub fn of(driver: PoolDriver) -> &'static dyn Driver {
    match driver {
        PoolDriver::Xdp => &Xdp,
        PoolDriver::Haproxy => &Haproxy,
    }
}

struct Xdp;

impl Driver for Xdp {
    fn admit(&self, treatment: &VipProfileSpec, _: &[ServicePort]) -> Result<(), Refusal> {
        let fields = [
            ("ssl", treatment.ssl.is_some()),
            ("proxyProtocol", treatment.proxy_protocol.is_some()),
            ("clientLimits", treatment.client_limits.is_some()),
            ("idleSeconds", treatment.idle_seconds.is_some()),
        ];
        match fields.into_iter().find(|(_, is_set)| *is_set) {
            Some((field, _)) => Err(Refusal::NeedsHaproxy(field)),
            None => Ok(()),
        }
    }

    fn shape(&self, _: &mut Service, _: &VipProfileSpec, _: &[ServicePort]) {}

    fn ip_mode(&self) -> &'static str {
        "VIP"
    }

    fn has_fronts(&self) -> bool {
        true
    }
}

struct Haproxy;

impl Driver for Haproxy {
    fn admit(&self, _: &VipProfileSpec, ports: &[ServicePort]) -> Result<(), Refusal> {
        if ports.len() > MAX_PORTS {
            return Err(Refusal::TooManyPorts(ports.len()));
        }
        match ports.iter().find(|port| protocol_of(port) != "TCP") {
            Some(port) => Err(Refusal::ProtocolNotServed(format!(
                "{}/{}",
                port.port,
                protocol_of(port)
            ))),
            None => Ok(()),
        }
    }

    /// HAProxy chooses the node, so that a node leads what it gets to its own backends, and prefers none of them: all
    /// connections that it gets come from nodes.
    fn shape(&self, service: &mut Service, treatment: &VipProfileSpec, has: &[ServicePort]) {
        let label = (DRIVER_LABEL.to_owned(), HAPROXY.to_owned());
        service.labels_mut().extend([label]);
        // Numbers and texts, which JSON can say.
        let said = serde_json::to_string(treatment).unwrap_or_default();
        let annotation = (TREATMENT_ANNOTATION.to_owned(), said);
        service.annotations_mut().extend([annotation]);
        let spec = service.spec.get_or_insert_default();
        spec.allocate_load_balancer_node_ports = Some(true);
        spec.external_traffic_policy = Some("Local".to_owned());
        spec.session_affinity = Some("None".to_owned());
        spec.session_affinity_config = None;
        for port in spec.ports.iter_mut().flatten() {
            let same = |has: &&ServicePort| has.port == port.port && protocol_of(has) == protocol_of(port);
            port.node_port = has.iter().find(same).and_then(|has| has.node_port);
        }
    }

    fn ip_mode(&self) -> &'static str {
        "Proxy"
    }

    fn has_fronts(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn treatment(said: &Value) -> Option<VipProfileSpec> {
        let service = json!({"metadata": {
            "labels": {DRIVER_LABEL: HAPROXY}, "annotations": {TREATMENT_ANNOTATION: said.to_string()},
        }});
        treatment_of(&serde_json::from_value(service).unwrap())
    }

    #[test]
    fn a_treatment_that_no_profile_can_say_counts_for_nothing() {
        let valid = json!({
            "sourceRanges": ["198.51.100.0/24", "2001:db8::/32"], "affinitySeconds": 86_400, "idleSeconds": 1,
            "ssl": {"secret": "shop-tls.v2"}, "clientLimits": {"connections": 100_000, "perClient": 1},
        });
        assert!(treatment(&valid).is_some());
        for wrong in [
            json!({"sourceRanges": ["no range"]}),
            json!({"sourceRanges": ["198.51.100.0/24\n    bind :22"]}),
            json!({"sourceRanges": [" 198.51.100.0/24"]}),
            json!({"sourceRanges": vec!["198.51.100.0/24"; 65]}),
            json!({"affinitySeconds": 86_401}),
            json!({"idleSeconds": 0}),
            json!({"clientLimits": {"connections": 4_294_967_295_u32}}),
            json!({"clientLimits": {"perClient": 0}}),
            json!({"ssl": {"secret": ""}}),
            json!({"ssl": {"secret": "../../blue/secrets/shop-tls"}}),
            json!({"ssl": {"secret": "shop-tls?watch=true"}}),
            json!({"ssl": {"secret": "a".repeat(254)}}),
        ] {
            assert_eq!(treatment(&wrong), None, "{wrong}");
        }
    }
}
