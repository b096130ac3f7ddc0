//! The drivers of load balancers: what they ask of a Vip's Service, and what they refuse.
//!
//! With `Xdp` nodes serve the addresses themselves. With `Haproxy` nodes serve NodePorts alone, and HAProxy serves the
//! addresses with nodes as its members. A Vip's Service is the record of what was accepted: what HAProxy does with
//! clients is in an annotation. So a change that is refused leaves everything as it was.

use k8s_openapi::api::core::v1::{Service, ServicePort};
use kube::ResourceExt;
use thuban_api::{DRIVER_LABEL, PoolDriver, VipProfileSpec};

use crate::derived::{Refusal, protocol_of};

/// Annotation of a Vip's Service: what HAProxy does with clients, as a VipProfile says it.
pub const TREATMENT_ANNOTATION: &str = "thuban.dev/haproxy";
/// The value of the label of Services and EndpointSlices for HAProxy.
pub const HAPROXY: &str = "Haproxy";

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
pub fn treatment_of(service: &Service) -> Option<VipProfileSpec> {
    let label = service.labels().get(DRIVER_LABEL)?;
    let said = service.annotations().get(TREATMENT_ANNOTATION)?;
    serde_json::from_str(said).ok().filter(|_| label == HAPROXY)
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
