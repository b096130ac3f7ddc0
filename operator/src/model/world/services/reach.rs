//! Decides which droplets have a service's rows, and which of its backends each droplet is told.
//!
//! Invariant: for a port whose traffic stays on its node, a droplet is told only its own backends. So adding or
//! removing a backend costs one row of its droplet, however many backends there are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use thuban_api::identifiers::Vni;
use thuban_rows::{self as rows, Backend, Exposed, ExposedPort, Front, FrontPort, Port, Row, Underlay};

use super::near::{Nearness, Zones};
use super::{EndpointName, Key, NodeService, Owner, Rows, Service, World};
use crate::model::rows::PackedRow;

/// The most addresses of a VPC's own that its services have together: all droplets of the VPC are told all of them.
pub const MAX_OWN_ADDRESSES: usize = 256;
/// The most droplets to which the others send connections for one port: all droplets are told of them at each change.
const MAX_PEERS: usize = 64;
/// The most such droplets for all ports of a service together.
const MAX_PEERS_TOGETHER: usize = 256;

impl World {
    pub(in super::super) fn contribute_service(&self, name: &EndpointName) -> Option<Rows> {
        let service = self.service(name)?;
        let network = self.networks.get(&service.network)?;
        let vpc = self.vpcs.get(&network.vpc)?;
        let mut made = Rows::new();
        if service.is_exposed() {
            self.expose(name, service, vpc.vni, vpc.host_access, &mut made);
        }
        if self.has_fronts(service) {
            self.front(name, service, vpc.vni, &mut made);
        }
        if service.by_node {
            return Some(made);
        }
        let bouncers = self.bouncers_of_vpc(&network.vpc);
        let endpoint_droplets_of = if service.is_local() {
            self.endpoint_droplets_of(&network.vpc)
        } else {
            BTreeSet::new()
        };
        for (address, ports) in &service.tables {
            if !self.is_held_by(name, *address) {
                continue;
            }
            let subscribers = self.subscriptions.get(&(vpc.vni, *address)).into_iter().flatten();
            let droplets = bouncers.iter().chain(&endpoint_droplets_of).copied();
            let droplets: BTreeSet<&str> = droplets.chain(subscribers.map(String::as_str)).collect();
            let row = |ports: &[Port]| {
                Row::Service(rows::Service {
                    vni: vpc.vni,
                    address: *address,
                    ports: ports.to_vec(),
                })
            };
            service.share(&droplets, ports, row, &self.services.zones, &mut made);
        }
        Some(made)
    }

    /// Adds the rows by which nodes send connections on to a service. Nodes reach the backends of other nodes by
    /// themselves only in the VPC of their own endpoints.
    fn expose(&self, name: &EndpointName, service: &Service, vni: Vni, is_nodes_own: bool, made: &mut Rows) {
        for (address, ports) in &service.exposed {
            if !self.is_held_by(name, *address) {
                continue;
            }
            let most = (MAX_PEERS_TOGETHER / ports.len().max(1)).clamp(1, MAX_PEERS);
            let ports: Vec<ExposedPort> = ports
                .iter()
                .map(|port| {
                    let free = |number: &u16| self.may_have(name, (port.protocol, *number), vni);
                    let port = ExposedPort {
                        node_port: port.node_port.filter(free),
                        ..port.clone()
                    };
                    let peers = if service.by_peers {
                        self.peers(service, &port, (address.is_ipv6(), most))
                    } else {
                        BTreeSet::new()
                    };
                    ExposedPort { peers, ..port }
                })
                .collect();
            let is_known_everywhere = is_nodes_own || ports.iter().any(|port| !port.peers.is_empty());
            let droplets: BTreeSet<&str> = if is_known_everywhere {
                self.droplets.keys().map(String::as_str).collect()
            } else {
                let backends = ports.iter().flat_map(|port| port.local.iter().flatten());
                let homes = backends.filter_map(|backend| service.home(backend));
                homes.filter(|home| self.droplets.contains_key(*home)).collect()
            };
            let row = |ports: &[ExposedPort]| {
                // Addresses of the other family are left out.
                let outside = service.outside.iter().copied();
                let outside = outside.filter(|other| other.is_ipv4() == address.is_ipv4());
                Row::Exposed(Exposed {
                    vni,
                    address: *address,
                    ports: ports.to_vec(),
                    addresses: outside.collect(),
                    health_port: service.health_port,
                    service: service.reference(name),
                    clients: service.clients_of(*address),
                })
            };
            service.share(&droplets, &ports, row, &self.services.zones, made);
        }
    }

    /// Adds the rows by which all droplets take packets for a service's fronts. Backends on suspect droplets and those
    /// that fail their check rest, unless there are no others.
    fn front(&self, name: &EndpointName, service: &Service, vni: Vni, made: &mut Rows) {
        for (address, ports) in &service.fronts {
            if !self.is_held_by(name, *address) {
                continue;
            }
            let home = |backend: &Backend| {
                let droplet = self.droplets.get(service.home(backend)?)?;
                Some((*backend, Underlay(*droplet)))
            };
            let is_to_rest = |backend: &Backend| {
                let home = service.home(backend);
                home.is_some_and(|home| self.services.suspects.contains(home))
                    || self.services.checks.fails(name, backend.address)
            };
            let ports = ports.iter().map(|port| {
                let backends: BTreeMap<Backend, Underlay> = port.backends.iter().filter_map(home).collect();
                let resting = backends.keys().filter(|backend| is_to_rest(backend));
                let resting: BTreeSet<IpAddr> = resting.map(|backend| backend.address).collect();
                let has_others = backends.keys().any(|backend| !resting.contains(&backend.address));
                FrontPort {
                    protocol: port.protocol,
                    port: port.port,
                    affinity: port.affinity,
                    backends,
                    resting: if has_others { resting } else { BTreeSet::new() },
                }
            });
            let row = Row::Front(Front {
                vni,
                address: *address,
                ports: ports.collect(),
                clients: service.clients_of(*address),
                service: service.reference(name),
                check: service.check.clone(),
                tunnel: service.tunnel,
            });
            let (key, row) = (row.key(), PackedRow::new(&row));
            for droplet in self.droplets.keys() {
                made.insert((droplet.clone(), key.clone()), row.clone());
            }
        }
    }

    /// Returns the droplets to which others send connections to a port of nodes: at most so many that have an address
    /// of the family.
    fn peers(
        &self,
        service: &Service,
        port: &ExposedPort,
        (is_v6, most): (bool, usize),
    ) -> BTreeSet<Underlay> {
        if port.node_port.is_none() {
            return BTreeSet::new();
        }
        let backends = || port.local.iter().flatten();
        let all_end = backends().all(|backend| is_ending(backend, port));
        let backends = backends().filter(|backend| all_end || !is_ending(backend, port));
        let homes = backends.filter_map(|backend| service.home(backend));
        let homes: BTreeSet<&str> = homes
            .filter(|home| !is_v6 || self.droplets6.contains_key(*home))
            .collect();
        let addresses = homes.into_iter().filter_map(|home| self.droplets.get(home));
        addresses.take(most).copied().map(Underlay).collect()
    }

    /// Whether no younger service has the address.
    pub(in super::super) fn is_held_by(&self, name: &EndpointName, address: IpAddr) -> bool {
        self.services.is_own(name, address) || self.service_at(address) == Some(name)
    }

    /// Touches the local services of a VPC: its first endpoint came to a droplet, or its last one left it.
    pub(in super::super) fn touch_local_services(&mut self, vpc: &str) {
        let local = self.services_of_vpc(vpc);
        let local = local.filter(|name| self.service(name).is_some_and(Service::is_local));
        let owners: Vec<_> = local.cloned().map(Owner::Service).collect();
        self.dirty.extend(owners);
    }

    /// Touches the VPC whose row names a service's own addresses.
    pub(super) fn touch_own_addresses(&mut self, service: &Service) {
        if !service.own_addresses.is_empty() {
            let vpc = self.networks.get(&service.network).map(|network| &network.vpc);
            self.dirty.extend(vpc.cloned().map(Owner::Vpc));
        }
    }

    /// Returns the addresses of a VPC's own that services have.
    pub fn service_addresses_of(&self, vpc: &str) -> BTreeSet<IpAddr> {
        let services = self.services_of_vpc(vpc);
        let services = services.filter_map(|name| self.service(name));
        let services = services.filter(|service| !service.by_node);
        let addresses: BTreeSet<_> = services
            .flat_map(|service| service.own_addresses.iter().copied())
            .collect();
        // A Service that droplets were told nothing of may come back with its addresses.
        addresses.into_iter().take(MAX_OWN_ADDRESSES).collect()
    }

    /// Returns the rows of a VPC itself, by which droplets know addresses of services among the VPC's own.
    pub fn vpc_rows(&self, vpc: &str) -> Vec<(String, Key)> {
        let keys = self.keys_of(&Owner::Vpc(vpc.to_owned()));
        keys.filter(|(_, key)| matches!(key, Key::Vpc(_)))
            .cloned()
            .collect()
    }

    /// Returns the rows that must be acked before the service is Provisioned: those of bouncers, not of subscribers.
    /// For a service whose traffic stays on its nodes these are all rows; for one that nodes serve, the rows of its own
    /// VPC.
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
    /// Returns the service as `namespace/name`. `endpoint`: the name of its endpoint.
    fn reference(&self, endpoint: &EndpointName) -> String {
        format!("{}/{}", endpoint.0, self.name)
    }

    fn home(&self, backend: &Backend) -> Option<&str> {
        self.homes.get(&backend.address).map(String::as_str)
    }

    /// Adds the rows by which droplets serve the service for the pods of a VPC.
    pub(in super::super) fn share_by_node(
        &self,
        droplets: &BTreeSet<&str>,
        vni: Vni,
        service: &NodeService,
        zones: &Zones,
        made: &mut Rows,
    ) {
        let row = |ports: &[Port]| {
            Row::NodeService(rows::NodeService {
                vni,
                address: service.address,
                ports: ports.to_vec(),
                inside: service.inside,
                names: service.names,
            })
        };
        // Nodes send packets for backends that are members on by their own endpoints.
        let ports = if service.inside { &[] } else { service.ports };
        self.share(droplets, ports, row, zones, made);
    }

    /// Gives each droplet its row; droplets without backends of their own, which prefer the same ones, share one row.
    fn share<P: HasBackends>(
        &self,
        droplets: &BTreeSet<&str>,
        ports: &[P],
        row: impl Fn(&[P]) -> Row,
        zones: &Zones,
        made: &mut Rows,
    ) {
        let common: Vec<P> = ports.iter().map(HasBackends::common).collect();
        let mut by_home: BTreeMap<&str, Vec<P>> = BTreeMap::new();
        for (index, port) in ports.iter().enumerate() {
            for backend in port.own() {
                let home = self.home(backend).filter(|home| droplets.contains(home));
                let Some(home) = home else { continue };
                let told = by_home.entry(home).or_insert_with(|| common.clone());
                if let Some(told) = told.get_mut(index) {
                    told.give(backend, port);
                }
            }
        }
        let key = row(&common).key();
        let nearness = Nearness::new(common.iter().map(HasBackends::hinted), &self.hints);
        let mut shared = BTreeMap::new();
        for droplet in droplets {
            let own = if let Some(ports) = by_home.get(droplet) {
                PackedRow::new(&row(ports))
            } else {
                let place = nearness.place(droplet, zones.get(*droplet).map(String::as_str));
                let near = || {
                    let ports = common.iter().enumerate().map(|(index, port)| {
                        let near = nearness.near(index, place);
                        near.map_or_else(|| port.clone(), |near| port.with(near.clone()))
                    });
                    PackedRow::new(&row(&ports.collect::<Vec<P>>()))
                };
                shared.entry(place).or_insert_with(near).clone()
            };
            made.insert(((*droplet).to_owned(), key.clone()), own);
        }
    }
}

fn is_ending(backend: &Backend, port: &ExposedPort) -> bool {
    port.ending.contains(&backend.address)
}

trait HasBackends: Clone {
    /// Returns the port as droplets without backends are told it.
    fn common(&self) -> Self;
    /// Yields the backends that only their own droplet is told.
    fn own(&self) -> impl Iterator<Item = &Backend>;
    /// Returns the backends among which hints choose.
    fn hinted(&self) -> &BTreeSet<Backend>;
    /// Returns the port with these instead of them.
    fn with(&self, backends: BTreeSet<Backend>) -> Self;
    /// Adds one of `port`'s backends to a port that [`Self::common`] made.
    fn give(&mut self, backend: &Backend, port: &Self);
}

impl HasBackends for Port {
    fn common(&self) -> Self {
        if !self.local {
            return self.clone();
        }
        Self {
            backends: BTreeSet::new(),
            ..*self
        }
    }

    fn own(&self) -> impl Iterator<Item = &Backend> {
        self.backends.iter().filter(|_| self.local)
    }

    fn hinted(&self) -> &BTreeSet<Backend> {
        &self.backends
    }

    fn with(&self, backends: BTreeSet<Backend>) -> Self {
        Self { backends, ..*self }
    }

    fn give(&mut self, backend: &Backend, _: &Self) {
        self.backends.insert(*backend);
    }
}

impl HasBackends for ExposedPort {
    fn common(&self) -> Self {
        if self.local.is_none() {
            return self.clone();
        }
        Self {
            local: Some(BTreeSet::new()),
            ending: BTreeSet::new(),
            peers: self.peers.clone(),
            members: self.members.clone(),
            ..*self
        }
    }

    fn own(&self) -> impl Iterator<Item = &Backend> {
        self.local.iter().flatten()
    }

    fn hinted(&self) -> &BTreeSet<Backend> {
        &self.members
    }

    fn with(&self, members: BTreeSet<Backend>) -> Self {
        Self {
            members,
            ..self.clone()
        }
    }

    fn give(&mut self, backend: &Backend, port: &Self) {
        self.local.get_or_insert_default().insert(*backend);
        if is_ending(backend, port) {
            self.ending.insert(backend.address);
        }
    }
}
