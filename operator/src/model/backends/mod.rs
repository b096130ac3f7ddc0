//! Finds the backends of new connections to a Service, by its EndpointSlices: as kube-proxy does, but only members of
//! the Service's VPC, or addresses outside of it by way of nodes.
//!
//! Invariant: no table has an address for which `locate` answers nothing, whatever slices say: their writers may be
//! tenants.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use thiserror::Error;
use thuban_api::OVERLAY_PORT;
use thuban_rows::{self as rows, ExposedPort};

use super::allocation::Family;
use super::service::{Backend, Conditions, EndpointSlice, Named, Port, Service, UDP, protocol_number};
use super::world::{AllHints, Hints};

/// Limits of a droplet's tables.
const MAX_PORTS: usize = rows::MAX_PORTS;
const MAX_BACKENDS: usize = rows::MAX_BACKENDS;
/// The most backends of all ports of a Service together: a row is a part of one message, and tenants write slices.
const MAX_WAYS: usize = 65_536;
/// The most backends on one node of a Service that nodes serve: nodes write all such services again at each change.
const MAX_BY_NODE: usize = 1024;
/// The default affinity in seconds, as in Kubernetes.
const DEFAULT_AFFINITY: u32 = 10_800;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum TooLarge {
    #[error(
        "the Service has {0} ports, and at most {MAX_PORTS} can be served; split it into several Services"
    )]
    Ports(usize),
    #[error(
        "port {port} has {backends} backends of one address family, and at most {MAX_BACKENDS} can be served; split \
         the pods between several Services"
    )]
    Backends { port: u16, backends: usize },
    #[error(
        "the ports of the Service have {0} backends together, and at most {MAX_WAYS} can be served; split the ports \
         between several Services"
    )]
    Ways(usize),
    #[error(
        "a node serves this Service itself, which is possible for at most {MAX_BY_NODE} backends of all ports \
         together; it has {0}: split the backends between several Services"
    )]
    ByNode(usize),
}

/// The data that a Service's rows are made of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Backends {
    /// Each address of the Service with its ports, in the order of the addresses.
    pub tables: Vec<(IpAddr, Vec<rows::Port>)>,
    /// The addresses and ports that nodes are told; none for a Service that nodes take no connections for.
    pub exposed: Vec<(IpAddr, Vec<ExposedPort>)>,
    /// Each front with its ports.
    pub fronts: Vec<(IpAddr, Vec<rows::Port>)>,
    /// The droplet of each backend of local ports and fronts.
    pub homes: BTreeMap<IpAddr, String>,
    /// The hints of ready backends; none if the Service's traffic stays on its nodes.
    pub hints: AllHints,
    /// Number of addresses that new connections go to.
    pub used: usize,
    /// Number of ready addresses that can't be used.
    pub left_out: usize,
    /// A part of the Service would be UDP on the overlay's port between nodes, and is not served.
    pub uses_overlay_port: bool,
    /// The backends are outside of the Service's VPC: nodes serve it, because agents only reach members.
    pub by_node: bool,
    /// Connections to a node go to backends of other nodes too, by way of those nodes: all connections of a tenant's
    /// Service, or those of nodes' own processes where other traffic stays on its node.
    pub by_peers: bool,
}

/// The ways by which connections to nodes reach the Service.
#[derive(Clone, Copy, Debug, Default)]
pub struct WaysIn<'a> {
    /// Addresses that lead to nodes.
    pub outside: &'a [IpAddr],
    /// Those of them that are fronts.
    pub fronts: &'a [IpAddr],
    /// Some of the addresses are droplets' own.
    pub at_droplets: bool,
    /// Nodes are not in the Service's VPC: each node only reaches its own backends.
    pub is_tenants: bool,
}

/// Whether receivers would take packets of a protocol (by its IP number) to a port, outside of every VPC, for the
/// overlay's.
fn is_overlays(protocol: u8, port: u16) -> bool {
    protocol == UDP && port == OVERLAY_PORT
}

/// The place of an address of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// An endpoint of the Service's VPC has it.
    Member,
    /// The address is outside of every VPC, and the Service's VPC may have backends there.
    Outside,
}

/// The known facts about an address of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    pub place: Place,
    /// The droplet that has the address.
    pub droplet: Option<String>,
}

/// The state of a backend, from worse to better; the best backends of a port are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    /// The backend ends, but serves until then.
    Ending,
    Ready,
}

fn state(conditions: Option<&Conditions>) -> Option<State> {
    let is = |condition: Option<bool>, default| condition.unwrap_or(default);
    let Some(conditions) = conditions else {
        return Some(State::Ready);
    };
    if is(conditions.ready, true) {
        Some(State::Ready)
    } else if is(conditions.serving, true) && is(conditions.terminating, false) {
        Some(State::Ending)
    } else {
        None
    }
}

/// Returns the nodes and zones whose clients a backend is for, if its slice names any.
fn hints(backend: &Backend) -> Option<Hints> {
    let names = |named: &Option<Vec<Named>>| named.iter().flatten().map(|named| named.name.clone()).collect();
    let hints = backend.hints.as_ref()?;
    let hints = Hints {
        nodes: names(&hints.for_nodes),
        zones: names(&hints.for_zones),
    };
    (hints != Hints::default()).then_some(hints)
}

/// Returns the IP protocol number; none if droplets can't forward the protocol.
fn protocol(port: &Port) -> Option<u8> {
    protocol_number(port.protocol.as_deref().unwrap_or("TCP"))
}

fn number(port: &Port) -> Option<u16> {
    port.port
        .and_then(|port| u16::try_from(port).ok())
        .filter(|port| *port > 0)
}

/// The protocol and name that connect a Service's port with those of its slices.
type Joint<'a> = (u8, &'a str);

fn joint(port: &Port) -> Option<Joint<'_>> {
    Some((protocol(port)?, port.name.as_deref().unwrap_or_default()))
}

type Found = BTreeMap<(IpAddr, u16), State>;

/// Returns the backends of a Service. `addresses` are the Service's addresses that count. `locate` answers for an
/// address outside, or for one that an endpoint of the Service's VPC and namespace has; if the slice names a pod, the
/// address must be that pod's. For any other address it answers nothing. If a Service has backends both in its VPC and
/// outside, only those outside are used.
pub fn backends<'a>(
    service: &Service,
    addresses: &[IpAddr],
    ways_in: WaysIn,
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    locate: impl Fn(IpAddr, &Backend) -> Option<Located>,
) -> Result<Backends, TooLarge> {
    let ports = ports(service)?;
    let Gathered {
        mut homes,
        mut left_out,
        hints,
        mut found,
        places,
        mut uses_overlay_port,
    } = gather(&ports, slices, locate);
    uses_overlay_port |= has_overlays_node_port(service) || ways_in.at_droplets && has_overlays_port(service);
    let by_node = places.values().any(|place| *place == Place::Outside);
    // Agents take packets of pods to nodes' services on that port for Geneve.
    uses_overlay_port |= by_node && has_overlays_port(service);
    if by_node {
        let is_used = |address: &IpAddr| places.get(address) == Some(&Place::Outside);
        left_out.extend(places.keys().filter(|address| !is_used(address)));
        for ways in found.values_mut() {
            ways.retain(|(address, _), _| is_used(address));
        }
    }
    let is_local = service.is_internal_local();
    let mut used = BTreeSet::new();
    let mut tables = Vec::with_capacity(addresses.len());
    for address in addresses {
        let table = ports.iter().map(|(port, joint)| {
            let found = found.get(&(Family::of(*address), *joint));
            let backends = ways(found, is_local.then_some(&homes), *port)?;
            used.extend(backends.iter().map(|(address, _)| *address));
            Ok(rows::Port {
                protocol: joint.0,
                port: *port,
                // If no droplet has a backend, new connections are refused as always.
                local: is_local && !backends.is_empty(),
                backends: backends.into_iter().map(backend).collect(),
                affinity: affinity(service),
            })
        });
        let table: Vec<rows::Port> = table.collect::<Result<_, _>>()?;
        let ways = table.iter().map(|port| port.backends.len()).sum();
        if ways > MAX_WAYS {
            return Err(TooLarge::Ways(ways));
        }
        if by_node && ways > MAX_BY_NODE {
            return Err(TooLarge::ByNode(ways));
        }
        tables.push((*address, table));
    }
    let exposed = if has_ways_in(service) || !ways_in.outside.is_empty() {
        // One of the cluster's addresses in each family leads to the Service.
        let cluster = service.cluster_ips();
        let addresses = addresses.iter().filter(|address| cluster.contains(address));
        let each = addresses.map(|address| {
            let mut ports = exposed(service, *address, &found, &homes, ways_in.is_tenants)?;
            let members = ports.iter().map(|port| port.members.len());
            if by_node || members.sum::<usize>() > MAX_BY_NODE {
                // Nodes know the backends anyhow, or there are too many for them: agents choose.
                for port in &mut ports {
                    port.members.clear();
                }
            }
            if ways_in.at_droplets {
                ports.retain(|port| !is_overlays(port.protocol, port.port));
            }
            if service.is_external_local() {
                bound(&ports, &homes)?;
            } else {
                cut(&mut ports, &homes);
            }
            Ok((*address, ports))
        });
        each.collect::<Result<_, _>>()?
    } else {
        Vec::new()
    };
    let fronts = if by_node || ways_in.at_droplets {
        Vec::new()
    } else {
        let fronts = ways_in.fronts.iter();
        let fronts = fronts.map(|address| Ok((*address, front(service, *address, &ports, &found)?)));
        fronts.collect::<Result<_, _>>()?
    };
    let by_peers = ways_in.is_tenants != service.is_external_local() && !exposed.is_empty();
    let is_used = is_local || service.is_external_local() || by_peers || !fronts.is_empty();
    homes.retain(|_, _| is_used);
    let hints = if is_local { AllHints::new() } else { hints };
    Ok(Backends {
        tables,
        exposed,
        fronts,
        homes,
        hints,
        used: used.len(),
        left_out: left_out.len(),
        uses_overlay_port,
        by_node,
        by_peers,
    })
}

/// The backends of a Service that slices name, if they are where they may be.
#[derive(Default)]
struct Gathered<'a> {
    /// Droplets of the backends.
    homes: BTreeMap<IpAddr, String>,
    hints: AllHints,
    /// Ready addresses without a place.
    left_out: BTreeSet<IpAddr>,
    found: BTreeMap<(Family, Joint<'a>), Found>,
    places: BTreeMap<IpAddr, Place>,
    /// A backend outside listens at the overlay's port.
    uses_overlay_port: bool,
}

fn gather<'a>(
    ports: &[(u16, Joint)],
    slices: impl IntoIterator<Item = &'a EndpointSlice>,
    locate: impl Fn(IpAddr, &Backend) -> Option<Located>,
) -> Gathered<'a> {
    let mut gathered = Gathered::default();
    for slice in slices {
        let open = slice.ports.iter().flatten();
        let open: Vec<_> = open
            .filter_map(|port| Some((joint(port)?, number(port)?)))
            .collect();
        for backend in slice.backends() {
            let Some(address) = backend.address() else {
                continue;
            };
            let located = locate(address, backend);
            if located
                .as_ref()
                .is_some_and(|located| located.place == Place::Outside)
            {
                // The state doesn't matter: otherwise the condition would come and go with each probe.
                gathered.uses_overlay_port |= open.iter().any(|(joint, port)| {
                    is_overlays(joint.0, *port) && ports.iter().any(|(_, own)| own == joint)
                });
            }
            let Some(state) = state(backend.conditions.as_ref()) else {
                continue;
            };
            let Some(Located { place, droplet }) = located else {
                if state == State::Ready {
                    gathered.left_out.insert(address);
                }
                continue;
            };
            gathered.places.insert(address, place);
            if let Some(hints) = hints(backend).filter(|_| state == State::Ready) {
                gathered.hints.insert(address, hints);
            }
            if let Some(droplet) = droplet {
                gathered.homes.insert(address, droplet);
            }
            for (joint, port) in &open {
                if place == Place::Outside && is_overlays(joint.0, *port) {
                    continue;
                }
                let ways = gathered.found.entry((Family::of(address), *joint)).or_default();
                // A backend that passes from one slice to another is in both for a while.
                let best = ways.entry((address, *port)).or_insert(state);
                *best = state.max(*best);
            }
        }
    }
    gathered
}

/// Returns a port's backends; with `homes` the best ones of each droplet.
fn ways(
    found: Option<&Found>,
    homes: Option<&BTreeMap<IpAddr, String>>,
    port: u16,
) -> Result<Vec<(IpAddr, u16)>, TooLarge> {
    let backends = match homes {
        None => chosen(found.into_iter().flatten()),
        Some(homes) => best_of_each(found, homes),
    };
    if backends.len() > MAX_BACKENDS {
        let backends = backends.len();
        return Err(TooLarge::Backends { port, backends });
    }
    Ok(backends)
}

/// Returns the best backends of each droplet, in order.
fn best_of_each(found: Option<&Found>, homes: &BTreeMap<IpAddr, String>) -> Vec<(IpAddr, u16)> {
    let mut by_droplet: BTreeMap<&str, Found> = BTreeMap::new();
    for ((address, port), state) in found.into_iter().flatten() {
        if let Some(home) = homes.get(address) {
            let here = by_droplet.entry(home).or_default();
            here.insert((*address, *port), *state);
        }
    }
    let each = by_droplet.values().flat_map(|found| chosen(found.iter()));
    let mut all: Vec<_> = each.collect();
    all.sort_unstable();
    all
}

/// Chooses the ready backends; if there is none, those that still serve.
fn chosen<'a>(found: impl Iterator<Item = (&'a (IpAddr, u16), &'a State)> + Clone) -> Vec<(IpAddr, u16)> {
    let best = found.clone().map(|(_, state)| state).max();
    let chosen = found.filter(|(_, state)| Some(*state) == best);
    chosen.map(|(backend, _)| *backend).collect()
}

fn backend((address, port): (IpAddr, u16)) -> rows::Backend {
    rows::Backend { address, port }
}

/// Returns the ports of a Service. The API server allows none twice, and a row must not have one twice either.
fn ports(service: &Service) -> Result<Vec<(u16, Joint<'_>)>, TooLarge> {
    let mut seen = BTreeSet::new();
    let usable = service
        .ports()
        .iter()
        .filter_map(|port| Some((number(port)?, joint(port)?)));
    let usable: Vec<_> = usable
        .filter(|(port, joint)| seen.insert((*port, joint.0)))
        .collect();
    if usable.len() > MAX_PORTS {
        return Err(TooLarge::Ports(usable.len()));
    }
    Ok(usable)
}

/// Returns the port of a Service at each address of each node, if nodes may take connections for it there.
fn node_port(port: &Port) -> Option<u16> {
    let number = port.node_port.and_then(|port| u16::try_from(port).ok())?;
    (!is_overlays(protocol(port)?, number)).then_some(number)
}

fn has_overlays_node_port(service: &Service) -> bool {
    let mut ports = service.ports().iter();
    ports.any(|port| port.node_port == Some(OVERLAY_PORT.into()) && node_port(port).is_none())
}

/// Whether a Service has the overlay's port itself: at a node's address its packets would be the overlay's.
fn has_overlays_port(service: &Service) -> bool {
    let mut ports = service.ports().iter();
    ports.any(|port| protocol(port).is_some_and(|of| number(port).is_some_and(|port| is_overlays(of, port))))
}

/// Whether the Service has ports at nodes' own addresses, or load balancers in front of them.
fn has_ways_in(service: &Service) -> bool {
    let kind = service.spec.as_ref().and_then(|spec| spec.kind.as_deref());
    matches!(kind, Some("NodePort" | "LoadBalancer"))
}

/// Returns the Service's ports in the form for nodes that send on to one of its addresses.
fn exposed(
    service: &Service,
    address: IpAddr,
    found: &BTreeMap<(Family, Joint<'_>), Found>,
    homes: &BTreeMap<IpAddr, String>,
    is_tenants: bool,
) -> Result<Vec<ExposedPort>, TooLarge> {
    let ports = service.ports().iter().take(MAX_PORTS);
    let local = service.is_external_local() || is_tenants;
    let affinity = affinity(service);
    let ports = ports.filter_map(|port| Some((port, joint(port)?, number(port)?)));
    let made = ports.map(|(port, joint, number)| {
        let node_port = node_port(port);
        let all = found.get(&(Family::of(address), joint));
        let found = all.filter(|_| local);
        let all = all.filter(|_| !local && affinity > 0).into_iter().flatten();
        // Ports that all nodes are told are cut instead.
        let backends = if service.is_external_local() {
            ways(found, Some(homes), number)?
        } else {
            best_of_each(found, homes)
        };
        let is_ending =
            |way: &&(IpAddr, u16)| found.and_then(|found| found.get(*way)) == Some(&State::Ending);
        let ending = backends.iter().filter(is_ending);
        let ending = ending.map(|(address, _)| *address).collect();
        Ok(ExposedPort {
            protocol: joint.0,
            port: number,
            node_port,
            local: local.then(|| backends.into_iter().map(backend).collect()),
            ending,
            peers: BTreeSet::new(),
            affinity,
            members: chosen(all).into_iter().map(backend).collect(),
        })
    });
    made.collect()
}

/// Returns the ports of a front, each with its backends wherever they are.
fn front(
    service: &Service,
    address: IpAddr,
    ports: &[(u16, Joint<'_>)],
    found: &BTreeMap<(Family, Joint<'_>), Found>,
) -> Result<Vec<rows::Port>, TooLarge> {
    let ports = ports.iter().map(|(port, joint)| {
        let found = found.get(&(Family::of(address), *joint));
        Ok(rows::Port {
            protocol: joint.0,
            port: *port,
            local: false,
            backends: ways(found, None, *port)?.into_iter().map(backend).collect(),
            affinity: affinity(service),
        })
    });
    ports.collect()
}

/// Returns the droplet of a backend.
fn home<'a>(backend: &rows::Backend, homes: &'a BTreeMap<IpAddr, String>) -> Option<&'a str> {
    homes.get(&backend.address).map(String::as_str)
}

/// Checks that no node has too many backends: all of a node's are written again at each change of one.
fn bound(ports: &[ExposedPort], homes: &BTreeMap<IpAddr, String>) -> Result<(), TooLarge> {
    let mut by_droplet: BTreeMap<&str, usize> = BTreeMap::new();
    for backend in ports.iter().flat_map(|port| port.local.iter().flatten()) {
        if let Some(home) = home(backend, homes) {
            *by_droplet.entry(home).or_default() += 1;
        }
    }
    match by_droplet.into_values().max() {
        Some(most) if most > MAX_BY_NODE => Err(TooLarge::ByNode(most)),
        _ => Ok(()),
    }
}

/// Cuts ports that are sent to all nodes: leaves each node's first backends of each port, as many as a node can have.
fn cut(ports: &mut [ExposedPort], homes: &BTreeMap<IpAddr, String>) {
    let most = (MAX_BY_NODE / ports.len().max(1)).max(1);
    for port in ports {
        let Some(backends) = &mut port.local else { continue };
        let mut by_droplet: BTreeMap<&str, usize> = BTreeMap::new();
        backends.retain(|backend| {
            home(backend, homes).is_some_and(|home| {
                let number = by_droplet.entry(home).or_default();
                *number += 1;
                *number <= most
            })
        });
        let kept: BTreeSet<IpAddr> = backends.iter().map(|backend| backend.address).collect();
        port.ending.retain(|address| kept.contains(address));
    }
}

/// Returns how many seconds a client keeps its backend.
fn affinity(service: &Service) -> u32 {
    let spec = service.spec.as_ref();
    let spec = spec.filter(|spec| spec.session_affinity.as_deref() == Some("ClientIP"));
    let seconds = |config: &super::service::AffinityConfig| config.client_ip.as_ref()?.timeout_seconds;
    spec.map_or(0, |spec| {
        let seconds = spec.session_affinity_config.as_ref().and_then(seconds);
        let seconds = seconds.and_then(|seconds| u32::try_from(seconds).ok());
        seconds.unwrap_or(DEFAULT_AFFINITY)
    })
}

#[cfg(test)]
mod tests;
