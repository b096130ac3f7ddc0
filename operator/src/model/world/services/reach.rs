//! Which droplets have a service's rows, and what of its backends each is told.
//!
//! Invariant: of a port whose traffic stays on its node a droplet is told its own backends alone, so that a backend that comes
//! or goes costs a row of its droplet, however many there are.

use std::collections::BTreeSet;
use std::net::IpAddr;

use thuban_api::identifiers::mapped;
use thuban_proto::transit::{ExposedPort, Row, ServiceBackend, ServicePort};

use super::{EndpointName, Key, Owner, Rows, Service, World};
use crate::model::rows::{self, NodeService, PackedRow};

/// Addresses of a VPC's own that its services have together: all its droplets are told all of them.
pub const MOST_OWN_ADDRESSES: usize = 256;
/// Droplets to which the others send on what comes for a port: all are told of them at each change.
const MOST_PEERS: usize = 64;

impl World {
    pub(in super::super) fn contribute_service(&self, name: &EndpointName) -> Option<Rows> {
        let service = self.service(name)?;
        let network = self.networks.get(&service.network)?;
        let vpc = self.vpcs.get(&network.vpc)?;
        let mut made = Rows::new();
        if service.is_exposed() {
            self.expose(name, service, vpc.vni, vpc.host_access, &mut made);
        }
        if service.by_node {
            return Some(made);
        }
        let bouncers = self.bouncers_of_vpc(&network.vpc);
        let participants = if service.is_local() {
            self.participants(&network.vpc)
        } else {
            BTreeSet::new()
        };
        for (address, ports) in &service.tables {
            if !self.is_held_by(name, *address) {
                continue;
            }
            let subscribers = self.subscriptions.get(&(vpc.vni, *address)).into_iter().flatten();
            let droplets = bouncers.iter().chain(&participants).copied();
            let droplets: BTreeSet<&str> = droplets.chain(subscribers.map(String::as_str)).collect();
            let row = |droplet: Option<&str>| {
                let ports: Vec<_> = ports.iter().map(|port| service.told(port, droplet)).collect();
                rows::service(vpc.vni, *address, &ports)
            };
            service.share(&droplets, row, &mut made);
        }
        Some(made)
    }

    /// What nodes send on to a service. Only in the VPC of their own endpoints do they reach the backends of others, by themselves.
    fn expose(&self, name: &EndpointName, service: &Service, vni: u32, is_nodes_own: bool, made: &mut Rows) {
        for (address, ports) in &service.exposed {
            if !self.is_held_by(name, *address) {
                continue;
            }
            let ports: Vec<ExposedPort> = ports
                .iter()
                .map(|port| ExposedPort {
                    peers: self.peers(service, port),
                    ..port.clone()
                })
                .collect();
            let is_known_everywhere = is_nodes_own || ports.iter().any(|port| !port.peers.is_empty());
            let droplets: BTreeSet<&str> = if is_known_everywhere {
                self.droplets.keys().map(String::as_str).collect()
            } else {
                let local = ports.iter().filter(|port| port.local);
                let backends = local.flat_map(|port| &port.backends);
                let homes = backends.filter_map(|backend| service.home(backend));
                homes.filter(|home| self.droplets.contains_key(*home)).collect()
            };
            let row = |droplet: Option<&str>| {
                let ports: Vec<_> = ports.iter().map(|port| service.told(port, droplet)).collect();
                rows::exposed(
                    vni,
                    *address,
                    rows::Exposure {
                        ports: &ports,
                        outside: &service.outside,
                        health_port: service.health_port,
                        service: &format!("{}/{}", name.0, service.name),
                    },
                )
            };
            service.share(&droplets, row, made);
        }
    }

    /// Droplets to which others send on what comes to a port of theirs.
    fn peers(&self, service: &Service, port: &ExposedPort) -> Vec<Vec<u8>> {
        if !service.by_peers || port.node_port == 0 {
            return Vec::new();
        }
        let homes = port.backends.iter().filter_map(|backend| service.home(backend));
        let homes: BTreeSet<&str> = homes.collect();
        let addresses = homes.into_iter().filter_map(|home| self.droplets.get(home));
        addresses
            .take(MOST_PEERS)
            .map(|address| mapped(*address).to_vec())
            .collect()
    }

    /// Whether no younger service has the address.
    fn is_held_by(&self, name: &EndpointName, address: IpAddr) -> bool {
        self.services.is_own(name, address) || self.service_at(address) == Some(name)
    }

    /// Droplets on which endpoints of a VPC live.
    fn participants(&self, vpc: &str) -> BTreeSet<&str> {
        let networks = self.networks.iter().filter(|(_, network)| network.vpc == vpc);
        networks
            .flat_map(|(name, _)| self.endpoint_droplets(name))
            .collect()
    }

    /// The first endpoint of a VPC came to a droplet, or the last one went.
    pub(in super::super) fn touch_local_services(&mut self, vpc: &str) {
        let local = self.services.local.iter();
        let local = local.filter(|name| {
            let service = self.service(name);
            let network = service.and_then(|service| self.networks.get(&service.network));
            network.is_some_and(|network| network.vpc == vpc)
        });
        let owners: Vec<_> = local.cloned().map(Owner::Service).collect();
        self.dirty.extend(owners);
    }

    /// The VPC whose row names a service's own addresses.
    pub(super) fn touch_own_addresses(&mut self, service: &Service) {
        if !service.own_addresses.is_empty() {
            let vpc = self.networks.get(&service.network).map(|network| &network.vpc);
            self.dirty.extend(vpc.cloned().map(Owner::Vpc));
        }
    }

    /// Addresses of a VPC's own that services have.
    pub fn service_addresses_of(&self, vpc: &str) -> BTreeSet<IpAddr> {
        let services = self.services_of_vpc(vpc);
        let services = services.filter_map(|name| self.service(name));
        let services = services.filter(|service| !service.by_node);
        let addresses: BTreeSet<_> = services
            .flat_map(|service| service.own_addresses.iter().copied())
            .collect();
        // Two may have been claimed at once.
        addresses.into_iter().take(MOST_OWN_ADDRESSES).collect()
    }

    /// The rows of a VPC itself, by which droplets know addresses of services among its own.
    pub fn vpc_rows(&self, vpc: &str) -> Vec<(String, Key)> {
        let keys = self.keys_of(&Owner::Vpc(vpc.to_owned()));
        keys.filter(|(_, key)| matches!(key, Key::Vpc(_)))
            .cloned()
            .collect()
    }

    /// The rows that must be acked before the service is Provisioned: bouncers', not its subscribers'; of one whose traffic
    /// stays on its nodes all; of one that nodes serve, those of its own VPC.
    pub fn service_rows(&self, name: &EndpointName) -> Vec<(String, Key)> {
        let known = self.service(name);
        let network = known.and_then(|service| self.networks.get(&service.network));
        let (Some(service), Some(network)) = (known, network) else {
            return Vec::new();
        };
        if service.by_node {
            let keys = self.keys_of(&Owner::Vpc(network.vpc.clone()));
            let is_own = |key: &Key| {
                let mut addresses = service.tables.iter().map(|(address, _)| *address);
                matches!(key, Key::NodeService(_, of) if addresses.any(|address| address == *of))
            };
            return keys.filter(|(_, key)| is_own(key)).cloned().collect();
        }
        let bouncers = self.bouncers_of_vpc(&network.vpc);
        let is_required = |droplet: &str| service.is_local() || bouncers.contains(droplet);
        let keys = self.keys_of(&Owner::Service(name.clone()));
        let keys = keys.filter(|(droplet, key)| matches!(key, Key::Service(..)) && is_required(droplet));
        let mut rows: Vec<_> = keys.cloned().collect();
        if !rows.is_empty() && !service.own_addresses.is_empty() {
            rows.extend(self.vpc_rows(&network.vpc));
        }
        rows
    }
}

impl Service {
    fn home(&self, backend: &ServiceBackend) -> Option<&str> {
        self.home_of(&backend.address)
    }

    fn home_of(&self, address: &[u8]) -> Option<&str> {
        self.homes.get(&rows::address(address)?).map(String::as_str)
    }

    /// A port as a droplet is told it; none: one that has no backends.
    fn told<P: HasBackends>(&self, port: &P, droplet: Option<&str>) -> P {
        let mut told = port.clone();
        told.retain(|address| droplet.is_some() && self.home_of(address) == droplet);
        told
    }

    /// The rows by which droplets serve it for the pods of a VPC.
    pub(in super::super) fn share_by_node(
        &self,
        droplets: &BTreeSet<&str>,
        vni: u32,
        service: &NodeService,
        made: &mut Rows,
    ) {
        let row = |droplet: Option<&str>| {
            let ports: Vec<_> = service
                .ports
                .iter()
                .map(|port| self.told(port, droplet))
                .collect();
            rows::node_service(
                vni,
                &NodeService {
                    ports: &ports,
                    ..*service
                },
            )
        };
        self.share(droplets, row, made);
    }

    /// Gives each droplet its row; those without backends have one together.
    fn share(&self, droplets: &BTreeSet<&str>, row: impl Fn(Option<&str>) -> (Key, Row), made: &mut Rows) {
        let (key, common) = row(None);
        let common = PackedRow::new(&common);
        let homes: BTreeSet<&str> = self.homes.values().map(String::as_str).collect();
        for droplet in droplets {
            let own = if homes.contains(droplet) {
                PackedRow::new(&row(Some(droplet)).1)
            } else {
                common.clone()
            };
            made.insert(((*droplet).to_owned(), key.clone()), own);
        }
    }
}

trait HasBackends: Clone {
    /// Of backends that are told their own droplet alone, those with such an address.
    fn retain(&mut self, is_told: impl Fn(&[u8]) -> bool);
}

impl HasBackends for ServicePort {
    fn retain(&mut self, is_told: impl Fn(&[u8]) -> bool) {
        if self.local {
            self.backends.retain(|backend| is_told(&backend.address));
        }
    }
}

impl HasBackends for ExposedPort {
    fn retain(&mut self, is_told: impl Fn(&[u8]) -> bool) {
        if self.local {
            self.backends.retain(|backend| is_told(&backend.address));
            self.ending.retain(|address| is_told(address));
        }
    }
}
