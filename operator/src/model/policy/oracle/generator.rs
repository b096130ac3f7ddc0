//! Random objects of network policy, and packets between their pods.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fastrand::Rng;
use k8s_openapi::api::networking::v1::NetworkPolicySpec;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use thuban_api::ClusterNetworkPolicySpec;
use thuban_rows::NamedPort;

use super::{End, Labels, Objects, Packet, Pod};

/// Makes objects from small alphabets, so that they meet.
pub struct Generator(pub Rng);

/// The namespaces of all objects.
pub const NAMESPACES: [&str; 3] = ["a", "b", "c"];
const NAMES: [&str; 3] = ["p", "q", "r"];
const PORT_NAMES: [&str; 3] = ["http", "dns", "none"];
const PORTS: [u16; 6] = [1, 2, 3, 4, 5, 65_535];
const BLOCKS: [&str; 8] = [
    "0.0.0.0/0",
    "10.0.0.0/29",
    "10.0.0.0/30",
    "10.0.0.2/31",
    "10.0.0.3/32",
    "::/0",
    "fd00::/126",
    "fd00::3/128",
];
/// Each within the block of the same place.
const EXCEPT: [&str; 8] = [
    "10.0.0.0/30",
    "10.0.0.4/30",
    "10.0.0.0/31",
    "10.0.0.2/32",
    "10.0.0.3/32",
    "fd00::/127",
    "fd00::2/127",
    "fd00::3/128",
];
const OUTSIDE: [[&str; 2]; 2] = [["192.0.2.1", "2001:db8::1"], ["10.0.0.7", "fd00::7"]];

impl Generator {
    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.0.usize(..of.len())]
    }

    fn percent(&mut self, percent: u8) -> bool {
        self.0.u8(..100) < percent
    }

    fn list<T>(&mut self, lengths: std::ops::Range<usize>, mut item: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.0.usize(lengths)).map(|_| item(self)).collect()
    }

    /// Makes labels of a pod or, with other keys, of a namespace or node. Few, so that selectors of them are met.
    fn labels(&mut self, keys: &[&str]) -> Labels {
        let mut labels = Labels::new();
        for key in keys {
            if self.percent(70) {
                labels.insert((*key).to_owned(), self.one(&["x", "y"]).to_owned());
            }
        }
        labels
    }

    pub fn namespace(&mut self, name: &str) -> Labels {
        let mut labels = self.labels(&["team", "stage"]);
        labels.insert("kubernetes.io/metadata.name".to_owned(), name.to_owned());
        labels
    }

    pub fn nodes(&mut self) -> Vec<(Labels, Vec<IpAddr>)> {
        self.list(0..3, |random| {
            let labels = random.labels(&["zone"]);
            let addresses = random.one(&OUTSIDE);
            let addresses = addresses.iter().filter_map(|address| address.parse().ok());
            (labels, addresses.collect())
        })
    }

    /// Makes the pod with the addresses of the number, which is below 6.
    pub fn pod(&mut self, number: u8) -> Pod {
        Pod {
            namespace: self.one(&NAMESPACES).to_owned(),
            labels: self.labels(&["app", "tier", "thuban.dev/vpc"]),
            ports: self.ports(),
            vpc: self.one(&["x", "y"]).to_owned(),
            network: self.one(&["x", "y"]).to_owned(),
            addresses: [
                [10, 0, 0, number].into(),
                [0xfd00, 0, 0, 0, 0, 0, 0, number.into()].into(),
            ],
            on_host_network: self.percent(8),
        }
    }

    fn ports(&mut self) -> BTreeSet<NamedPort> {
        let port = |random: &mut Self| NamedPort {
            name: random.one(&PORT_NAMES[..2]).to_owned(),
            protocol: random.one(&[6, 17]),
            port: random.one(&PORTS),
        };
        self.list(0..4, port).into_iter().collect()
    }

    pub fn objects(&mut self) -> Objects {
        let mut objects = Objects {
            namespaces: NAMESPACES
                .map(|name| (name.to_owned(), self.namespace(name)))
                .into(),
            nodes: self.nodes(),
            pods: (0..6).map(|number| self.pod(number)).collect(),
            ..Objects::default()
        };
        for _ in 0..4 {
            self.change_policy(&mut objects);
        }
        objects
    }

    /// Makes, changes or removes one policy. Returns its namespace, if it has one, and its name.
    pub fn change_policy(&mut self, objects: &mut Objects) -> (Option<String>, String) {
        let (is_gone, name) = (self.percent(30), self.one(&NAMES).to_owned());
        if self.percent(50) {
            let namespace = self.one(&NAMESPACES).to_owned();
            let key = (namespace.clone(), name.clone());
            objects.network_policies.remove(&key);
            if !is_gone {
                objects.network_policies.insert(key, self.network_policy());
            }
            return (Some(namespace), name);
        }
        objects.cluster_policies.remove(&name);
        if !is_gone {
            objects
                .cluster_policies
                .insert(name.clone(), self.cluster_policy());
        }
        (None, name)
    }

    fn selector(&mut self, keys: &[&str]) -> Value {
        let mut selector = json!({});
        if self.percent(40) {
            selector["matchLabels"] = json!(self.labels(&[keys[0]]));
        }
        if self.percent(40) {
            let expression = |random: &mut Self| {
                let (key, values) = (
                    random.one(keys),
                    random.list(1..3, |random| random.one(&["x", "y", "z"])),
                );
                match random.one(&["In", "NotIn", "Exists", "DoesNotExist"]) {
                    operator @ ("In" | "NotIn") => {
                        json!({"key": key, "operator": operator, "values": values})
                    }
                    operator => json!({"key": key, "operator": operator}),
                }
            };
            selector["matchExpressions"] = json!(self.list(1..3, expression));
        }
        selector
    }

    fn of_pods(&mut self) -> Value {
        if self.percent(6) {
            return json!({"matchLabels": {"thuban.dev/by": "shared-service"}});
        }
        self.selector(&["app", "tier", "thuban.dev/vpc", "thuban.dev/network"])
    }

    fn of_namespaces(&mut self) -> Value {
        if self.percent(20) {
            let values = self.list(1..3, |random| random.one(&NAMESPACES));
            return json!({"matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "In", "values": values},
            ]});
        }
        self.selector(&["team", "stage"])
    }

    fn network_policy(&mut self) -> NetworkPolicySpec {
        let mut spec = json!({});
        if self.percent(90) {
            spec["podSelector"] = self.of_pods();
        }
        if self.percent(60) {
            spec["policyTypes"] =
                json!(self.one(&[&["Ingress"][..], &["Egress"], &["Ingress", "Egress"], &[]]));
        }
        for (list, peers) in [("ingress", "from"), ("egress", "to")] {
            if self.percent(70) {
                spec[list] = json!(self.list(0..3, |random| random.network_policy_rule(peers)));
            }
        }
        read(spec)
    }

    fn network_policy_rule(&mut self, peers: &str) -> Value {
        let mut rule = json!({});
        if self.percent(80) {
            rule[peers] = json!(self.list(0..3, Self::network_policy_peer));
        }
        if self.percent(60) {
            rule["ports"] = json!(self.list(0..3, Self::network_policy_port));
        }
        rule
    }

    fn network_policy_peer(&mut self) -> Value {
        match self.0.u8(..4) {
            0 => json!({"podSelector": self.of_pods()}),
            1 => json!({"namespaceSelector": self.of_namespaces()}),
            2 => json!({"namespaceSelector": self.of_namespaces(), "podSelector": self.of_pods()}),
            _ => {
                let place = self.0.usize(..BLOCKS.len());
                let except = self.percent(50).then(|| [EXCEPT[place]]);
                json!({"ipBlock": {"cidr": BLOCKS[place], "except": except}})
            }
        }
    }

    fn network_policy_port(&mut self) -> Value {
        let mut port = json!({});
        if self.percent(70) {
            port["protocol"] = json!(self.one(&["TCP", "UDP", "SCTP"]));
        }
        match self.0.u8(..4) {
            0 => {}
            1 => port["port"] = json!(self.one(&PORT_NAMES)),
            2 => port["port"] = json!(self.one(&PORTS)),
            _ => [port["port"], port["endPort"]] = self.range().map(|port| json!(port)),
        }
        port
    }

    fn range(&mut self) -> [u16; 2] {
        let (one, other) = (self.one(&PORTS), self.one(&PORTS));
        [one.min(other), one.max(other)]
    }

    fn cluster_policy(&mut self) -> ClusterNetworkPolicySpec {
        let subject = self.cluster_peer();
        let spec = json!({
            "tier": self.one(&["Admin", "Baseline"]),
            "priority": self.one(&[0, 7, 7, 1000]),
            "subject": subject,
            "ingress": self.list(0..4, |random| random.cluster_rule("from")),
            "egress": self.list(0..4, |random| random.cluster_rule("to")),
        });
        read(spec)
    }

    fn cluster_rule(&mut self, peers: &str) -> Value {
        let peer = |random: &mut Self| match random.0.u8(..100) {
            0..3 => json!({"later": {}}),
            3..50 if peers == "to" => random.cluster_block(),
            _ => random.cluster_peer(),
        };
        json!({
            "action": self.one(&["Accept", "Deny", "Pass"]),
            peers: self.list(1..3, peer),
            "protocols": self.list(0..3, Self::cluster_protocol),
        })
    }

    fn cluster_peer(&mut self) -> Value {
        if self.percent(40) {
            return json!({"namespaces": self.of_namespaces()});
        }
        json!({"pods": {"namespaceSelector": self.of_namespaces(), "podSelector": self.of_pods()}})
    }

    fn cluster_block(&mut self) -> Value {
        match self.0.u8(..5) {
            0 => json!({"domainNames": ["example.com"]}),
            1 | 2 => json!({"nodes": self.selector(&["zone"])}),
            _ => json!({"networks": self.list(1..3, |random| random.one(&BLOCKS))}),
        }
    }

    fn cluster_protocol(&mut self) -> Value {
        let protocol = self.one(&["tcp", "udp", "sctp"]);
        match self.0.u8(..20) {
            0 => json!({"later": {}}),
            1..4 => json!({protocol: {}}),
            4..8 => json!({"destinationNamedPort": self.one(&PORT_NAMES)}),
            8..13 => json!({protocol: {"destinationPort": {"number": self.one(&PORTS)}}}),
            _ => {
                let [start, end] = self.range();
                json!({protocol: {"destinationPort": {"range": {"start": start, "end": end}}}})
            }
        }
    }

    /// Makes the backends of a port of a service, and its protocol: pods of other VPCs, which sometimes are alike, or
    /// addresses outside.
    pub fn backends<'a>(&mut self, objects: &'a Objects) -> (u8, Vec<(End<'a>, u16)>) {
        let is_outside = self.percent(40);
        let first = &objects.pods[self.0.usize(..objects.pods.len())];
        let protocol = self.one(&[6, 17, 132]);
        // A port that a pod has a name for is hit rarely by chance.
        let named: Vec<&NamedPort> = first.ports.iter().collect();
        if !is_outside && !named.is_empty() && self.percent(50) {
            let NamedPort { protocol, port, .. } = self.one(&named);
            let end = End {
                address: None,
                pod: Some(first),
                by_shared_service: false,
            };
            return (*protocol, vec![(end, *port)]);
        }
        let backends = self.list(0..4, |random| {
            let outside = random.one(&OUTSIDE)[random.0.usize(..2)].parse().ok();
            let other = &objects.pods[random.0.usize(..objects.pods.len())];
            let pod = if random.percent(60) { first } else { other };
            let end = End {
                address: outside.filter(|_| is_outside),
                pod: (!is_outside).then_some(pod),
                by_shared_service: false,
            };
            (end, random.one(&PORTS))
        });
        (protocol, backends)
    }

    /// Makes a packet that a node sends on to a pod, for a pod of another VPC. None: the VPC has no node.
    pub fn packet_by_shared_service<'a>(&mut self, objects: &'a Objects) -> Option<Packet<'a>> {
        let family = self.0.usize(..2);
        let nodes = objects.pods.iter().filter(|pod| pod.on_host_network);
        let node = self.0.choice(nodes.collect::<Vec<_>>())?;
        let members = objects.pods.iter();
        let members = members.filter(|pod| !pod.on_host_network && pod.vpc == node.vpc);
        let to = self.0.choice(members.collect::<Vec<_>>())?;
        let end = |pod: &'a Pod, is_node: bool| End {
            address: Some(pod.addresses[family]),
            pod: (!is_node).then_some(pod),
            by_shared_service: is_node,
        };
        Some(Packet {
            from: end(node, true),
            to: end(to, false),
            protocol: self.one(&[6, 17, 132]),
            port: self.one(&PORTS),
            behind: &[],
        })
    }

    /// Makes a packet between two pods, or a pod and an address outside.
    pub fn packet<'a>(&mut self, objects: &'a Objects) -> Packet<'a> {
        let family = self.0.usize(..2);
        let mut end = |can_be_outside: bool| {
            let outside = self.one(&OUTSIDE)[family].parse().ok();
            let is_outside = can_be_outside && self.percent(15);
            if let Some(address) = outside.filter(|_| is_outside) {
                return End {
                    address: Some(address),
                    pod: None,
                    by_shared_service: false,
                };
            }
            let pod = &objects.pods[self.0.usize(..objects.pods.len())];
            End {
                address: Some(pod.addresses[family]),
                pod: Some(pod),
                by_shared_service: false,
            }
        };
        let from = end(true);
        let to = end(from.pod.is_some());
        let protocol = self.one(&[6, 6, 17, 132, 1]);
        // A port that the destination has a name for is hit rarely by chance.
        let named: Vec<&NamedPort> = to.pod.iter().flat_map(|pod| &pod.ports).collect();
        if !named.is_empty() && self.percent(30) {
            let NamedPort { protocol, port, .. } = self.one(&named);
            let (protocol, port) = (*protocol, *port);
            return Packet {
                from,
                to,
                protocol,
                port,
                behind: &[],
            };
        }
        let port = if protocol == 1 { 0 } else { self.one(&PORTS) };
        Packet {
            from,
            to,
            protocol,
            port,
            behind: &[],
        }
    }
}

fn read<T: DeserializeOwned>(object: Value) -> T {
    serde_json::from_value(object).unwrap_or_else(|error| unreachable!("the object is readable: {error}"))
}
