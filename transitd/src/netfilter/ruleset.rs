//! The text of table `inet thuban`, for `nft -f`.
//!
//! Pure. What agents pass to the host's stack has a mark (`thuban_common::tables::mark_of`); rules match on that mark alone,
//! but for the node's own packets to services that it serves itself.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_common::packet::ipv4::{SCTP, TCP, UDP};
use thuban_common::tables::{
    HOST_SOURCE, HOST_SOURCE_V6, MARK_ANSWER, MARK_EGRESS, MARK_EGRESS_HOST, MARK_MASK,
};

use crate::attachments::HOST_PREFIX;
use crate::program::service::{Port, Service};

/// The bits that [`MARK_EGRESS`] and [`MARK_EGRESS_HOST`] have in common, of the whole kind.
const EITHER: u32 = MARK_MASK & !(MARK_EGRESS ^ MARK_EGRESS_HOST);
/// The node's own sources towards pods.
const HOST: Ipv4Addr = Ipv4Addr::new(HOST_SOURCE[0], HOST_SOURCE[1], HOST_SOURCE[2], HOST_SOURCE[3]);
const HOST6: Ipv6Addr = Ipv6Addr::from_octets(HOST_SOURCE_V6);
/// Removes what a former ruleset had, in the transaction that makes the new one.
const REPLACE: &str = "table inet thuban {\n}\ndelete table inet thuban\n";

/// Everything, with the services that the node serves; two with one address are one.
pub fn ruleset<'a>(services: impl Iterator<Item = &'a Service>) -> String {
    let served = Served::new(services);
    let mut text = String::from(REPLACE);
    text.push_str("table inet thuban {\n");
    served.write(&mut text);
    let of_pods = format!("meta mark & {EITHER:#x} == {:#x}", MARK_EGRESS & EITHER);
    let of_tenants = format!("meta mark & {MARK_MASK:#x} == {MARK_EGRESS:#x}");
    let to_pods = format!("oifname \"{HOST_PREFIX}*\"");
    let answers = format!("ct mark & {EITHER:#x} == {:#x}", MARK_EGRESS & EITHER);
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
            ],
        ),
        (
            "translate",
            "type nat hook prerouting priority dstnat",
            vec![format!("{of_pods} goto services")],
        ),
        (
            "translate-own",
            "type nat hook output priority -100",
            vec!["goto services".into()],
        ),
        (
            "leave",
            "type nat hook postrouting priority srcnat",
            vec![format!("{of_pods} masquerade")],
        ),
        (
            "serve",
            "type filter hook forward priority filter",
            vec![
                format!("{of_pods} ip daddr @addresses goto refuse"),
                format!("{of_pods} ip6 daddr @addresses6 goto refuse"),
            ],
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

/// What the node serves.
struct Served {
    addresses: Vec<IpAddr>,
    /// In the order of the services.
    ports: Vec<Way>,
}

/// A port of a service that has backends.
struct Way {
    address: IpAddr,
    protocol: &'static str,
    port: u16,
    backends: Vec<(IpAddr, u16)>,
}

impl Served {
    fn new<'a>(services: impl Iterator<Item = &'a Service>) -> Self {
        let mut made = Self {
            addresses: Vec::new(),
            ports: Vec::new(),
        };
        let mut seen = HashSet::new();
        for service in services {
            let address = address(service.key.address);
            if !seen.insert(address) {
                continue;
            }
            made.addresses.push(address);
            for port in service.ports.iter().filter(|port| !port.backends.is_empty()) {
                let Some(protocol) = protocol(port) else {
                    continue;
                };
                let backends = port.backends.iter();
                let backends = backends.map(|of| (self::address(of.address), u16::from_be(of.port)));
                made.ports.push(Way {
                    address,
                    protocol,
                    port: u16::from_be(port.key.port),
                    backends: backends.collect(),
                });
            }
        }
        made
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
            let ways = self.ports.iter().enumerate();
            let ways = ways.filter(|(_, way)| way.address.is_ipv6() == is_v6);
            let ways: Vec<_> = ways
                .map(|(number, way)| {
                    let (address, protocol, port) = (way.address, way.protocol, way.port);
                    format!("{address} . {protocol} . {port} : goto port-{number}")
                })
                .collect();
            set(
                text,
                &format!("map ports{suffix}"),
                &format!("type {kind} . inet_proto . inet_service : verdict"),
                &ways,
            );
        }
        for (number, way) in self.ports.iter().enumerate() {
            let family = if way.address.is_ipv6() { "ip6" } else { "ip" };
            let backends = way.backends.iter().enumerate();
            let backends = backends.map(|(index, (address, port))| format!("{index} : {address} . {port}"));
            let backends = backends.collect::<Vec<_>>().join(", ");
            let _ = writeln!(
                text,
                "  chain port-{number} {{\n    meta l4proto {} dnat {family} to numgen random mod {} map {{ {backends} }}\n  }}",
                way.protocol,
                way.backends.len(),
            );
        }
        text.push_str(
            "  chain services {\n    ip daddr . meta l4proto . th dport vmap @ports\n    \
             ip6 daddr . meta l4proto . th dport vmap @ports6\n  }\n  \
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

fn protocol(port: &Port) -> Option<&'static str> {
    match port.key.protocol {
        TCP => Some("tcp"),
        UDP => Some("udp"),
        SCTP => Some("sctp"),
        _ => None,
    }
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
        })
        .unwrap()
    }

    #[test]
    fn a_service_is_translated_to_its_backends_and_refused_without() {
        let two = service("10.96.0.1", &[("172.31.0.1", 6443), ("172.31.0.2", 6443)]);
        let text = ruleset([&two, &two, &service("10.96.0.9", &[])].into_iter());
        assert!(text.contains("elements = { 10.96.0.1, 10.96.0.9 }"), "{text}");
        assert!(
            text.contains("elements = { 10.96.0.1 . tcp . 443 : goto port-0 }"),
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
        let text = ruleset([&service("fd00:96::1", &[("fd00:1::1", 6443)])].into_iter());
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
    fn marks_of_pods_are_told_from_those_of_answers_and_of_others() {
        for kind in [MARK_EGRESS, MARK_EGRESS_HOST] {
            assert_eq!(kind & EITHER, MARK_EGRESS & EITHER);
        }
        for other in [0, MARK_ANSWER, 0x4000, 0x8000] {
            assert_ne!(other & EITHER, MARK_EGRESS & EITHER, "{other:#x}");
        }
        assert_eq!(MARK_ANSWER & 0xe000, 0, "bits of kubelet, kube-proxy and portmap");
    }
}
