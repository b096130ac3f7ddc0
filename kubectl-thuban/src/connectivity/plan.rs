//! What the test makes: two VPCs with equal addresses, a namespace for each, and servers in them. Pure.

use std::net::IpAddr;

use thuban_api::cidr::Cidr;

/// Ports at which every server answers. A policy allows the first one at the server `guarded`, and not the second one.
pub const PORTS: [u16; 2] = [8080, 8081];
/// The two networks of each VPC, in the order of their ranges.
pub const NETWORKS: [&str; 2] = ["web", "db"];
/// The number of addresses of a network's range, a /24.
const NETWORK_SIZE: u128 = 256;
/// Servers whose addresses the other VPC has, too.
pub const TWINS: [&str; 4] = ["web-0", "web-1", "db-0", "db-1"];
/// The server that the policy selects.
pub const GUARDED: &str = "guarded";
/// The server whose address the other VPC does not have.
pub const ALONE: &str = "alone";
pub const CLIENT: &str = "client";
/// The Service whose backends are the twins.
pub const SERVICE: &str = "server";
/// The host number of `alone` in each VPC.
const ALONE_HOSTS: [u128; 2] = [13, 14];
/// On one node no address may be in use twice, so the second VPC's addresses are so much higher.
const SINGLE_NODE_DISTANCE: u128 = 100;

/// How many nodes the test uses at most.
pub const MAX_NODES: usize = 2;

/// Servers: name, place of the network in [`NETWORKS`], host number, whether it is on another node than the client.
const SERVERS: [(&str, usize, u128, bool); 5] = [
    ("web-0", 0, 10, false),
    ("web-1", 0, 11, true),
    ("db-0", 1, 10, false),
    ("db-1", 1, 11, true),
    (GUARDED, 0, 12, true),
];

/// One of the two VPCs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    A,
    B,
}

impl Side {
    pub const BOTH: [Self; 2] = [Self::A, Self::B];

    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    /// Returns the place in arrays of both.
    pub fn place(self) -> usize {
        match self {
            Self::A => 0,
            Self::B => 1,
        }
    }

    fn suffix(self) -> &'static str {
        match self {
            Self::A => "a",
            Self::B => "b",
        }
    }
}

/// Returns the name of the namespace of a VPC, and of the VPC.
pub fn namespace(prefix: &str, side: Side) -> String {
    format!("{prefix}-{}", side.suffix())
}

/// A pod that answers with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    pub side: Side,
    pub name: &'static str,
    /// The place of the network in [`NETWORKS`].
    pub network: usize,
    pub address: IpAddr,
    pub node: String,
}

/// What one run of the test makes.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Namespaces, VPCs and networks begin with it.
    prefix: String,
    pub image: String,
    /// The range of both VPCs.
    pub range: Cidr,
    /// One node or two.
    nodes: Vec<String>,
    /// Marks all objects of this run, so that it deletes no others.
    pub run: String,
}

impl Plan {
    /// Makes a plan for one node or more, of which it takes two. None: no node, or the range is too small.
    pub fn new(prefix: &str, image: &str, range: Cidr, nodes: &[String], run: &str) -> Option<Self> {
        let nodes: Vec<String> = nodes.iter().take(MAX_NODES).cloned().collect();
        let is_large = range.is_ipv4() && range.size() >= NETWORK_SIZE * NETWORKS.len() as u128;
        (is_large && !nodes.is_empty()).then(|| Self {
            prefix: prefix.to_owned(),
            image: image.to_owned(),
            range,
            nodes,
            run: run.to_owned(),
        })
    }

    /// Returns the name of the namespace, and of the VPC.
    pub fn namespace(&self, side: Side) -> String {
        namespace(&self.prefix, side)
    }

    /// Returns the name of a network, by its place.
    pub fn network(&self, side: Side, place: usize) -> String {
        let network = NETWORKS.get(place).copied().unwrap_or_default();
        format!("{}-{network}", self.namespace(side))
    }

    /// Returns the range of a network, the same in both VPCs.
    pub fn network_range(&self, place: usize) -> String {
        let base = self.range.nth(place as u128 * NETWORK_SIZE);
        format!("{}/24", base.unwrap_or_else(|| self.range.base()))
    }

    /// Returns the name by which a server answers.
    pub fn answer(&self, side: Side, server: &str) -> String {
        format!("{}/{server}", self.namespace(side))
    }

    pub fn has_two_nodes(&self) -> bool {
        self.nodes.len() > 1
    }

    /// Returns the number of dividers and bouncers: none shares a node with its sibling.
    pub fn roles(&self) -> usize {
        self.nodes.len()
    }

    /// Returns the node of a VPC's client, or the other one. The clients of the two VPCs are on different nodes.
    pub fn node(&self, side: Side, is_other: bool) -> &str {
        let place = (side.place() + usize::from(is_other)) % self.nodes.len().max(1);
        self.nodes.get(place).map_or("", String::as_str)
    }

    /// Returns the servers of both VPCs. Twins are on different nodes, because an address is in use once on a node.
    pub fn servers(&self) -> Vec<Server> {
        let mut servers = Vec::new();
        for side in Side::BOTH {
            let alone = ALONE_HOSTS.get(side.place()).copied().unwrap_or_default();
            for (name, network, host, is_other) in SERVERS.into_iter().chain([(ALONE, 0, alone, true)]) {
                // The other node's twins say nothing new on the same node.
                if is_other && TWINS.contains(&name) && !self.has_two_nodes() {
                    continue;
                }
                let distance = if self.has_two_nodes() {
                    0
                } else {
                    SINGLE_NODE_DISTANCE * side.place() as u128
                };
                let place = network as u128 * NETWORK_SIZE + host + distance;
                servers.push(Server {
                    side,
                    name,
                    network,
                    address: self.range.nth(place).unwrap_or_else(|| self.range.base()),
                    node: self.node(side, is_other).to_owned(),
                });
            }
        }
        servers
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{ALONE, Plan, Side, TWINS};
    use crate::connectivity::testing::{plan, plan_of};

    fn addresses(plan: &Plan, side: Side, name: &str) -> Vec<String> {
        let servers = plan.servers().into_iter();
        let own = servers.filter(|server| server.side == side && server.name == name);
        own.map(|server| server.address.to_string()).collect()
    }

    #[test]
    fn twins_have_equal_addresses_on_different_nodes() {
        let plan = plan();
        for name in TWINS {
            let [a, b] = Side::BOTH.map(|side| addresses(&plan, side, name));
            assert_eq!(a.len(), 1, "{name}");
            assert_eq!(a, b, "{name}");
        }
        assert_ne!(addresses(&plan, Side::A, ALONE), addresses(&plan, Side::B, ALONE));
        assert_eq!(addresses(&plan, Side::A, "db-1"), ["10.213.1.11"]);
    }

    #[test]
    fn no_address_is_in_use_twice_on_a_node() {
        for nodes in [&["node-a"][..], &["node-a", "node-b", "node-c"]] {
            let plan = plan_of(nodes);
            let servers = plan.servers();
            let places: BTreeSet<_> = servers
                .iter()
                .map(|server| (server.node.as_str(), server.address))
                .collect();
            assert_eq!(places.len(), servers.len(), "{servers:?}");
            assert!(servers.iter().all(|server| plan.range.is_host(server.address)));
            let used: BTreeSet<_> = places.iter().map(|(node, _)| *node).collect();
            assert_eq!(used.len(), nodes.len().min(2));
        }
    }

    #[test]
    fn a_range_that_is_too_small_makes_no_plan() {
        let nodes = ["node-a".to_owned()];
        let plan = |range: &str| Plan::new("t", "image", range.parse().unwrap(), &nodes, "1");
        assert!(plan("10.1.0.0/23").is_some());
        assert!(plan("10.1.0.0/24").is_none());
        assert!(plan("fd00::/64").is_none());
        assert!(Plan::new("t", "image", "10.1.0.0/23".parse().unwrap(), &[], "1").is_none());
    }
}
