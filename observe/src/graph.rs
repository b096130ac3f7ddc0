//! The graph of the last minute: what there is, and what sends to what. Pure.
//!
//! Invariant: a reader of a namespace gets its own pods and Services, the networks, roles and droplets that they have,
//! and one node that stands for all that is withheld. The answer's size is bounded: with too many networks or pods,
//! pods are shown as their networks.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use serde::Serialize;
use thuban_common::counters::Counter;

use crate::flow::{End, Flow, reason};
use crate::names::{Kind, Name, Names, Placed, Who};
use crate::reports::validation::Mode;
use crate::store::Recent;
use crate::view::Scope;

/// With more networks, or more pods and Services, pods are shown as their networks.
const MAX_NETWORKS: usize = 200;
const MAX_NODES: usize = 2_000;
/// The most edges of an answer. Those with drops and those with most bytes stay.
const MAX_EDGES: usize = 5_000;
/// The most addresses without name that have nodes of their own.
const MAX_ADDRESSES: usize = 100;
/// The most droplets that are nodes.
const MAX_DROPLETS: usize = 200;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Graph {
    pub generated_unix_ms: u64,
    pub window_seconds: u64,
    /// Whether pods are shown as their networks, or parts are missing.
    pub truncated: bool,
    pub vpcs: Vec<VpcBox>,
    pub nodes: Vec<Node>,
    pub edges: Vec<Edge>,
    pub droplets: Vec<DropletState>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct VpcBox {
    pub name: String,
    pub vni: Option<u32>,
    pub networks: Vec<String>,
    pub truncated: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
pub struct Node {
    pub id: String,
    pub kind: &'static str,
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub vpc: Option<String>,
    pub network: Option<String>,
    pub address: Option<IpAddr>,
    pub droplet: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Edge {
    pub from: String,
    pub to: String,
    /// Of packets that passed.
    pub bytes: u64,
    pub packets: u64,
    pub dropped: u64,
    pub reasons: Vec<Reason>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Reason {
    pub reason: String,
    pub meaning: &'static str,
    pub remedy: &'static str,
    pub packets: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct DropletState {
    pub name: String,
    pub connected: bool,
    pub mode: &'static str,
}

/// Makes the graph of what a reader sees, without the time. `mode`: what a droplet's programs tell of; none for a
/// droplet without a stream.
pub fn graph(recent: &Recent, scope: &Scope, names: &Names, mode: impl Fn(&str) -> Option<Mode>) -> Graph {
    let own = Own::of(scope, names);
    let mut nodes = Nodes {
        is_collapsed: own.networks.len() > MAX_NETWORKS || own.endpoints.len() > MAX_NODES,
        ..Nodes::default()
    };
    let is_collapsed = nodes.is_collapsed;
    own.add_nodes(&mut nodes, names);
    let mut sums: BTreeMap<(String, String), Sum> = BTreeMap::new();
    let is_part = |flow: &Flow| flow.is_counted() && scope.sees(flow);
    for flow in recent.flows.iter().filter(|flow| is_part(flow)) {
        let ends = [scope.shown(&flow.from), scope.shown(&flow.to)];
        if let [Some(from), Some(to)] = ends.map(|end| nodes.of_end(end, scope.vpc(flow))) {
            sums.entry((from, to)).or_default().add(flow);
        }
    }
    let mut edges: Vec<Edge> = sums
        .into_iter()
        .map(|((from, to), sum)| sum.edge(from, to))
        .collect();
    let has_all_edges = edges.len() <= MAX_EDGES;
    if !has_all_edges {
        edges.sort_by_key(|edge| std::cmp::Reverse((edge.dropped, edge.bytes)));
        edges.truncate(MAX_EDGES);
    }
    let states = own.droplets.iter().map(|name| {
        let mode = mode(name);
        DropletState {
            name: name.to_string(),
            connected: mode.is_some(),
            mode: mode.unwrap_or_default().name(),
        }
    });
    Graph {
        generated_unix_ms: 0,
        window_seconds: recent.seconds,
        truncated: is_collapsed || nodes.is_cut || !has_all_edges,
        vpcs: own.boxes(names, is_collapsed),
        droplets: states.collect(),
        nodes: nodes.by_id.into_values().collect(),
        edges,
    }
}

/// What is the reader's.
struct Own<'a> {
    endpoints: Vec<&'a Placed>,
    vpcs: BTreeSet<&'a Name>,
    networks: BTreeSet<&'a Name>,
    droplets: BTreeSet<&'a Name>,
}

impl<'a> Own<'a> {
    fn of(scope: &Scope, names: &'a Names) -> Self {
        let is_own = |placed: &&Placed| placed.who.kind != Kind::Node && scope.owns(&placed.who);
        let endpoints: Vec<&Placed> = names.endpoints().filter(is_own).collect();
        if *scope == Scope::All {
            return Self {
                endpoints,
                vpcs: names.vpcs().map(|(name, _)| name).collect(),
                networks: names.networks().map(|(name, _)| name).collect(),
                droplets: names.droplets().collect(),
            };
        }
        Self {
            vpcs: endpoints.iter().map(|placed| &placed.who.vpc).collect(),
            networks: endpoints.iter().map(|placed| &placed.who.network).collect(),
            droplets: endpoints
                .iter()
                .filter_map(|placed| placed.who.droplet.as_ref())
                .collect(),
            endpoints,
        }
    }

    fn add_nodes(&self, nodes: &mut Nodes, names: &Names) {
        for (name, network) in names.networks().filter(|(name, _)| self.networks.contains(name)) {
            nodes.add_network(name, &network.vpc);
        }
        if self.droplets.len() <= MAX_DROPLETS {
            for droplet in &self.droplets {
                nodes.add_droplet(droplet);
            }
        }
        if nodes.is_collapsed {
            return;
        }
        for placed in &self.endpoints {
            nodes.add_member(&placed.who, placed.addresses.first().copied());
        }
        for (name, role) in names.roles() {
            let is_own = role
                .network
                .as_ref()
                .is_none_or(|network| self.networks.contains(network));
            if is_own && self.vpcs.contains(&role.vpc) {
                nodes.add(Node {
                    id: format!("role:{name}"),
                    kind: "role",
                    name: Some(name.to_string()),
                    vpc: Some(role.vpc.to_string()),
                    network: role.network.as_ref().map(ToString::to_string),
                    droplet: role.droplet.as_ref().map(ToString::to_string),
                    ..Node::default()
                });
            }
        }
    }

    fn boxes(&self, names: &Names, truncated: bool) -> Vec<VpcBox> {
        let mut networks: BTreeMap<&Name, Vec<String>> = BTreeMap::new();
        for (name, network) in names.networks().filter(|(name, _)| self.networks.contains(name)) {
            networks.entry(&network.vpc).or_default().push(name.to_string());
        }
        let own = names.vpcs().filter(|(name, _)| self.vpcs.contains(name));
        own.map(|(name, vpc)| VpcBox {
            name: name.to_string(),
            vni: vpc.vni,
            networks: networks.remove(name).unwrap_or_default(),
            truncated,
        })
        .collect()
    }
}

/// The nodes of a graph, by their ids.
#[derive(Default)]
struct Nodes {
    is_collapsed: bool,
    /// Whether something found no room.
    is_cut: bool,
    addresses: usize,
    by_id: BTreeMap<String, Node>,
}

impl Nodes {
    /// Adds a node, if it is new and there is room. Returns the id of a node that is there.
    fn add(&mut self, node: Node) -> Option<String> {
        let id = node.id.clone();
        if !self.by_id.contains_key(&id) {
            // Ends of edges have as much room again, and networks are always there.
            if self.by_id.len() >= 2 * MAX_NODES && node.kind != "network" {
                self.is_cut = true;
                return None;
            }
            self.by_id.insert(id.clone(), node);
        }
        Some(id)
    }

    fn add_network(&mut self, name: &Name, vpc: &Name) -> Option<String> {
        self.add(Node {
            id: format!("network:{name}"),
            kind: "network",
            name: Some(name.to_string()),
            vpc: Some(vpc.to_string()),
            network: Some(name.to_string()),
            ..Node::default()
        })
    }

    fn add_droplet(&mut self, name: &str) -> Option<String> {
        self.add(Node {
            id: format!("droplet:{name}"),
            kind: "droplet",
            name: Some(name.to_owned()),
            ..Node::default()
        })
    }

    fn add_member(&mut self, who: &Arc<Who>, address: Option<IpAddr>) -> Option<String> {
        let kind = match who.kind {
            Kind::Pod => "pod",
            Kind::Service => "service",
            Kind::Node => return self.add_droplet(who.name.as_deref().unwrap_or_default()),
        };
        if self.is_collapsed {
            return self.add_network(&who.network, &who.vpc);
        }
        self.add(Node {
            id: format!("{kind}:{}", who.full_name()),
            kind,
            name: who.name.as_ref().map(ToString::to_string),
            namespace: who.namespace.as_ref().map(ToString::to_string),
            vpc: Some(who.vpc.to_string()),
            network: Some(who.network.to_string()),
            address,
            droplet: who.droplet.as_ref().map(ToString::to_string),
        })
    }

    /// Returns the node of a flow's end; none if there is no room for it.
    fn of_end(&mut self, end: Option<&End>, vpc: Option<&Name>) -> Option<String> {
        let Some(end) = end else {
            return self.add(Node {
                id: "withheld".to_owned(),
                kind: "withheld",
                ..Node::default()
            });
        };
        if let Some(who) = &end.who {
            return self.add_member(who, Some(end.address));
        }
        let (kind, vpc) = if end.is_outside {
            ("outside", None)
        } else {
            ("unknown", vpc)
        };
        let of_vpc = vpc.map(|vpc| format!("{vpc}/")).unwrap_or_default();
        let id = format!("{kind}:{of_vpc}{}", end.address);
        if !self.by_id.contains_key(&id) {
            if self.is_collapsed || self.addresses >= MAX_ADDRESSES {
                // All further ones are one node.
                return self.add(Node {
                    id: kind.to_owned(),
                    kind,
                    ..Node::default()
                });
            }
            self.addresses += 1;
        }
        self.add(Node {
            id,
            kind,
            vpc: vpc.map(ToString::to_string),
            address: Some(end.address),
            ..Node::default()
        })
    }
}

/// What is added up for an edge.
#[derive(Default)]
struct Sum {
    packets: u64,
    bytes: u64,
    /// By verdict.
    dropped: BTreeMap<u8, u64>,
}

impl Sum {
    fn add(&mut self, flow: &Flow) {
        if flow.is_dropped() {
            let packets = self.dropped.entry(flow.verdict).or_default();
            *packets = packets.saturating_add(flow.packets);
        } else {
            self.packets = self.packets.saturating_add(flow.packets);
            self.bytes = self.bytes.saturating_add(flow.bytes);
        }
    }

    fn edge(self, from: String, to: String) -> Edge {
        let dropped = self
            .dropped
            .values()
            .fold(0_u64, |sum, packets| sum.saturating_add(*packets));
        let reasons = self.dropped.into_iter().map(|(verdict, packets)| {
            let counter = Counter::of(verdict.into());
            Reason {
                reason: reason(verdict).into_owned(),
                meaning: counter.map_or("a reason that only a newer version knows", Counter::reason),
                remedy: counter.map_or("upgrade thuban-observe", Counter::remedy),
                packets,
            }
        });
        Edge {
            from,
            to,
            bytes: self.bytes,
            packets: self.packets,
            dropped,
            reasons: reasons.collect(),
        }
    }
}

#[cfg(test)]
mod tests;
