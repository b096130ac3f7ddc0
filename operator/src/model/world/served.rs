//! Tells network policy which services nodes serve for the pods of each VPC, and whom their backends are.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use thuban_rows::Port;

use super::policy::Enforcement;
use super::services::NodeService;
use super::{EndpointName, Service, World};
use crate::model::policy::{BackendKind, ClassContent, Served, ServedBackend, ServedPort};

/// The classes of pods behind services, each asked for once.
type Classes = HashMap<EndpointName, Arc<ClassContent>>;

/// What policies know of the services that nodes serve.
#[derive(Debug, Default)]
pub struct KnownServed {
    is_stale: bool,
    /// The pods behind the services.
    behind: HashSet<EndpointName>,
}

impl KnownServed {
    /// Whether there may be other services, or other pods behind them, than policies know.
    pub const fn is_stale(&self) -> bool {
        self.is_stale
    }

    /// Takes note of a change of a service, or of who uses it.
    pub const fn note_service(&mut self) {
        self.is_stale = true;
    }

    /// Takes note of a change of an endpoint.
    pub fn note_endpoint(&mut self, name: &EndpointName) {
        self.is_stale |= self.behind.contains(name);
    }
}

impl Enforcement {
    pub(super) fn forget_served(&mut self) {
        self.known_served = KnownServed::default();
        self.policies.forget_served();
    }
}

impl World {
    /// Tells policies of all services that nodes serve, if they may be others than before.
    pub(super) fn renew_served(&mut self) {
        let enforcement = &mut self.enforcement;
        if !enforcement.known_served.is_stale && !enforcement.policies.has_touched() {
            return;
        }
        enforcement.known_served = KnownServed::default();
        let vpcs: Vec<String> = enforcement.rollouts.keys().cloned().collect();
        let mut classes = Classes::new();
        for vpc in vpcs {
            self.tell_served(&vpc, &mut classes);
        }
    }

    /// Tells policies of the services that nodes serve for a VPC to whose first endpoint they apply.
    pub(super) fn begin_served(&mut self, vpc: &str) {
        self.tell_served(vpc, &mut Classes::new());
    }

    fn tell_served(&mut self, vpc: &str, classes: &mut Classes) {
        let mut served = self.served_of(vpc, classes);
        let policies = &mut self.enforcement.policies;
        // No packet reaches a service without backends, and most get the same ones back: sets need not change twice.
        for service in &mut served {
            for port in &mut service.ports {
                if port.backends.is_empty() {
                    port.backends = last_backends(policies.served(vpc), service.address, port);
                }
            }
        }
        policies.set_served(vpc, served);
        self.enforcement
            .known_served
            .behind
            .extend(classes.keys().cloned());
    }

    fn served_of(&self, vpc: &str, classes: &mut Classes) -> Vec<Served> {
        let Some(known) = self.vpcs.get(vpc) else {
            return Vec::new();
        };
        let services = self.node_services_of(vpc, known);
        services
            .map(|(service, told)| Served {
                address: told.address,
                ports: told
                    .ports
                    .iter()
                    .map(|port| self.served_port(service, &told, port, classes))
                    .collect(),
            })
            .collect()
    }

    fn served_port(
        &self,
        service: &Service,
        told: &NodeService,
        port: &Port,
        classes: &mut Classes,
    ) -> ServedPort {
        let mut backends = Vec::new();
        for backend in &port.backends {
            let kind = if told.inside {
                BackendKind::Pod(self.class_behind(service, backend.address, classes))
            } else {
                BackendKind::Outside(backend.address)
            };
            let backend = ServedBackend {
                kind,
                port: backend.port,
            };
            if !backends.contains(&backend) {
                backends.push(backend);
            }
        }
        ServedPort {
            protocol: port.protocol,
            port: port.port,
            backends,
        }
    }

    /// Returns what selects the pod at an address of a service's VPC. Nothing selects one that isn't known.
    fn class_behind(&self, service: &Service, address: IpAddr, classes: &mut Classes) -> Arc<ClassContent> {
        let vni = self.network_vni(&service.network);
        let Some(name) = vni.and_then(|vni| self.holder(vni, address)) else {
            return Arc::default();
        };
        if let Some(known) = classes.get(name) {
            return Arc::clone(known);
        }
        let seen = self.seen(name);
        let class = seen.map(|(_, member)| self.enforcement.policies.class(&member));
        let class = Arc::new(class.unwrap_or_default());
        classes.insert(name.clone(), Arc::clone(&class));
        class
    }
}

/// Returns the backends that a port of a service had when it had some.
fn last_backends(known: &[Served], address: IpAddr, port: &ServedPort) -> Vec<ServedBackend> {
    let known = known.iter().filter(|known| known.address == address);
    let mut ports = known.flat_map(|known| &known.ports);
    let is_same = |known: &&ServedPort| (known.protocol, known.port) == (port.protocol, port.port);
    let known = ports.find(is_same);
    known.map(|known| known.backends.clone()).unwrap_or_default()
}
