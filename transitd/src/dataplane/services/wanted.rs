//! What the tables are to say, from the operator's rows.

use std::collections::BTreeSet;

use thuban_common::services::{BackendEntry, FRONTS, SERVICE_LOCAL, SERVICE_TUNNEL, ServiceKey};
use thuban_common::tables::{DropletAddress, EndpointKey};
use thuban_rows::{Front, FrontPort, Port, Service};

use super::super::contract::{backend_entry, front_key, key_of, service_key};
use super::super::quota::Usage;
use super::held::{Address, rows};

/// What the tables are to say of an address of a service or a front.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub key: EndpointKey,
    /// The VNI of the VPC in whose share the rows count.
    pub(super) payer: u32,
    pub(super) ports: Vec<WantedPort>,
    /// Of a front: its service, as `namespace/name`; empty: nobody is told that it is served.
    pub(super) service: String,
}

#[derive(Clone, Debug)]
pub(super) struct WantedPort {
    pub(super) key: ServiceKey,
    pub(super) affinity: u32,
    pub(super) flags: u32,
    pub(super) targets: BTreeSet<Target>,
    /// Those of them that get no new connections.
    pub(super) resting: BTreeSet<BackendEntry>,
}

/// A backend: in the order of [`BackendEntry`], because a table has each of these once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target {
    pub(super) backend: BackendEntry,
    /// Of a front's backend: the VNI of its VPC, and its droplet.
    pub(super) home: Option<(u32, DropletAddress)>,
}

impl From<&Service> for Wanted {
    fn from(service: &Service) -> Self {
        let key = key_of(service);
        let port = |port: &Port| WantedPort {
            key: service_key(key, port.protocol, port.port),
            affinity: port.affinity,
            flags: if port.local { SERVICE_LOCAL } else { 0 },
            targets: port
                .backends
                .iter()
                .map(|backend| Target {
                    backend: backend_entry(backend),
                    home: None,
                })
                .collect(),
            resting: BTreeSet::new(),
        };
        Self {
            key,
            payer: key.vni,
            ports: service.ports.iter().map(port).collect(),
            service: String::new(),
        }
    }
}

impl From<&Front> for Wanted {
    fn from(front: &Front) -> Self {
        let (key, vni) = (front_key(front.address), front.vni.get());
        let port = |port: &FrontPort| WantedPort {
            key: service_key(key, port.protocol, port.port),
            affinity: port.affinity,
            flags: if front.tunnel { SERVICE_TUNNEL } else { 0 },
            targets: port
                .backends
                .iter()
                .map(|(backend, droplet)| Target {
                    backend: backend_entry(backend),
                    home: Some((vni, droplet.octets())),
                })
                .collect(),
            resting: port
                .backends
                .keys()
                .filter(|backend| port.resting.contains(&backend.address))
                .map(backend_entry)
                .collect(),
        };
        Self {
            key,
            payer: vni,
            ports: front.ports.iter().map(port).collect(),
            service: front.service.clone(),
        }
    }
}

impl Wanted {
    /// Returns the number of ports with backends, only of a front: by it programs know whether the address is in use.
    pub(super) fn fronted_ports(&self) -> u32 {
        if self.key.vni != FRONTS {
            return 0;
        }
        let ports = self.ports.iter();
        ports.filter(|port| !port.targets.is_empty()).count() as u32
    }

    /// Returns the rows that the address is to have, where it has those of `held` now.
    pub(super) fn rows(&self, held: Option<&Address>) -> Usage {
        let vni = self.key.vni;
        let ports = self.ports.iter().map(|port| {
            let old = held.and_then(|held| held.ports.get(&port.key));
            let former = old.and_then(|old| {
                if old.now.leads_as(port) {
                    old.former.as_ref()
                } else {
                    Some(&old.now)
                }
            });
            rows(vni, port.targets.len(), former.map(|former| former.targets.len()))
        });
        ports.fold(Usage::OWN, Usage::plus)
    }
}

impl From<&Self> for Wanted {
    fn from(wanted: &Self) -> Self {
        wanted.clone()
    }
}
