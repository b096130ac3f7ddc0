//! The text of table `inet thuban`, for `nft -f`.
//!
//! Pure. What agents pass to the host's stack has a mark (`thuban_common::tables::mark_of`); rules match on that mark alone,
//! but for the node's own packets, and those of anybody to what it exposes of services.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use thuban_common::tables::{
    HOST_SOURCE, HOST_SOURCE_V6, MARK_ANSWER, MARK_EGRESS, MARK_EGRESS_HOST, MARK_HOST_ENDPOINT, MARK_MASK,
};

use crate::attachments::HOST_PREFIX;
use crate::dns::DNS_PORT;
use crate::netlink::host_end::HOST_END;
use crate::program::Program;
use crate::program::service::{Exposed, Service};

/// The bits that [`MARK_EGRESS`] and [`MARK_EGRESS_HOST`] have in common, of the whole kind.
const EITHER: u32 = MARK_MASK & !(MARK_EGRESS ^ MARK_EGRESS_HOST);
/// Mark of a connection by a NodePort, or a balancer's address, to backends outside of the VPC.
const MARK_EXPOSED: u32 = 0x0052;
/// The node's own sources towards pods.
const HOST: Ipv4Addr = Ipv4Addr::new(HOST_SOURCE[0], HOST_SOURCE[1], HOST_SOURCE[2], HOST_SOURCE[3]);
const HOST6: Ipv6Addr = Ipv6Addr::from_octets(HOST_SOURCE_V6);
/// Removes what a former ruleset had, in the transaction that makes the new one.
const REPLACE: &str = "table inet thuban {\n}\ndelete table inet thuban\n";

/// What the rules are made of, besides services.
#[derive(Debug, Default)]
pub struct Host<'a> {
    /// The addresses of the node's own endpoint.
    pub addresses: Vec<IpAddr>,
    /// Where services have addresses, of the VPC of its own or, without an endpoint, of any.
    pub service_ranges: &'a [IpNet],
    /// Of services of its VPC.
    pub exposed: Vec<&'a Exposed>,
}

impl<'a> Host<'a> {
    /// Nothing of it while the node has no endpoint.
    pub fn of(program: &'a Program) -> Self {
        let Some(endpoint) = program.host() else {
            return Self {
                service_ranges: program.service_ranges(),
                ..Self::default()
            };
        };
        let second = endpoint.address6.map(|net| IpAddr::from(net.addr()));
        Self {
            addresses: std::iter::once(endpoint.address.into()).chain(second).collect(),
            service_ranges: program.ranges(endpoint.vni).1,
            exposed: program
                .exposed()
                .filter(|exposed| exposed.key.vni == endpoint.vni)
                .collect(),
        }
    }

    /// What is to be sent by the endpoint, once its destination is known.
    fn marking(&self, of_pods: &str) -> Vec<String> {
        let by_family = self.addresses.iter().flat_map(|own| {
            let ranges = self.service_ranges.iter();
            let ranges = ranges.filter(|range| range.addr().is_ipv4() == own.is_ipv4());
            ranges.flat_map(|range| {
                let to = format!("{} daddr {range}", family(*own));
                let mark = format!("{to} meta mark set {MARK_HOST_ENDPOINT:#x}");
                // What the node serves itself and did not translate is refused.
                let suffix = if own.is_ipv4() { "" } else { "6" };
                let mark = format!("{} daddr != @addresses{suffix} {mark}", family(*own));
                [
                    format!("{of_pods} {mark}"),
                    format!("ct direction original ct status dnat {mark}"),
                ]
            })
        });
        by_family.collect()
    }

    /// What is for services and would leave elsewhere: the endpoint is not there.
    fn astray(&self, of_pods: &str) -> Vec<String> {
        let ranges = self.service_ranges.iter();
        let rules = ranges.flat_map(|range| {
            let to = format!("{} daddr {range} oifname != \"{HOST_END}\"", family(range.addr()));
            let sent_on = format!("meta mark & {MARK_MASK:#x} == {MARK_HOST_ENDPOINT:#x}");
            [of_pods, &sent_on].map(|mark| format!("{mark} {to} counter drop"))
        });
        rules.collect()
    }

    /// What leaves by the endpoint has its address, and what was to and goes elsewhere, to what nodes serve, has the node's.
    fn sources(&self) -> Vec<String> {
        let by_family = self.addresses.iter().flat_map(|own| {
            let family = family(*own);
            [
                format!("oifname \"{HOST_END}\" {family} saddr != {own} masquerade"),
                format!("oifname != {{ \"{HOST_END}\", \"lo\" }} {family} saddr {own} masquerade"),
            ]
        });
        by_family.collect()
    }
}

fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "ip" } else { "ip6" }
}

/// Everything, with the services that the node serves; two with one address are one.
pub fn ruleset<'a>(
    services: impl Iterator<Item = &'a Service>,
    host: &Host,
    dns: Option<Ipv4Addr>,
) -> String {
    let served = Served::new(services, &host.exposed);
    let mut text = String::from(REPLACE);
    text.push_str("table inet thuban {\n");
    served.write(&mut text);
    let of_pods = format!("meta mark & {EITHER:#x} == {:#x}", MARK_EGRESS & EITHER);
    let of_tenants = format!("meta mark & {MARK_MASK:#x} == {MARK_EGRESS:#x}");
    let not_tenants = format!("meta mark & {MARK_MASK:#x} != {MARK_EGRESS:#x}");
    let is_own = "fib daddr type local";
    let to_pods = format!("oifname \"{HOST_PREFIX}*\"");
    let answers = format!("ct mark & {EITHER:#x} == {:#x}", MARK_EGRESS & EITHER);
    let ask_here = |protocol: &str| {
        dns.map_or_else(String::new, |dns| {
            format!("{of_tenants} ip daddr {dns} {protocol} dport 53 dnat ip to {HOST}:{DNS_PORT}")
        })
    };
    let chains = [
        (
            "track",
            "type filter hook prerouting priority mangle",
            vec![
                // Rules that ask conntrack match nothing of what it doesn't know.
                format!("{of_pods} ct state invalid counter drop"),
                format!("{of_tenants} ct state untracked counter drop"),
                // Another pod's connection: what one pod sends is no answer to what a pod sent out.
                format!("{of_pods} ct direction reply {answers} counter drop"),
                format!("{of_pods} ct direction original ct mark set meta mark"),
                format!("ct direction reply {answers} meta mark set {MARK_ANSWER:#x}"),
            ],
        ),
        (
            // What a server of the node still says to a pod that is gone, when another pod has its address.
            "stale",
            "type filter hook output priority filter",
            vec![
                format!("{to_pods} ct direction original ip saddr != {HOST} counter drop"),
                format!("{to_pods} ct direction original ip6 saddr != {HOST6} counter drop"),
                format!("{to_pods} ct direction original udp sport {DNS_PORT} counter drop"),
            ],
        ),
        (
            "translate",
            "type nat hook prerouting priority dstnat",
            vec![
                // A view of its own for each of the VPCs that nodes are not in.
                ask_here("udp"),
                ask_here("tcp"),
                format!("{of_pods} jump services"),
                // Tenants reach no node, and nobody the node's address towards pods, which takes answers alone.
                format!("{not_tenants} ip daddr != {HOST} {is_own} jump node-ports"),
                format!("{not_tenants} ip6 daddr != {HOST6} {is_own} jump node-ports"),
                "jump outside".into(),
            ],
        ),
        (
            "translate-own",
            "type nat hook output priority -100",
            vec![
                "jump services".into(),
                format!("oifname \"lo\" ip daddr != 127.0.0.0/8 {is_own} jump node-ports"),
                format!("oifname \"lo\" ip6 daddr != ::1 {is_own} jump node-ports"),
                "jump outside".into(),
            ],
        ),
        (
            "send-on",
            "type filter hook prerouting priority dstnat + 10",
            // Of the cluster's DNS tenants have its names alone, by the view.
            dns.map(|dns| format!("{of_tenants} ip daddr {dns} counter drop"))
                .into_iter()
                .chain(host.marking(&of_pods))
                .collect(),
        ),
        (
            "leave",
            "type nat hook postrouting priority srcnat",
            [
                format!("{of_pods} masquerade"),
                format!("ct mark {MARK_EXPOSED:#x} oifname != \"lo\" masquerade"),
            ]
            .into_iter()
            .chain(host.sources())
            .collect(),
        ),
        (
            "serve",
            "type filter hook forward priority filter",
            [
                format!("{of_pods} ip daddr @addresses goto refuse"),
                format!("{of_pods} ip6 daddr @addresses6 goto refuse"),
            ]
            .into_iter()
            .chain(host.astray(&of_pods))
            .collect(),
        ),
        (
            // The agent judges by address, and a node may have others than it knows of.
            "guard",
            "type filter hook input priority filter",
            vec![format!("{of_tenants} ct status & dnat == 0 counter drop")],
        ),
    ];
    for (name, hook, rules) in chains {
        // Writing to a String cannot fail, here and below.
        let _ = writeln!(text, "  chain {name} {{\n    {hook}; policy accept;");
        for rule in rules {
            let _ = writeln!(text, "    {rule}");
        }
        text.push_str("  }\n");
    }
    text.push_str("}\n");
    text
}

/// Where packets to an address and a port go.
type Ports = BTreeMap<(IpAddr, u8, u16), usize>;

/// What the node serves.
#[derive(Default)]
struct Served {
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
    /// The node answers for backends elsewhere that are not reached by its endpoint: they must answer the node.
    is_exposed: bool,
    protocol: u8,
    /// At least one.
    backends: Vec<(IpAddr, u16)>,
}

impl Served {
    fn new<'a>(services: impl Iterator<Item = &'a Service>, exposed: &[&Exposed]) -> Self {
        let mut made = Self::default();
        let mut seen = HashSet::new();
        for service in services.filter(|service| !service.inside) {
            let address = address(service.key.address);
            if !seen.insert(address) {
                continue;
            }
            made.addresses.push(address);
            for port in service.ports.iter().filter(|port| !port.backends.is_empty()) {
                let backends = port.backends.iter();
                let backends = backends.map(|of| (self::address(of.address), u16::from_be(of.port)));
                let way = made.way(port.key.protocol, backends.collect());
                let port = u16::from_be(port.key.port);
                made.ports.insert((address, way.0, port), way.1);
            }
        }
        for exposed in exposed {
            made.expose(exposed);
        }
        made
    }

    /// Its protocol and number.
    fn way(&mut self, protocol: u8, backends: Vec<(IpAddr, u16)>) -> (u8, usize) {
        self.ways.push(Way {
            is_exposed: false,
            protocol,
            backends,
        });
        (protocol, self.ways.len() - 1)
    }

    /// To the address in its VPC, where agents translate it.
    fn expose(&mut self, exposed: &Exposed) {
        let cluster = address(exposed.key.address);
        for port in &exposed.ports {
            let served = self.ports.get(&(cluster, port.protocol, port.port)).copied();
            let backends = match served.and_then(|way| self.ways.get(way)) {
                Some(way) => way.backends.clone(),
                // The node serves it, and it has no backends.
                None if self.addresses.contains(&cluster) => continue,
                None => vec![(cluster, port.port)],
            };
            let (protocol, way) = self.way(port.protocol, backends);
            if let Some(made) = self.ways.get_mut(way) {
                made.is_exposed = served.is_some();
            }
            if let Some(node_port) = port.node_port {
                self.node_ports
                    .insert((cluster.is_ipv6(), protocol, node_port), way);
            }
            for outside in &exposed.addresses {
                self.outside.insert((address(*outside), protocol, port.port), way);
            }
        }
    }

    fn write(&self, text: &mut String) {
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
            let family = way.backends.first().map_or("ip", |(address, _)| family(*address));
            let backends = way.backends.iter().enumerate();
            let backends = backends.map(|(index, (address, port))| format!("{index} : {address} . {port}"));
            let backends = backends.collect::<Vec<_>>().join(", ");
            let mark = if way.is_exposed {
                // Pods' connections have the mark of their pod.
                format!(
                    "meta mark & {EITHER:#x} != {:#x} ct mark set {MARK_EXPOSED:#x}\n    ",
                    MARK_EGRESS & EITHER
                )
            } else {
                String::new()
            };
            let _ = writeln!(
                text,
                "  chain port-{number} {{\n    {mark}meta l4proto {} dnat {family} to numgen random mod {} map {{ {backends} }}\n  }}",
                way.protocol,
                way.backends.len(),
            );
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

fn set(text: &mut String, name: &str, kind: &str, elements: &[String]) {
    let _ = writeln!(text, "  {name} {{\n    {kind}");
    if !elements.is_empty() {
        let _ = writeln!(text, "    elements = {{ {} }}", elements.join(", "));
    }
    text.push_str("  }\n");
}

fn address(bytes: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(bytes).to_canonical()
}

#[cfg(test)]
mod tests {
    use thuban_proto::transit as proto;

    use super::*;

    fn service(address: &str, backends: &[(&str, u32)]) -> Service {
        let bytes = |text: &str| {
            let address: IpAddr = text.parse().unwrap();
            match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets().to_vec(),
                IpAddr::V6(v6) => v6.octets().to_vec(),
            }
        };
        let backends = backends.iter().map(|(address, port)| proto::ServiceBackend {
            address: bytes(address),
            port: *port,
        });
        Service::try_from(proto::ServiceRow {
            vni: 7,
            address: bytes(address),
            ports: vec![proto::ServicePort {
                protocol: 6,
                port: 443,
                backends: backends.collect(),
                affinity_seconds: 0,
            }],
            inside: false,
            names: false,
        })
        .unwrap()
    }

    #[test]
    fn a_service_is_translated_to_its_backends_and_refused_without() {
        let two = service("10.96.0.1", &[("172.31.0.1", 6443), ("172.31.0.2", 6443)]);
        let text = ruleset(
            [&two, &two, &service("10.96.0.9", &[])].into_iter(),
            &Host::default(),
            None,
        );
        assert!(text.contains("elements = { 10.96.0.1, 10.96.0.9 }"), "{text}");
        assert!(
            text.contains("elements = { 10.96.0.1 . 6 . 443 : goto port-0 }"),
            "{text}"
        );
        assert!(
            text.contains(
                "dnat ip to numgen random mod 2 map { 0 : 172.31.0.1 . 6443, 1 : 172.31.0.2 . 6443 }"
            ),
            "{text}"
        );
    }

    #[test]
    fn both_families_have_tables_of_their_own() {
        let text = ruleset(
            [&service("fd00:96::1", &[("fd00:1::1", 6443)])].into_iter(),
            &Host::default(),
            None,
        );
        assert!(
            text.contains("set addresses6 {\n    type ipv6_addr\n    elements = { fd00:96::1 }"),
            "{text}"
        );
        assert!(
            text.contains("dnat ip6 to numgen random mod 1 map { 0 : fd00:1::1 . 6443 }"),
            "{text}"
        );
    }

    #[test]
    fn what_is_exposed_leads_to_the_services_address_by_the_nodes_endpoint() {
        let exposed = Exposed::try_from(proto::ExposedRow {
            vni: 1,
            address: service("10.96.0.7", &[]).key.address.to_vec(),
            ports: vec![
                proto::ExposedPort {
                    protocol: 17,
                    port: 53,
                    node_port: 30053,
                },
                proto::ExposedPort {
                    protocol: 6,
                    port: 80,
                    node_port: 0,
                },
            ],
            addresses: vec![service("192.0.2.1", &[]).key.address.to_vec()],
        })
        .unwrap();
        let host = Host {
            addresses: vec!["10.42.0.9".parse().unwrap()],
            service_ranges: &["10.96.0.0/12".parse().unwrap(), "fd00:96::/108".parse().unwrap()],
            exposed: vec![&exposed],
        };
        let text = ruleset(std::iter::empty(), &host, Some(Ipv4Addr::new(10, 96, 0, 10)));
        for part in [
            "17 . 30053 : goto port-0 }",
            "192.0.2.1 . 6 . 80 : goto port-1, 192.0.2.1 . 17 . 53 : goto port-0",
            "meta l4proto 6 dnat ip to numgen random mod 1 map { 0 : 10.96.0.7 . 80 }",
            "ct status dnat ip daddr != @addresses ip daddr 10.96.0.0/12 meta mark set 0x53",
            "oifname \"thuban0\" ip saddr != 10.42.0.9 masquerade",
            "ip daddr 10.96.0.10 udp dport 53 dnat ip to 169.254.64.1:6085",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            !text.contains("fd00:96::/108 meta mark set"),
            "without an address of that family: {text}"
        );
    }

    #[test]
    fn marks_of_pods_are_told_from_those_of_answers_and_of_others() {
        for kind in [MARK_EGRESS, MARK_EGRESS_HOST] {
            assert_eq!(kind & EITHER, MARK_EGRESS & EITHER);
        }
        for other in [0, MARK_ANSWER, MARK_HOST_ENDPOINT, 0x4000, 0x8000] {
            assert_ne!(other & EITHER, MARK_EGRESS & EITHER, "{other:#x}");
        }
        assert_eq!(MARK_ANSWER & 0xe000, 0, "bits of kubelet, kube-proxy and portmap");
    }
}
