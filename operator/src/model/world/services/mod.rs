//! Services of the world: a row for each of their addresses, on every droplet with a bouncer of their VPC, and on those
//! that asked for the address. Services that nodes serve are rows of the VPCs whose pods reach them.
//!
//! Invariant: an address belongs to one service, the youngest that has it. The API server gives no address out twice,
//! but a deleted service may still be in a cache when another one has its address. Changes of endpoints change no
//! service here: the code that knows a service's backends sets the service again.

mod checks;
mod names;
mod near;
mod node_ports;
mod ranges;
mod reach;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use thuban_api::identifiers::Vni;
use thuban_rows::{ExposedPort, HealthCheck, Port};

use checks::Checks;
pub use checks::{VipMembers, VipName};
pub use near::{AllHints, Hints};
use node_ports::NodePorts;
pub use node_ports::{NodePort, RestId};
pub use reach::MAX_OWN_ADDRESSES;

use super::{EndpointName, Key, Owner, Rows, Vpc, World, remove_name};

use crate::model::service::Clients;
use crate::model::sorted_set::SortedSet;

/// A Service as droplets are told of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// The network that the service is a member of; the endpoints of the network's VPC reach it.
    pub network: String,
    /// The name of the Service: its Endpoint has another one.
    pub name: String,
    /// The backends are outside of the service's VPC.
    pub by_node: bool,
    /// Connections to a node go to backends of other nodes too, by way of those nodes.
    pub by_peers: bool,
    /// The creation time and UID of the service's object.
    pub born: (Option<Time>, String),
    /// The service's addresses, each with its ports.
    pub tables: Vec<(IpAddr, Vec<Port>)>,
    /// The addresses that are in the service's VPC: another VPC's service may have the same.
    pub own_addresses: Vec<IpAddr>,
    /// The addresses and ports that nodes are told, if the service is reached by way of nodes.
    pub exposed: Vec<(IpAddr, Vec<ExposedPort>)>,
    /// Addresses outside of the cluster that lead to nodes.
    pub outside: Vec<IpAddr>,
    /// Those of them whose packets droplets take at their NICs, each with its ports.
    pub fronts: Vec<(IpAddr, Vec<Port>)>,
    /// Answers go back through the tunnel to the droplet that took the client's packet.
    pub tunnel: bool,
    /// The clients that may send to the outside addresses; none: all.
    pub clients: Option<Clients>,
    /// The check of the fronts' backends.
    pub check: Option<HealthCheck>,
    /// The droplet of each backend of local ports and fronts.
    pub homes: BTreeMap<IpAddr, String>,
    /// The places that its ready backends are for; none if they serve all alike.
    pub hints: AllHints,
    /// The port where nodes say over HTTP whether they have backends.
    pub health_port: Option<u16>,
    /// The ports that an earlier leader recorded for it; none if all of its ports count as recorded.
    pub recorded: Option<BTreeSet<NodePort>>,
}

impl Service {
    fn exposed_ports(&self) -> impl Iterator<Item = &ExposedPort> {
        self.exposed.iter().flat_map(|(_, ports)| ports)
    }

    /// Yields the addresses that only one service may have: all but those of its own VPC.
    fn held_addresses(&self) -> impl Iterator<Item = &IpAddr> {
        self.tables.iter().chain(&self.fronts).map(|(address, _)| address)
    }

    /// Whether nodes send connections to themselves, or to such an outside address, on to the service.
    fn is_exposed(&self) -> bool {
        let has_port = self.exposed_ports().any(|port| port.node_port.is_some());
        has_port
            || !self.fronts.is_empty()
            || self.exposed_ports().next().is_some() && !self.outside.is_empty()
    }

    /// Returns the clients that may send to outside addresses of the same family.
    fn clients_of(&self, address: IpAddr) -> Option<BTreeSet<IpNet>> {
        self.clients.as_ref().map(|clients| clients.of(address).clone())
    }

    /// Whether droplets have different rows of the service.
    fn is_local(&self) -> bool {
        let mut ports = self.tables.iter().flat_map(|(_, ports)| ports);
        ports.any(|port| port.local)
    }
}

/// A service's address that nodes serve for the pods of a VPC.
pub(super) struct NodeService<'a> {
    pub address: IpAddr,
    /// All ports, with all backends.
    pub ports: &'a [Port],
    /// The backends are members of the service's VPC: nodes send packets for it on by their own endpoints.
    pub inside: bool,
    /// The service is the cluster's DNS.
    pub names: bool,
}

#[derive(Debug, Default)]
pub(super) struct Services {
    /// ClusterIPs of the cluster's DNS, of which droplets have views.
    cluster_dns: Vec<IpAddr>,
    /// The network of each namespace that its network and VPC let in.
    pub namespaces: BTreeMap<String, String>,
    /// These namespaces by network.
    pub namespaces_of: HashMap<String, BTreeSet<String>>,
    all: HashMap<EndpointName, Service>,
    by_network: HashMap<String, BTreeSet<EndpointName>>,
    by_address: HashMap<IpAddr, SortedSet<EndpointName>>,
    /// Services that nodes serve.
    by_node: BTreeSet<EndpointName>,
    /// Services that are reached by way of nodes.
    exposed: BTreeSet<EndpointName>,
    /// Services by namespace and name of the Service object.
    by_name: BTreeMap<(String, String), SortedSet<EndpointName>>,
    /// The VPCs that name a service, by its namespace and name.
    sharers: HashMap<(String, String), BTreeSet<String>>,
    /// Services with hints.
    hinted: BTreeSet<EndpointName>,
    pub(super) zones: near::Zones,
    node_ports: NodePorts,
    /// Droplets that don't understand rows of fronts.
    without_fronts: BTreeSet<String>,
    /// Droplets that don't understand fronts whose answers go back through the tunnel.
    without_tunnel: BTreeSet<String>,
    /// Droplets whose backends fronts leave out.
    suspects: BTreeSet<String>,
    checks: Checks,
}

impl Services {
    fn note(&mut self, name: &EndpointName, service: Service) {
        for address in service.held_addresses() {
            self.by_address.entry(*address).or_default().insert(name);
        }
        let members = self.by_network.entry(service.network.clone()).or_default();
        members.insert(name.clone());
        if service.by_node {
            self.by_node.insert(name.clone());
        }
        if service.is_exposed() {
            self.exposed.insert(name.clone());
        }
        if !service.hints.is_empty() {
            self.hinted.insert(name.clone());
        }
        let key = (name.0.clone(), service.name.clone());
        self.by_name.entry(key).or_default().insert(name);
        self.all.insert(name.clone(), service);
    }

    fn forget(&mut self, name: &EndpointName) -> Option<Service> {
        let service = self.all.remove(name)?;
        self.by_node.remove(name);
        self.exposed.remove(name);
        self.hinted.remove(name);
        let key = (name.0.clone(), service.name.clone());
        if let Some(names) = self.by_name.get_mut(&key) {
            names.remove(name);
            if names.is_empty() {
                self.by_name.remove(&key);
            }
        }
        for address in service.held_addresses() {
            if let Some(names) = self.by_address.get_mut(address) {
                names.remove(name);
                if names.is_empty() {
                    self.by_address.remove(address);
                }
            }
        }
        if let Some(members) = self.by_network.get_mut(&service.network) {
            members.remove(name);
            if members.is_empty() {
                self.by_network.remove(&service.network);
            }
        }
        Some(service)
    }

    fn at(&self, address: IpAddr) -> impl Iterator<Item = &EndpointName> {
        self.by_address.get(&address).into_iter().flatten()
    }

    fn is_own(&self, name: &EndpointName, address: IpAddr) -> bool {
        let service = self.all.get(name);
        service.is_some_and(|service| service.own_addresses.contains(&address))
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = (&EndpointName, &Service)> {
        self.all.iter()
    }
}

impl World {
    /// Sets a service by the name of its scaled Endpoint.
    pub fn set_service(&mut self, name: &EndpointName, service: Option<Service>) {
        if self.services.all.get(name) == service.as_ref() {
            return;
        }
        self.touch_users(name);
        let old = self.services.forget(name);
        // Another service may have had the address before, or have it from now on.
        for service in [&old, &service].into_iter().flatten() {
            for address in service.held_addresses() {
                self.touch_services_at(*address);
                if self.services.cluster_dns.contains(address) {
                    // VPCs that reach it now, or no longer.
                    self.dirty.extend(self.vpcs.keys().cloned().map(Owner::Vpc));
                }
            }
            self.touch_own_addresses(service);
            self.services.checks.note_members(name, service);
        }
        self.services.checks.retain(name, old.as_ref(), service.as_ref());
        if let Some(service) = service {
            self.services.note(name, service);
        }
        self.touch_users(name);
        self.dirty.insert(Owner::Service(name.clone()));
    }

    /// Returns the VNIs of VPCs that name a service.
    pub fn sharing(&self, namespace: &str, service: &str) -> Vec<Vni> {
        let service = (namespace.to_owned(), service.to_owned());
        let vpcs = self.services.sharers.get(&service).into_iter().flatten();
        vpcs.filter_map(|vpc| self.vni(vpc)).collect()
    }

    /// Notes the services that a VPC names. `before`: those that it named.
    pub(super) fn note_sharer(&mut self, vpc: &str, before: &[(String, String)]) {
        for service in before {
            remove_name(&mut self.services.sharers, service, vpc);
        }
        let named = self.vpcs.get(vpc).into_iter().flat_map(|known| &known.shared);
        for service in named {
            let sharers = self.services.sharers.entry(service.clone()).or_default();
            sharers.insert(vpc.to_owned());
        }
    }

    /// Touches the VPCs whose pods reach a service by their node.
    fn touch_users(&mut self, name: &EndpointName) {
        let Some(service) = self.service(name) else {
            return;
        };
        let own = self.networks.get(&service.network).map(|network| &network.vpc);
        let home = self.services.namespaces.get(&name.0);
        let is_stray = home != Some(&service.network);
        let home = home
            .and_then(|network| self.networks.get(network))
            .map(|network| &network.vpc);
        let own = own.filter(|_| service.by_node || is_stray);
        let home = home.filter(|_| is_stray);
        let key = (name.0.clone(), service.name.clone());
        let sharers = self.services.sharers.get(&key).into_iter().flatten();
        let users = own.into_iter().chain(home).chain(sharers);
        let users = users.filter(|vpc| self.vpcs.contains_key(*vpc));
        let users: Vec<_> = users.cloned().map(Owner::Vpc).collect();
        if !users.is_empty() {
            self.enforcement.known_served.note_service();
        }
        self.dirty.extend(users);
    }

    /// Yields the services that nodes serve for the pods of a VPC: its own services with backends outside, and the
    /// services that it names of a VPC with access to hosts.
    pub(super) fn node_services_of<'a>(
        &'a self,
        vpc: &'a str,
        known: &'a Vpc,
    ) -> impl Iterator<Item = (&'a Service, NodeService<'a>)> {
        let home = |service: &Service| self.networks.get(&service.network).map(|network| &network.vpc);
        let own = self.services.by_node.iter();
        let own = own.filter(move |name| self.service(name).and_then(home).is_some_and(|home| home == vpc));
        let shared = known.shared.iter();
        let shared = shared.flat_map(|key| self.services.by_name.get(key).into_iter().flatten());
        let shared = shared.filter(move |name| {
            let home = self.service(name).and_then(home);
            let is_open = home
                .and_then(|home| self.vpcs.get(home))
                .is_some_and(|home| home.host_access);
            is_open && home.is_some_and(|home| home != vpc)
        });
        let services = own.chain(shared);
        let services = services.filter_map(|name| Some((name, self.service(name)?)));
        services.flat_map(move |(name, service)| {
            let names = !known.host_access && self.has_names(name, service);
            let tables = service.tables.iter();
            let tables = tables.filter(move |(address, _)| {
                let is_open = !names || self.services.cluster_dns.contains(address);
                // Addresses of the service's VPC are of no use to others, and nodes serve none.
                is_open && self.service_at(*address) == Some(name)
            });
            tables.map(move |(address, ports)| {
                let told = NodeService {
                    address: *address,
                    ports,
                    inside: !service.by_node,
                    names,
                };
                (service, told)
            })
        })
    }

    pub fn service(&self, name: &EndpointName) -> Option<&Service> {
        self.services.all.get(name)
    }

    /// Returns the service that has an address of the cluster's.
    pub fn service_at(&self, address: IpAddr) -> Option<&EndpointName> {
        let names = self.services.at(address);
        let names = names.filter(|name| !self.services.is_own(name, address));
        names.max_by_key(|name| (self.services.all.get(*name).map(|service| &service.born), *name))
    }

    /// Yields the services that have an address, of all VPCs.
    pub(super) fn services_at(&self, address: IpAddr) -> impl Iterator<Item = &EndpointName> {
        self.services.at(address)
    }

    /// Yields the services that are members of a network.
    pub fn services_of_network(&self, network: &str) -> impl Iterator<Item = &EndpointName> {
        self.services.by_network.get(network).into_iter().flatten()
    }

    pub(super) fn services_of_vpc(&self, vpc: &str) -> impl Iterator<Item = &EndpointName> {
        self.networks_of(vpc)
            .flat_map(|name| self.services_of_network(name))
    }

    /// Returns the droplets with tables of the bouncers of a VPC's networks.
    fn bouncers_of_vpc(&self, vpc: &str) -> BTreeSet<&str> {
        let networks = self.networks_of(vpc);
        networks.flat_map(|name| self.bouncers.holders(name)).collect()
    }

    /// Sets whether a droplet understands rows of fronts. While some droplet doesn't, there are no such rows: it could
    /// have a backend, and would drop what fronts send there.
    pub fn set_fronting(&mut self, droplet: &str, is_fronting: bool) {
        if note(&mut self.services.without_fronts, droplet, is_fronting) {
            self.touch_exposed();
        }
    }

    /// Sets whether a droplet understands fronts whose answers go back through the tunnel. While some droplet doesn't,
    /// there are no rows of such fronts: it would send its backends' answers to clients itself.
    pub fn set_tunnelling(&mut self, droplet: &str, is_tunnelling: bool) {
        if note(&mut self.services.without_tunnel, droplet, is_tunnelling) {
            self.touch_exposed();
        }
    }

    /// Sets the droplets that are suspect: fronts lead new connections elsewhere.
    pub fn set_suspects(&mut self, suspects: BTreeSet<String>) {
        if self.services.suspects == suspects {
            return;
        }
        let changed: BTreeSet<&String> = self.services.suspects.symmetric_difference(&suspects).collect();
        let exposed = self.services.exposed.iter();
        let concerned = exposed.filter(|name| {
            let service = self.service(name).filter(|service| !service.fronts.is_empty());
            service.is_some_and(|service| service.homes.values().any(|home| changed.contains(home)))
        });
        let concerned: Vec<EndpointName> = concerned.cloned().collect();
        for name in &concerned {
            if let Some(service) = self.services.all.get(name) {
                self.services.checks.note_members(name, service);
            }
        }
        self.dirty.extend(concerned.into_iter().map(Owner::Service));
        self.services.suspects = suspects;
    }

    /// Whether all droplets understand the rows of a service's fronts.
    fn has_fronts(&self, service: &Service) -> bool {
        let tunnel = self.services.without_tunnel.iter().filter(|_| service.tunnel);
        let mut without = self.services.without_fronts.iter().chain(tunnel);
        !without.any(|droplet| self.droplets.contains_key(droplet))
    }

    /// Touches the services that all droplets are told of: a droplet came or went.
    pub(super) fn touch_exposed(&mut self) {
        let services = self.services.exposed.iter().cloned();
        self.dirty.extend(services.map(Owner::Service));
    }

    pub(super) fn touch_services(&mut self, vpc: &str) {
        let services: Vec<_> = self.services_of_vpc(vpc).cloned().collect();
        self.dirty.extend(services.into_iter().map(Owner::Service));
    }

    pub(super) fn touch_services_of(&mut self, network: &str) {
        let services: Vec<_> = self.services_of_network(network).cloned().collect();
        self.touch_each(services);
    }

    pub(super) fn touch_services_at(&mut self, address: IpAddr) {
        let services: Vec<_> = self.services.at(address).cloned().collect();
        self.touch_each(services);
    }

    fn touch_each(&mut self, services: Vec<EndpointName>) {
        for name in services {
            self.touch_users(&name);
            self.dirty.insert(Owner::Service(name));
        }
    }
}

/// Notes whether a droplet understands what the droplets of `without` don't. Returns whether that is news.
fn note(without: &mut BTreeSet<String>, droplet: &str, understands: bool) -> bool {
    if understands {
        without.remove(droplet)
    } else {
        without.insert(droplet.to_owned())
    }
}

#[cfg(test)]
pub(super) mod tests;
