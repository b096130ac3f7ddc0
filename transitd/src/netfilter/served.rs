//! What the node translates of services: maps from an address and a port to a chain, and a chain for each way to backends.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::net::IpAddr;

use thuban_common::packet::ipv4::TCP;
use thuban_common::tables::MARK_EGRESS;
use thuban_rows::{Exposed, ExposedPort, NodeService};

use super::ruleset::{EITHER, Host, MARK_EXPOSED, MARK_LED, MARK_SENT_ON};

/// Where packets to an address and a port go.
type Ports = BTreeMap<(IpAddr, u8, u16), usize>;

/// What the node serves.
#[derive(Default)]
pub(super) struct Served {
    /// Where what has no port here is refused.
    addresses: Vec<IpAddr>,
    ports: Ports,
    /// Of services that nodes expose, at addresses outside of the cluster.
    outside: Ports,
    /// The same at each of the node's: whether it is IPv6, protocol, port.
    node_ports: BTreeMap<(bool, u8, u16), usize>,
    ways: Vec<Way>,
}

/// Where connections go.
struct Way {
    /// Of its connections; 0: none.
    mark: u32,
    protocol: u8,
    is_v6: bool,
    goes: Goes,
    /// What becomes of what processes and pods of the node itself ask for.
    for_own: Own,
}

enum Goes {
    /// None: dropped.
    To(Vec<(IpAddr, u16)>),
    /// To one of so many other droplets or to this one, all alike; what comes from a droplet goes no farther.
    Among {
        here: Option<usize>,
        /// Whether what comes from elsewhere stays here too; not with backends that end.
        has_share: bool,
        others: usize,
        droplets: usize,
    },
}

/// See [`Way::for_own`].
enum Own {
    /// As of others.
    Same,
    /// Another way.
    By(usize),
    /// A tenant's port: pods of other VPCs don't get there.
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
                let way = made.way(port.protocol, backends.collect());
                made.ports.insert((address, way.0, port.port), way.1);
            }
        }
        for exposed in &host.exposed {
            made.expose(exposed, host);
        }
        made
    }

    /// Its protocol and number.
    fn way(&mut self, protocol: u8, backends: Vec<(IpAddr, u16)>) -> (u8, usize) {
        self.ways.push(Way {
            mark: 0,
            protocol,
            is_v6: backends.first().is_some_and(|(address, _)| address.is_ipv6()),
            goes: Goes::To(backends),
            for_own: Own::Same,
        });
        (protocol, self.ways.len() - 1)
    }

    /// To backends wherever they are, by the address in its VPC, where agents translate it; none if there are none.
    fn cluster_way(&mut self, cluster: IpAddr, port: &ExposedPort) -> Option<usize> {
        let served = self.ports.get(&(cluster, port.protocol, port.port)).copied();
        let backends = match served.and_then(|way| self.ways.get(way)) {
            Some(Way {
                goes: Goes::To(backends),
                ..
            }) => backends.clone(),
            // The node serves it, and it has no backends.
            _ if self.addresses.contains(&cluster) => return None,
            _ => vec![(cluster, port.port)],
        };
        let (_, way) = self.way(port.protocol, backends);
        if let Some(made) = self.ways.get_mut(way).filter(|_| served.is_some()) {
            // The node answers for backends elsewhere that are not reached by its endpoint: they must answer the node.
            made.mark = MARK_EXPOSED;
        }
        Some(way)
    }

    /// To backends of this droplet and of its peers, by their ports of the same number; none if there are no peers.
    fn peers_way(&mut self, here: Option<usize>, port: &ExposedPort, host: &Host) -> Option<usize> {
        // Pods that are led to answer a node by TCP alone.
        let node_port = port.node_port.filter(|_| port.protocol == TCP)?;
        let peers = port.peers.iter().filter(|peer| host.droplets.contains(&peer.0));
        let peers: Vec<_> = peers.map(|peer| (IpAddr::from(peer.0), node_port)).collect();
        if peers.is_empty() {
            return None;
        }
        let droplets = peers.len();
        let own = port.local.iter().flatten();
        let has_share = here.is_some()
            && own
                .into_iter()
                .any(|backend| !port.ending.contains(&backend.address));
        let (_, others) = self.way(port.protocol, peers);
        self.ways.get_mut(others)?.mark = MARK_SENT_ON;
        self.ways.push(Way {
            mark: 0,
            protocol: port.protocol,
            is_v6: false,
            goes: Goes::Among {
                here,
                has_share,
                others,
                droplets,
            },
            for_own: Own::NoPods,
        });
        Some(self.ways.len() - 1)
    }

    fn expose(&mut self, exposed: &Exposed, host: &Host) {
        let cluster = exposed.address;
        let is_nodes_own = host.vni == Some(exposed.vni);
        if !is_nodes_own && cluster.is_ipv6() {
            // Their endpoints answer to the node by IPv4 alone.
            return;
        }
        for port in &exposed.ports {
            let for_all = if is_nodes_own {
                self.cluster_way(cluster, port)
            } else {
                None
            };
            let way = match host.local_backends(exposed, port) {
                None => for_all,
                // Of another VPC the node is silent where it has none.
                Some((_, backends)) if backends.is_empty() && !is_nodes_own => None,
                Some((is_led, backends)) => {
                    let (_, way) = self.way(port.protocol, backends);
                    if let Some(made) = self.ways.get_mut(way) {
                        made.mark = if is_led { MARK_LED } else { MARK_EXPOSED };
                        made.is_v6 = cluster.is_ipv6();
                        made.for_own = if is_nodes_own {
                            for_all.map_or(Own::Same, Own::By)
                        } else {
                            Own::NoPods
                        };
                    }
                    Some(way)
                }
            };
            let by_peers = if is_nodes_own {
                None
            } else {
                self.peers_way(way, port, host)
            };
            let Some(way) = by_peers.or(way) else { continue };
            let protocol = port.protocol;
            if let Some(node_port) = port.node_port {
                self.node_ports
                    .insert((cluster.is_ipv6(), protocol, node_port), way);
            }
            for outside in &exposed.addresses {
                self.outside.insert((*outside, protocol, port.port), way);
            }
        }
    }

    pub fn write(&self, text: &mut String) {
        for (is_v6, suffix, kind) in [(false, "", "ipv4_addr"), (true, "6", "ipv6_addr")] {
            let addresses = self.addresses.iter().filter(|address| address.is_ipv6() == is_v6);
            let addresses: Vec<_> = addresses.map(ToString::to_string).collect();
            set(
                text,
                &format!("set addresses{suffix}"),
                &format!("type {kind}"),
                &addresses,
            );
            for (name, ports) in [("ports", &self.ports), ("outside", &self.outside)] {
                let ways = ports
                    .iter()
                    .filter(|((address, _, _), _)| address.is_ipv6() == is_v6);
                let ways: Vec<_> = ways
                    .map(|((address, protocol, port), way)| {
                        format!("{address} . {protocol} . {port} : goto port-{way}")
                    })
                    .collect();
                set(
                    text,
                    &format!("map {name}{suffix}"),
                    &format!("type {kind} . inet_proto . inet_service : verdict"),
                    &ways,
                );
            }
            let ways = self.node_ports.iter().filter(|((v6, _, _), _)| *v6 == is_v6);
            let ways: Vec<_> = ways
                .map(|((_, protocol, port), way)| format!("{protocol} . {port} : goto port-{way}"))
                .collect();
            set(
                text,
                &format!("map node-ports{suffix}"),
                "type inet_proto . inet_service : verdict",
                &ways,
            );
        }
        for (number, way) in self.ways.iter().enumerate() {
            way.write(number, text);
        }
        for (name, map) in [("services", "ports"), ("outside", "outside")] {
            let _ = writeln!(
                text,
                "  chain {name} {{\n    ip daddr . meta l4proto . th dport vmap @{map}\n    \
                 ip6 daddr . meta l4proto . th dport vmap @{map}6\n  }}"
            );
        }
        text.push_str(
            "  chain node-ports {\n    meta nfproto ipv4 meta l4proto . th dport vmap @node-ports\n    \
             meta nfproto ipv6 meta l4proto . th dport vmap @node-ports6\n  }\n  \
             chain refuse {\n    meta l4proto tcp reject with tcp reset\n    reject\n  }\n",
        );
    }
}

impl Way {
    fn write(&self, number: usize, text: &mut String) {
        let family = if self.is_v6 { "ip6" } else { "ip" };
        let of_pods = |is| format!("meta mark & {EITHER:#x} {is} {:#x}", MARK_EGRESS & EITHER);
        let mut rules = Vec::new();
        match self.for_own {
            Own::Same => {}
            Own::By(own) => {
                rules.push(format!("fib saddr type local goto port-{own}"));
                rules.push(format!("{} goto port-{own}", of_pods("==")));
            }
            Own::NoPods => rules.push(format!("{} counter drop", of_pods("=="))),
        }
        if self.mark != 0 {
            // Pods' connections have the mark of their pod.
            rules.push(format!("{} ct mark set {:#x}", of_pods("!="), self.mark));
        }
        match &self.goes {
            Goes::To(backends) if backends.is_empty() => rules.push("counter drop".into()),
            Goes::To(backends) => {
                let each = backends.iter().enumerate();
                let each = each.map(|(index, (address, port))| format!("{index} : {address} . {port}"));
                rules.push(format!(
                    "meta l4proto {} dnat {family} to numgen random mod {} map {{ {} }}",
                    self.protocol,
                    backends.len(),
                    each.collect::<Vec<_>>().join(", ")
                ));
            }
            Goes::Among {
                here,
                has_share,
                others,
                droplets,
            } => {
                let own = here.map(|here| format!("goto port-{here}"));
                match &own {
                    Some(own) => rules.push(format!("ip saddr @droplets {own}")),
                    // Refused at the node's own address; another one would only be sent round.
                    None => rules.extend([
                        "ip saddr @droplets fib daddr type local return".to_owned(),
                        "ip saddr @droplets counter drop".to_owned(),
                    ]),
                }
                if let Some(own) = own.filter(|_| *has_share) {
                    rules.push(format!("numgen random mod {} vmap {{ 0 : {own} }}", droplets + 1));
                }
                rules.push(format!("goto port-{others}"));
            }
        }
        chain(text, &format!("port-{number}"), None, &rules);
    }
}

/// A chain; with a hook it is a base chain, which lets pass what no rule takes.
pub(super) fn chain(text: &mut String, name: &str, hook: Option<&str>, rules: &[String]) {
    // Writing to a String cannot fail, here and below.
    let _ = writeln!(text, "  chain {name} {{");
    if let Some(hook) = hook {
        let _ = writeln!(text, "    {hook}; policy accept;");
    }
    for rule in rules {
        let _ = writeln!(text, "    {rule}");
    }
    text.push_str("  }\n");
}

pub(super) fn set(text: &mut String, name: &str, kind: &str, elements: &[String]) {
    let _ = writeln!(text, "  {name} {{\n    {kind}");
    if !elements.is_empty() {
        let _ = writeln!(text, "    elements = {{ {} }}", elements.join(", "));
    }
    text.push_str("  }\n");
}
