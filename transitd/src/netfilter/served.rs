//! The services that the node translates: maps from an address and a port to a chain, and a chain for each set of
//! backends.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use thuban_api::identifiers::Vni;
use thuban_common::host_stack::{CONNECTION_EXPOSED, CONNECTION_LED, CONNECTION_SENT_ON};
use thuban_rows::{Exposed, ExposedPort, NodeService, Underlay};

use super::affinity::{self, Affinity, Place};
use super::host::{Host, from_pod};
use super::node_ports;
use super::template::Values;

/// The chain of each address, protocol and port.
type Ports = BTreeMap<(IpAddr, u8, u16), usize>;
/// The chain of each port of the node: whether it is IPv6, protocol, port.
type NodePorts = BTreeMap<(bool, u8, u16), usize>;

/// The services that the node serves.
#[derive(Default)]
pub(super) struct Served {
    /// Addresses where a packet to any other port is refused.
    addresses: Vec<IpAddr>,
    ports: Ports,
    /// Ports of services that nodes expose, at addresses outside of the cluster.
    outside: Ports,
    /// Those of them to which only some clients may send, each with the ranges of these.
    limited: BTreeMap<(IpAddr, u8, u16), Vec<IpNet>>,
    /// The addresses of these ports, with the Service and the chain of each.
    outside_services: BTreeSet<(IpAddr, String, usize)>,
    /// The same services' ports at each address of the node.
    node_ports: NodePorts,
    /// The ports among them that lead to other droplets too.
    shared_ports: NodePorts,
    chains: Vec<PortChain>,
    clients: affinity::Sets,
}

/// A chain `port-N`: it says where connections go.
struct PortChain {
    /// The mark of its connections; 0: none.
    mark: u32,
    protocol: u8,
    is_v6: bool,
    goes: Goes,
    /// Where packets go that processes and pods of the node itself send.
    for_own: Own,
    affinity: Option<Affinity>,
}

enum Goes {
    /// These backends. Without any, packets are dropped.
    To(Vec<(IpAddr, u16)>),
    /// One of these other droplets or this one, all with equal shares. A packet from another droplet is not sent on.
    Among {
        here: Option<usize>,
        /// Whether this droplet keeps a share of packets from elsewhere too; not if all its backends are ending.
        has_share: bool,
        others: usize,
        peers: Vec<(IpAddr, u16)>,
    },
}

/// See [`PortChain::for_own`].
enum Own {
    /// The same backends as for others.
    Same,
    /// The backends of other chains.
    By { processes: usize, pods: usize },
    /// A tenant's port: pods of other VPCs don't reach it, and nobody does without a lease.
    NoPods,
}

impl Served {
    pub fn new<'a>(services: impl Iterator<Item = &'a NodeService>, host: &Host) -> Self {
        let mut made = Self::default();
        let mut seen = HashSet::new();
        for service in services.filter(|service| !service.inside) {
            let address = service.address;
            if !seen.insert(address) {
                continue;
            }
            made.addresses.push(address);
            for port in service.ports.iter().filter(|port| !port.backends.is_empty()) {
                let backends = port.backends.iter().map(|of| (of.address, of.port));
                let chain = made.add_chain(port.protocol, backends.collect());
                let of = (address, port.protocol, port.port);
                made.keep_clients(chain.1, host.vni.unwrap_or(service.vni), of, port.affinity);
                made.ports.insert((address, chain.0, port.port), chain.1);
            }
        }
        for exposed in &host.exposed {
            made.expose(exposed, host);
        }
        made
    }

    /// Adds a chain. Returns its protocol and number.
    fn add_chain(&mut self, protocol: u8, backends: Vec<(IpAddr, u16)>) -> (u8, usize) {
        self.chains.push(PortChain {
            mark: 0,
            protocol,
            is_v6: backends.first().is_some_and(|(address, _)| address.is_ipv6()),
            goes: Goes::To(backends),
            for_own: Own::Same,
            affinity: None,
        });
        (protocol, self.chains.len() - 1)
    }

    /// Has clients keep their places of the chains from `first` on, which lead to a service's port. `of`: the service's
    /// address, protocol and port.
    fn keep_clients(&mut self, first: usize, vni: Vni, of: (IpAddr, u8, u16), seconds: u32) {
        // Agents choose the backends of the service's own address. The chain before one of `CONNECTION_SENT_ON`
        // chooses.
        let is_chosen = |chain: &&mut PortChain| {
            chain.mark != CONNECTION_SENT_ON && !matches!(&chain.goes, Goes::To(to) if *to == [(of.0, of.2)])
        };
        for chain in self.chains.iter_mut().skip(first).filter(is_chosen) {
            let places = chain.places();
            let affinity = Affinity::new(vni, of, seconds).filter(|_| !places.is_empty());
            chain.affinity = affinity.filter(|own| self.clients.add(own, &places, chain.is_v6));
        }
    }

    /// Adds a chain to backends wherever they are, by the service's address in its VPC, which agents translate.
    /// Returns `None` if there are none.
    fn cluster_chain(&mut self, cluster: IpAddr, port: &ExposedPort) -> Option<usize> {
        let members = port.members.iter();
        let members: Vec<_> = members.map(|member| (member.address, member.port)).collect();
        let served = self.ports.get(&(cluster, port.protocol, port.port)).copied();
        let backends = match served.and_then(|chain| self.chains.get(chain)) {
            Some(PortChain {
                goes: Goes::To(backends),
                ..
            }) => backends.clone(),
            // The node serves the address, and this port has no backends.
            _ if self.addresses.contains(&cluster) => return None,
            _ if members.is_empty() => vec![(cluster, port.port)],
            _ => members.clone(),
        };
        let (_, chain) = self.add_chain(port.protocol, backends);
        let is_sent_on = served.is_some() || !members.is_empty();
        if let Some(made) = self.chains.get_mut(chain).filter(|_| is_sent_on) {
            // The node serves backends that are elsewhere and not reached by its endpoint: they must answer the node.
            // Members are sent to by the endpoint.
            made.mark = CONNECTION_EXPOSED;
        }
        Some(chain)
    }

    /// Adds a chain to the ports of the same number of other droplets, for processes of the node, which keep the node's
    /// address. Returns `None` if there are no others.
    fn others_chain(&mut self, is_v6: bool, port: &ExposedPort, host: &Host) -> Option<usize> {
        let others = ports_of_peers(is_v6, port, host);
        (!others.is_empty()).then(|| self.add_chain(port.protocol, others).1)
    }

    /// Adds a chain to backends of this droplet and of its peers, by their ports of the same number. Returns `None` if
    /// there are no peers.
    fn peers_chain(
        &mut self,
        here: Option<usize>,
        is_v6: bool,
        port: &ExposedPort,
        host: &Host,
    ) -> Option<usize> {
        let peers = ports_of_peers(is_v6, port, host);
        if peers.is_empty() {
            return None;
        }
        let own = port.local.iter().flatten();
        let has_share = here.is_some()
            && own
                .into_iter()
                .any(|backend| !port.ending.contains(&backend.address));
        let (_, others) = self.add_chain(port.protocol, peers.clone());
        self.chains.get_mut(others)?.mark = CONNECTION_SENT_ON;
        self.chains.push(PortChain {
            mark: 0,
            protocol: port.protocol,
            is_v6,
            goes: Goes::Among {
                here,
                has_share,
                others,
                peers,
            },
            for_own: Own::NoPods,
            affinity: None,
        });
        Some(self.chains.len() - 1)
    }

    fn expose(&mut self, exposed: &Exposed, host: &Host) {
        let cluster = exposed.address;
        let is_nodes_own = host.vni == Some(exposed.vni);
        // nft takes no range within another.
        let clients = exposed.clients.as_ref();
        let clients = clients.map(|clients| IpNet::aggregate(&clients.iter().copied().collect::<Vec<_>>()));
        for port in &exposed.ports {
            let first = self.chains.len();
            let for_all = if is_nodes_own {
                self.cluster_chain(cluster, port)
            } else {
                None
            };
            let chain = match host.local_backends(exposed, port) {
                None => for_all,
                // For a service of another VPC the node doesn't answer if it has no backend of it.
                Some((_, backends)) if backends.is_empty() && !is_nodes_own => None,
                Some((is_led, backends)) => {
                    let others = if is_nodes_own && backends.is_empty() {
                        self.others_chain(cluster.is_ipv6(), port, host)
                    } else {
                        None
                    };
                    let (_, chain) = self.add_chain(port.protocol, backends);
                    if let Some(made) = self.chains.get_mut(chain) {
                        made.mark = if is_led {
                            CONNECTION_LED
                        } else {
                            CONNECTION_EXPOSED
                        };
                        made.is_v6 = cluster.is_ipv6();
                        made.for_own = if is_nodes_own {
                            for_all.map_or(Own::Same, |pods| Own::By {
                                processes: others.unwrap_or(pods),
                                pods,
                            })
                        } else {
                            Own::NoPods
                        };
                    }
                    Some(chain)
                }
            };
            let by_peers = if is_nodes_own {
                None
            } else {
                self.peers_chain(chain, cluster.is_ipv6(), port, host)
            };
            let of = (cluster, port.protocol, port.port);
            self.keep_clients(first, exposed.vni, of, port.affinity);
            let protocol = port.protocol;
            let node_port = port.node_port.map(|number| (cluster.is_ipv6(), protocol, number));
            self.shared_ports.extend(node_port.zip(by_peers));
            let Some(chain) = by_peers.or(chain) else { continue };
            self.node_ports.extend(node_port.map(|of| (of, chain)));
            for outside in &exposed.addresses {
                let of = (*outside, protocol, port.port);
                self.outside.insert(of, chain);
                self.limited.extend(clients.clone().map(|clients| (of, clients)));
                self.outside_services
                    .insert((*outside, exposed.service.clone(), chain));
            }
        }
    }

    /// Returns the addresses outside of the cluster of which a port leads to backends, each with its Services.
    pub fn outside(&self) -> BTreeSet<(IpAddr, String)> {
        let leads = |chain: &PortChain| !matches!(&chain.goes, Goes::To(backends) if backends.is_empty());
        let ports = self.outside_services.iter();
        let led = ports.filter(|(.., chain)| self.chains.get(*chain).is_some_and(leads));
        led.map(|(address, service, _)| (*address, service.clone()))
            .collect()
    }

    /// Fills in the elements of sets and maps, and the chains that they lead to.
    pub fn fill(&self, values: &mut Values) {
        let is_v4 = |address: &&IpAddr| address.is_ipv4();
        let is_v6 = |address: &&IpAddr| address.is_ipv6();
        values.joined("addresses", self.addresses.iter().filter(is_v4));
        values.joined("addresses6", self.addresses.iter().filter(is_v6));
        values.joined("ports", to_chains(&self.ports, false));
        values.joined("ports6", to_chains(&self.ports, true));
        values.joined("outside", to_chains(&self.outside, false));
        values.joined("outside6", to_chains(&self.outside, true));
        for (is_v6, limited, admitted) in [(false, "limited", "admitted"), (true, "limited6", "admitted6")] {
            let ports = self.limited.iter().filter(|(of, _)| of.0.is_ipv6() == is_v6);
            let element =
                |(address, protocol, port): &(IpAddr, u8, u16)| format!("{address} . {protocol} . {port}");
            values.joined(limited, ports.clone().map(|(of, _)| element(of)));
            let clients = ports.flat_map(|(of, ranges)| {
                let ranges = ranges.iter();
                ranges.map(move |range| format!("{} . {range}", element(of)))
            });
            values.joined(admitted, clients);
        }
        values.joined("node_ports", ports_to_chains(&self.node_ports, false));
        values.joined("node_ports6", ports_to_chains(&self.node_ports, true));
        values.joined("shared_ports", ports_to_chains(&self.shared_ports, false));
        values.joined("shared_ports6", ports_to_chains(&self.shared_ports, true));
        values.each("clients", self.clients.texts());
        let chains = self.chains.iter().enumerate();
        values.each("port_chains", chains.map(|(number, chain)| chain.text(number)));
    }
}

/// Returns the ports of the same number of other droplets, by addresses of the family.
fn ports_of_peers(is_v6: bool, port: &ExposedPort, host: &Host) -> Vec<(IpAddr, u16)> {
    let Some(node_port) = port.node_port else {
        return Vec::new();
    };
    let address_of = |peer: &Underlay| {
        let second = host.droplets.get(&peer.0)?;
        // A droplet takes no packet of IPv6 for another droplet's that isn't from its known address.
        let second = second.filter(|_| host.underlay6.is_some()).map(IpAddr::from);
        if is_v6 { second } else { Some(peer.0.into()) }
    };
    let peers = port.peers.iter().filter_map(address_of);
    peers.map(|peer| (peer, node_port)).collect()
}

/// Returns the elements of a map from a node's port to a chain.
fn ports_to_chains(ports: &NodePorts, is_v6: bool) -> impl Iterator<Item = String> {
    let elements = ports.iter().filter(move |((v6, _, _), _)| *v6 == is_v6);
    elements.map(|((_, protocol, port), chain)| format!("{protocol} . {port} : goto port-{chain}"))
}

/// Returns the elements of a map from address and port to a chain.
fn to_chains(ports: &Ports, is_v6: bool) -> impl Iterator<Item = String> {
    let elements = ports
        .iter()
        .filter(move |((address, _, _), _)| address.is_ipv6() == is_v6);
    elements.map(|((address, protocol, port), chain)| {
        format!("{address} . {protocol} . {port} : goto port-{chain}")
    })
}

impl PortChain {
    /// Returns the places of which a client keeps one.
    fn places(&self) -> Vec<Place> {
        let place = |to: &(IpAddr, u16), mark: Option<String>| {
            let address = SocketAddr::from(*to);
            let dnat = format!(
                "meta l4proto {} dnat {} to {address}",
                self.protocol,
                self.family()
            );
            Place {
                name: format!("{}-{}", affinity::named(to.0), to.1),
                rules: mark.into_iter().chain([dnat]).collect(),
            }
        };
        match &self.goes {
            Goes::To(backends) => backends.iter().map(|to| place(to, None)).collect(),
            Goes::Among {
                here,
                has_share,
                peers,
                ..
            } => {
                let here = here.filter(|_| *has_share).map(|here| Place {
                    name: "here".to_owned(),
                    rules: vec![format!("goto port-{here}")],
                });
                let mark = format!("ct mark set {CONNECTION_SENT_ON:#x}");
                let each = peers.iter().map(|to| place(to, Some(mark.clone())));
                here.into_iter().chain(each).collect()
            }
        }
    }

    fn family(&self) -> &'static str {
        if self.is_v6 { "ip6" } else { "ip" }
    }

    /// Returns the rules by which a connection finds one of the chain's places.
    fn choice(&self, number: usize) -> Vec<String> {
        if let Some(affinity) = &self.affinity {
            return affinity.choice(number, &self.places(), self.is_v6);
        }
        match &self.goes {
            Goes::To(backends) if backends.is_empty() => vec!["counter drop".into()],
            Goes::To(backends) => {
                let each = backends.iter().enumerate();
                let each = each.map(|(index, (address, port))| format!("{index} : {address} . {port}"));
                vec![format!(
                    "meta l4proto {} dnat {} to numgen random mod {} map {{ {} }}",
                    self.protocol,
                    self.family(),
                    backends.len(),
                    each.collect::<Vec<_>>().join(", ")
                )]
            }
            Goes::Among {
                here,
                has_share,
                others,
                peers,
            } => {
                let here = here.filter(|_| *has_share);
                let own = here.map(|here| {
                    format!(
                        "numgen random mod {} vmap {{ 0 : goto port-{here} }}",
                        peers.len() + 1
                    )
                });
                own.into_iter().chain([format!("goto port-{others}")]).collect()
            }
        }
    }

    fn text(&self, number: usize) -> String {
        let mut rules = Vec::new();
        match self.for_own {
            Own::Same => {}
            Own::By { processes, pods } => {
                rules.push(format!("fib saddr type local goto port-{processes}"));
                rules.push(format!("{} goto port-{pods}", from_pod("==")));
            }
            Own::NoPods => rules.extend([format!("{} counter drop", from_pod("==")), node_ports::rule()]),
        }
        if self.mark != 0 {
            // Connections of pods have the mark of their pod.
            rules.push(format!("{} ct mark set {:#x}", from_pod("!="), self.mark));
        }
        match &self.goes {
            Goes::To(_) => {}
            Goes::Among { here, .. } => {
                let from_droplet = if self.is_v6 {
                    "ip6 saddr @droplets6"
                } else {
                    "ip saddr @droplets"
                };
                match here {
                    Some(here) => rules.push(format!("{from_droplet} goto port-{here}")),
                    // The packet is refused at the node's own address. At another address it would only be sent round.
                    None => rules.extend([
                        format!("{from_droplet} fib daddr type local return"),
                        format!("{from_droplet} counter drop"),
                    ]),
                }
            }
        }
        rules.extend(self.choice(number));
        let mut text = String::new();
        if let Some(affinity) = &self.affinity {
            text = affinity.chains(number, &self.places(), self.is_v6);
        }
        text += &chain_text(&format!("port-{number}"), &rules);
        text
    }
}

/// Returns a chain with these rules.
pub(super) fn chain_text(name: &str, rules: &[String]) -> String {
    format!("  chain {name} {{\n    {}\n  }}\n", rules.join("\n    "))
}
