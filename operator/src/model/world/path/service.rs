//! Packets to a Service: whether the source's VPC reaches it, and whether its backends take them.

use std::net::IpAddr;

use thuban_rows::{Backend, Port, SHARED_SERVICE_GROUP};

use super::{Cause, Found, Goal, Packet, Path, Place, Target, for_all, no, unknown};
use crate::model::policy::{ClassContent, Direction};
use crate::model::rows::Key;
use crate::model::service::protocol_name;
use crate::model::world::{EndpointName, Service};

/// How many backends are looked at.
const MAX_BACKENDS: usize = 16;

/// How a pod reaches a Service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Droplets send packets to backends of the pod's own VPC.
    Within,
    /// The pod's node sends packets on, to backends in the Service's VPC.
    ByNode,
    /// As before, to backends outside of all VPCs.
    ByNodeOutside,
}

/// An address of a Service that the source reaches.
#[derive(Clone, Copy, Debug)]
pub struct Reached<'a> {
    name: &'a EndpointName,
    service: &'a Service,
    address: IpAddr,
    ports: &'a [Port],
    way: Way,
    /// The port that is asked about; none until it is chosen.
    port: Option<&'a Port>,
}

impl Reached<'_> {
    /// Returns the address to which clients send.
    pub(super) const fn address(&self) -> IpAddr {
        self.address
    }
}

impl<'a> Path<'a> {
    /// Returns the backends to which droplets lead packets of the source; none of a Service that its node sends on to.
    pub(super) fn pods_behind(&self, source: &Place<'a>, reached: &Reached<'a>) -> Vec<Place<'a>> {
        let backends = match self.backends(source, reached) {
            Ok((backends, _)) if reached.way == Way::Within => backends,
            _ => Vec::new(),
        };
        let members = self.members(reached, &backends).into_iter();
        members.map(|(place, _)| place).collect()
    }

    /// Finds a Service by its name.
    pub(super) fn named_service(&self, source: &Place<'a>, namespace: &str, name: &str) -> Found<Goal<'a>> {
        let (world, vpc) = (self.world, &source.network.vpc);
        let known: Vec<&'a EndpointName> = world.services_named(namespace, name).collect();
        let reached = known.iter().copied().find_map(|name| {
            let tables = &world.service(name)?.tables;
            let mut addresses = tables.iter().map(|(address, _)| *address);
            addresses.find_map(|address| {
                source.address_of(address.is_ipv6())?;
                self.reached(source, name, address)
            })
        });
        match reached {
            Some(reached) => self.port_of(reached),
            None if namespace == self.asker() && known.is_empty() => {
                let message = format!("there is no Service {name} with an address in namespace {namespace}");
                Err(no(Cause::ServiceNotFound, message))
            }
            None => {
                let message = format!("VPC {vpc} reaches no Service {namespace}/{name}");
                Err(no(Cause::ServiceNotReached, message))
            }
        }
    }

    /// Returns how the source reaches an address of a Service.
    pub(super) fn reached(
        &self,
        source: &Place<'a>,
        name: &'a EndpointName,
        address: IpAddr,
    ) -> Option<Reached<'a>> {
        let world = self.world;
        let service = world.service(name)?;
        let (ports, way) = if self.is_at_home(source, service) && !service.by_node {
            let (_, ports) = service.tables.iter().find(|(known, _)| *known == address)?;
            if !world.is_held_by(name, address) {
                return None;
            }
            (&ports[..], Way::Within)
        } else {
            // This looks at many Services.
            let mut by_node = world.node_services_of(&source.network.vpc, source.vpc);
            let (_, told) =
                by_node.find(|(known, told)| std::ptr::eq(*known, service) && told.address == address)?;
            let way = if told.inside {
                Way::ByNode
            } else {
                Way::ByNodeOutside
            };
            (told.ports, way)
        };
        Some(Reached {
            name,
            service,
            address,
            ports,
            way,
            port: None,
        })
    }

    /// Whether a Service is in the source's VPC.
    pub(super) fn is_at_home(&self, source: &Place<'a>, service: &Service) -> bool {
        let home = self.world.networks.get(&service.network);
        home.is_some_and(|home| home.vpc == source.network.vpc)
    }

    /// Chooses the port of a Service.
    pub(super) fn port_of(&self, reached: Reached<'a>) -> Found<Goal<'a>> {
        let title = self.title(&reached);
        let served: Vec<String> = reached.ports.iter().map(port_text).collect();
        let served = if self.is_own(&reached) {
            format!("; it has {}", served.join(", "))
        } else {
            String::new()
        };
        let port = match (self.question.port, reached.ports) {
            (Some(number), ports) => {
                let wanted = (self.question.protocol, number);
                let mut ports = ports.iter();
                ports.find(|port| (port.protocol, port.port) == wanted)
            }
            (None, [only]) => Some(only),
            (None, []) => None,
            (None, _) => {
                let message = format!("{title} has several ports{served}");
                return Err(unknown(Cause::PortNeeded, message));
            }
        };
        let Some(port) = port else {
            let message = format!("{title} does not serve the port{served}");
            return Err(no(Cause::PortNotServed, message));
        };
        let message = format!("{title}, {}, {}", reached.address, port_text(port));
        let reached = Reached {
            port: Some(port),
            ..reached
        };
        Ok((Goal::Service(reached), message))
    }

    /// Judges packets to a Service.
    pub(super) fn reach_service(&mut self, source: &Place<'a>, reached: &Reached<'a>) -> Option<()> {
        let found = self.backends(source, reached);
        let backends = self.note("backends", found)?;
        match reached.way {
            Way::Within => self.reach_within(source, reached, &backends),
            Way::ByNode | Way::ByNodeOutside => self.reach_by_node(source, reached, &backends),
        }
    }

    fn reach_within(
        &mut self,
        source: &Place<'a>,
        reached: &Reached<'a>,
        backends: &[Backend],
    ) -> Option<()> {
        let targets = self.members(reached, backends);
        if targets.is_empty() {
            let message = "no backend is an endpoint at this moment";
            return self.note("rows", Err(unknown(Cause::RowsMissing, message)));
        }
        self.arrive(source, &targets, self.is_own(reached))?;
        let found = self.service_rows(reached);
        self.note("service", found)
    }

    fn reach_by_node(
        &mut self,
        source: &Place<'a>,
        reached: &Reached<'a>,
        backends: &[Backend],
    ) -> Option<()> {
        let is_counted = self.is_own(reached);
        let shared = if reached.way == Way::ByNode {
            self.members(reached, backends)
        } else {
            Vec::new()
        };
        let found = self.droplets(source, None).and_then(|fine| {
            for_all(&shared, is_counted, |(backend, _)| {
                self.droplets(source, Some(backend))
            })?;
            Ok(fine)
        });
        self.note("droplets", found)?;
        let key = Key::NodeService(source.vpc.vni, reached.address);
        let found = self.row(source, &key).and_then(|()| self.rows(source, None));
        let found = found.and_then(|fine| {
            for_all(&shared, is_counted, |(backend, _)| {
                self.set(backend, self.world.assignment(backend.name).ingress)?;
                Ok(((), String::new()))
            })?;
            Ok(fine)
        });
        self.note("rows", found)?;
        let found = self.policies_of_sender(source, reached.address, self.served(reached));
        let found = found.and_then(|fine| {
            for_all(&shared, is_counted, |(backend, packet)| {
                self.shared_backend(source, backend, *packet)
            })?;
            Ok(fine)
        });
        self.note("policies", found)
    }

    /// Returns packets to the Service's own address.
    pub(super) fn served(&self, reached: &Reached<'a>) -> Packet {
        Packet {
            is_v6: reached.address.is_ipv6(),
            protocol: reached.port.map_or(self.question.protocol, |port| port.protocol),
            port: reached.port.map(|port| port.port),
        }
    }

    /// Returns the backends that are endpoints of the Service's VPC, each with the packets that it gets.
    fn members(&self, reached: &Reached<'a>, backends: &[Backend]) -> Vec<(Place<'a>, Packet)> {
        let Some(vni) = self.world.network_vni(&reached.service.network) else {
            return Vec::new();
        };
        let served = self.served(reached);
        let place = |backend: &Backend| {
            let name = self.world.holder(vni, backend.address)?;
            let packet = Packet {
                port: Some(backend.port),
                ..served
            };
            Some((self.world.place(name, self.asker())?, packet))
        };
        backends.iter().filter_map(place).collect()
    }

    /// Returns the backends that new connections of the source get.
    fn backends(&self, source: &Place<'a>, reached: &Reached<'a>) -> Found<Vec<Backend>> {
        let title = self.title(reached);
        let backends = reached.port.into_iter().flat_map(|port| port.backends.iter());
        let mut backends: Vec<Backend> = backends.copied().collect();
        if backends.is_empty() {
            let message = format!("no backend of {title} is ready");
            return Err(no(Cause::NoBackends, message));
        }
        let is_local = reached.port.is_some_and(|port| port.local);
        let home = |backend: &Backend| reached.service.homes.get(&backend.address);
        let droplet = &source.endpoint.droplet;
        backends.retain(|backend| !is_local || home(backend) == Some(droplet));
        if backends.is_empty() {
            let message = format!("packets to {title} stay on their node, and {droplet} has no backend");
            return Err(no(Cause::NoBackends, message));
        }
        let count = backends.len();
        backends.truncate(MAX_BACKENDS);
        let message = if !self.is_own(reached) {
            "ready".to_owned()
        } else if count > MAX_BACKENDS {
            format!("{count} ready; the first {MAX_BACKENDS} are looked at")
        } else {
            format!("{count} ready")
        };
        Ok((backends, message))
    }

    pub(super) fn is_own(&self, reached: &Reached<'a>) -> bool {
        reached.name.0 == self.asker()
    }

    /// Returns what the asker may hear of a Service's name: who asks for an address of another namespace's does not
    /// hear whose it is.
    fn title(&self, reached: &Reached<'a>) -> String {
        let is_named = matches!(self.question.target, Target::Service { .. });
        if is_named || self.is_own(reached) {
            format!("Service {}/{}", reached.name.0, reached.service.name)
        } else {
            "the Service".to_owned()
        }
    }

    /// Judges what a backend in another VPC receives of clients by the shared Service. It sees the client's node.
    fn shared_backend(&self, source: &Place<'a>, backend: &Place<'a>, packet: Packet) -> Found<()> {
        let Some(node) = self.node_address(backend, source, packet.is_v6) else {
            let message = "the node of the source has no address for the Service's pods".to_owned();
            return Err(unknown(Cause::NotProvisioned, message));
        };
        let class = ClassContent {
            groups: [SHARED_SERVICE_GROUP].into(),
            ..ClassContent::default()
        };
        self.judge(backend, Direction::Ingress, (&class, node), packet)?;
        Ok(((), String::new()))
    }

    /// Returns the address that the source's node has in the VPC of a backend.
    fn node_address(&self, backend: &Place<'a>, source: &Place<'a>, is_v6: bool) -> Option<IpAddr> {
        let world = self.world;
        let networks = world.networks.iter();
        let networks = networks.filter(|(_, network)| network.vpc == backend.network.vpc);
        let droplets = networks.filter_map(|(name, _)| world.members.get(name));
        let residents = droplets.filter_map(|droplets| droplets.get(&source.endpoint.droplet));
        let mut places = residents
            .flatten()
            .filter_map(|name| world.place(name, self.asker()));
        let host = places.find(|place| place.endpoint.is_host)?;
        host.address_of(is_v6)
    }

    /// Looks at the rows by which bouncers know a Service.
    fn service_rows(&self, reached: &Reached<'a>) -> Found<()> {
        let rows = self.world.service_rows(reached.name);
        if rows.is_empty() || self.delivery.is_served(&rows) {
            return Ok(((), "a bouncer knows the Service".to_owned()));
        }
        let message = "no bouncer works that knows the Service".to_owned();
        Err(unknown(Cause::RolesNotServing, message))
    }
}

fn port_text(port: &Port) -> String {
    let protocol = protocol_name(port.protocol).unwrap_or("unknown");
    format!("{}/{protocol}", port.port)
}
