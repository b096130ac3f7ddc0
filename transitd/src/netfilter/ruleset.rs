//! The text of table `inet thuban`, for `nft -f`.
//! No crate: `nftables` and `nftables-json` start the same program, with JSON that is harder to review than rules.
//!
//! Pure. What agents pass to the host's stack has a mark (`thuban_common::tables::mark_of`); rules match on that mark alone,
//! but for the node's own packets, and those of anybody to what it exposes of services.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use thuban_common::services::BackendEntry;
use thuban_common::tables::{
    Address, EndpointKey, HOST_SOURCE, HOST_SOURCE_V6, MARK_ANSWER, MARK_EGRESS, MARK_EGRESS_HOST,
    MARK_HOST_ENDPOINT, MARK_MASK,
};

use super::served::{Served, chain, set};
use crate::attachments::HOST_PREFIX;
use crate::dns::DNS_PORT;
use crate::netlink::host_end::HOST_END;
use crate::program::Program;
use crate::program::row::LocalEndpoint;
use crate::program::service::{Exposed, ExposedPort, Service};

/// The bits that [`MARK_EGRESS`] and [`MARK_EGRESS_HOST`] have in common, of the whole kind.
pub(super) const EITHER: u32 = MARK_MASK & !(MARK_EGRESS ^ MARK_EGRESS_HOST);
/// Mark of a connection by a NodePort, or a balancer's address, to backends outside of the VPC.
pub(super) const MARK_EXPOSED: u32 = 0x0052;
/// The same of one that is led to an endpoint of this node, by its address.
pub(super) const MARK_LED: u32 = 0x0050;
/// The same of one that is sent on to another droplet, whose backends it goes to.
pub(super) const MARK_SENT_ON: u32 = 0x0051;
/// The node's own sources towards pods.
const HOST: Ipv4Addr = Ipv4Addr::new(HOST_SOURCE[0], HOST_SOURCE[1], HOST_SOURCE[2], HOST_SOURCE[3]);
const HOST6: Ipv6Addr = Ipv6Addr::from_octets(HOST_SOURCE_V6);
/// Queries a second by UDP of one tenant's pod, and so many at once after a rest: the socket that they wait in is everybody's.
const MOST_QUERIES: u32 = 1024;
/// Pods that are counted at a time: as many as a node has and more.
const MOST_ASKERS: u32 = 65_535;
pub const TABLE: &str = "thuban";
/// Removes what a former ruleset had, in the transaction that makes the new one.
const REPLACE: &str = "table inet thuban {\n}\ndelete table inet thuban\n";

/// Addresses that transitd is started with.
#[derive(Clone, Copy, Debug)]
pub struct OwnAddresses {
    /// The cluster's DNS, in front of which this node has a listener.
    pub dns: Option<Ipv4Addr>,
    /// This droplet's.
    pub underlay: Ipv4Addr,
}

/// What the rules are made of, besides services.
#[derive(Debug, Default)]
pub struct Host<'a> {
    /// The addresses of the node's own endpoint.
    pub addresses: Vec<IpAddr>,
    /// Where services have addresses, of the VPC of its own or, without an endpoint, of any.
    pub service_ranges: &'a [IpNet],
    /// Of its VPC.
    pub ranges: &'a [IpNet],
    /// Where endpoints of other VPCs don't answer to, their own VPCs' ranges too: nobody outside has such an address.
    pub closed: Vec<IpNet>,
    /// Of services of its VPC, and of those of others whose backends here take what comes.
    pub exposed: Vec<&'a Exposed>,
    /// VNI of its VPC.
    pub vni: Option<u32>,
    /// Backends that are endpoints of this node.
    pub led_to: HashSet<EndpointKey>,
    /// Those of them that may answer to anybody outside.
    pub open: BTreeSet<Address>,
    /// Underlay addresses of the other droplets, if any has a share of what comes to this one.
    pub droplets: BTreeSet<Ipv4Addr>,
}

impl<'a> Host<'a> {
    /// While the node has no endpoint it reaches its own ones alone.
    pub fn of(program: &'a Program) -> Self {
        let endpoint = program.host();
        let vni = endpoint.map(|endpoint| endpoint.vni);
        let exposed = program.exposed();
        let exposed = exposed.filter(|exposed| vni == Some(exposed.key.vni) || exposed.is_local());
        let exposed: Vec<_> = exposed.collect();
        let backends = exposed.iter().flat_map(|exposed| {
            let backends = exposed.local_backends();
            backends.map(|backend| EndpointKey {
                vni: exposed.key.vni,
                address: backend.address,
            })
        });
        let led_to: HashSet<_> = backends.filter(|key| program.has_local(key)).collect();
        let open = led_to.iter().filter(|key| program.has_egress(key.vni));
        let open = open.map(|key| key.address).collect();
        let ranges = vni.map(|vni| program.ranges(vni));
        let others: BTreeSet<u32> = led_to
            .iter()
            .map(|key| key.vni)
            .filter(|of| vni != Some(*of))
            .collect();
        let of_others = others.iter().flat_map(|vni| program.ranges(*vni).0);
        let closed = program.closed_ranges().iter().chain(of_others).copied().collect();
        let mut ports = exposed.iter().flat_map(|exposed| &exposed.ports);
        let droplets = if ports.any(|port| !port.peers.is_empty()) {
            program.droplets().collect()
        } else {
            BTreeSet::new()
        };
        Self {
            addresses: endpoint.into_iter().flat_map(LocalEndpoint::addresses).collect(),
            service_ranges: ranges.map_or(program.service_ranges(), |(_, services)| services),
            ranges: ranges.map_or(&[], |(own, _)| own),
            closed,
            exposed,
            vni,
            led_to,
            open,
            droplets,
        }
    }

    /// Backends of an exposed port on this droplet, if others' are not reached; whether they are endpoints. What is neither
    /// an endpoint here nor outside of the VPC has gone.
    pub(super) fn local_backends(
        &self,
        of: &Exposed,
        port: &ExposedPort,
    ) -> Option<(bool, Vec<(IpAddr, u16)>)> {
        let local = port.local.as_ref()?;
        let key = |backend: &BackendEntry| EndpointKey {
            vni: of.key.vni,
            address: backend.address,
        };
        let as_told = |backend: &BackendEntry| (address(backend.address), u16::from_be(backend.port));
        let led = local.iter().filter(|backend| self.led_to.contains(&key(backend)));
        let led: Vec<_> = led.map(as_told).collect();
        if !led.is_empty() || self.vni != Some(of.key.vni) {
            return Some((true, led));
        }
        let is_outside =
            |(address, _): &(IpAddr, u16)| !self.ranges.iter().any(|range| range.contains(address));
        let outside = local.iter().map(as_told).filter(is_outside);
        Some((false, outside.collect()))
    }

    /// What is led to endpoints of this node by their own addresses: by its own rules, or by those of portmap.
    fn leading(&self) -> Vec<String> {
        let is_unmarked = format!("meta mark & {MARK_MASK:#x} == 0");
        let of_members = format!("meta mark & {MARK_MASK:#x} == {MARK_EGRESS_HOST:#x}");
        let first = "ct direction original ct status dnat";
        // What looks like an answer to the node's own address towards pods, and was translated by somebody's rule for ports of the
        // node: by this way tenants would reach each other.
        let crafted = |family: &str, host: String| {
            format!("iifname \"{HOST_PREFIX}*\" {first} ct original {family} daddr {host} counter drop")
        };
        let mut rules = vec![
            crafted("ip", HOST.to_string()),
            crafted("ip6", HOST6.to_string()),
            format!(
                "ct mark {MARK_LED:#x} ct direction original {is_unmarked} meta mark set meta mark | {MARK_ANSWER:#x}"
            ),
            format!("ct mark 0 {first} {is_unmarked} meta mark set meta mark | {MARK_ANSWER:#x}"),
        ];
        // Their answers would be members' among themselves.
        let own = self.ranges.iter().filter(|range| self.has_family_of(range));
        rules.extend(own.map(|range| {
            let to = format!("{} daddr {range}", family(range.addr()));
            format!("{of_members} {first} {to} meta mark set {MARK_HOST_ENDPOINT:#x}")
        }));
        rules
    }

    fn has_family_of(&self, range: &IpNet) -> bool {
        let mut own = self.addresses.iter();
        own.any(|own| own.is_ipv4() == range.addr().is_ipv4())
    }

    /// Whom endpoints that are led to take for their client: the node, if it is one of its processes, and where they may not
    /// answer to others.
    fn clients(&self) -> Vec<String> {
        let led = format!("oifname \"{HOST_PREFIX}*\" ct status dnat");
        let of_v4 = |ranges: &[IpNet]| {
            let ranges = ranges.iter().filter(|range| range.addr().is_ipv4());
            ranges.map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        let mut rules = vec![format!("{led} fib saddr type local snat ip to {HOST}")];
        let own = of_v4(self.ranges);
        if !own.is_empty() {
            // Nobody outside has such an address.
            rules.push(format!("{led} ip saddr {{ {own} }} counter drop"));
        }
        let of_tenants = if own.is_empty() {
            led
        } else {
            format!("{led} ip daddr != {{ {own} }}")
        };
        rules.push(format!("{of_tenants} ip daddr @open ip saddr != @closed accept"));
        rules.push(format!("{of_tenants} snat ip to {HOST}"));
        rules
    }

    /// What is sent on to other droplets is known by its sender: it goes no farther.
    fn sent_on(&self, underlay: Ipv4Addr) -> impl Iterator<Item = String> {
        let sent_on = format!("ct mark {MARK_SENT_ON:#x} oifname != \"lo\"");
        let own = self.ranges.iter().filter(|range| range.addr().is_ipv4());
        // Nobody outside has such an address.
        let own: Vec<_> = own
            .map(|range| format!("{sent_on} fib saddr type != local ip saddr {range} counter drop"))
            .collect();
        own.into_iter()
            .chain([format!("{sent_on} snat ip to {underlay}")])
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
pub fn ruleset<'a>(services: impl Iterator<Item = &'a Service>, host: &Host, own: OwnAddresses) -> String {
    let OwnAddresses { dns, underlay } = own;
    let served = Served::new(services, host);
    let mut text = String::from(REPLACE);
    text.push_str("table inet thuban {\n");
    served.write(&mut text);
    let closed = host.closed.iter().filter(|range| range.addr().is_ipv4());
    let closed: Vec<_> = closed.map(ToString::to_string).collect();
    set(
        &mut text,
        "set closed",
        "type ipv4_addr; flags interval; auto-merge",
        &closed,
    );
    let open = host.open.iter().map(|open| address(*open));
    let open: Vec<_> = open
        .filter(IpAddr::is_ipv4)
        .map(|address| address.to_string())
        .collect();
    set(&mut text, "set open", "type ipv4_addr", &open);
    let droplets: Vec<_> = host.droplets.iter().map(ToString::to_string).collect();
    set(&mut text, "set droplets", "type ipv4_addr", &droplets);
    let _ = writeln!(
        text,
        "  set askers {{\n    type ipv4_addr; size {MOST_ASKERS}; flags dynamic,timeout; timeout 10s\n  }}"
    );
    let of_pods = format!("meta mark & {EITHER:#x} == {:#x}", MARK_EGRESS & EITHER);
    let of_tenants = format!("meta mark & {MARK_MASK:#x} == {MARK_EGRESS:#x}");
    let not_tenants = format!("meta mark & {MARK_MASK:#x} != {MARK_EGRESS:#x}");
    let is_own = "fib daddr type local";
    let to_pods = format!("oifname \"{HOST_PREFIX}*\"");
    let nowhere = format!("oifname != \"{HOST_PREFIX}*\" oifname != \"{HOST_END}\" counter drop");
    let unled = "ct direction original ct status & dnat == 0";
    let answers = format!("ct mark & {EITHER:#x} == {:#x}", MARK_EGRESS & EITHER);
    let ask_here = |protocol: &str| {
        dns.map_or_else(String::new, |dns| {
            format!("{of_tenants} ip daddr {dns} {protocol} dport 53 dnat ip to {HOST}:{DNS_PORT}")
        })
    };
    let too_many = dns.map(|dns| {
        let rate = format!("limit rate over {MOST_QUERIES}/second burst {MOST_QUERIES} packets");
        format!("{of_tenants} ip daddr {dns} udp dport 53 update @askers {{ ip saddr {rate} }} counter drop")
    });
    let chains = [
        (
            "track",
            "type filter hook prerouting priority mangle",
            vec![
                too_many.unwrap_or_default(),
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
                format!("{to_pods} {unled} ip saddr != {HOST} counter drop"),
                format!("{to_pods} {unled} ip6 saddr != {HOST6} counter drop"),
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
                .chain(host.leading())
                .collect(),
        ),
        (
            // To a pod that has gone: by another way it would be somebody else's, and remembered. What other software
            // translated goes where it wants.
            "gone",
            "type filter hook postrouting priority srcnat - 10",
            vec![format!("ct mark {MARK_LED:#x} ct direction original {nowhere}")],
        ),
        (
            // Before chained plugins' masquerade, which takes any address of the node.
            "lead",
            "type nat hook postrouting priority srcnat - 5",
            host.sent_on(underlay).chain(host.clients()).collect(),
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
        chain(&mut text, name, Some(hook), &rules);
    }
    text.push_str("}\n");
    text
}

pub(super) fn address(bytes: [u8; 16]) -> IpAddr {
    Ipv6Addr::from(bytes).to_canonical()
}

#[cfg(test)]
mod tests {
    use thuban_proto::transit as proto;

    use super::*;

    fn own(dns: Option<Ipv4Addr>) -> OwnAddresses {
        OwnAddresses {
            dns,
            underlay: Ipv4Addr::new(172, 31, 0, 5),
        }
    }

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
                local: false,
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
            own(None),
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
            own(None),
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
                    ..Default::default()
                },
                proto::ExposedPort {
                    protocol: 6,
                    port: 80,
                    node_port: 0,
                    ..Default::default()
                },
            ],
            addresses: vec![service("192.0.2.1", &[]).key.address.to_vec()],
            ..Default::default()
        })
        .unwrap();
        let host = Host {
            addresses: vec!["10.42.0.9".parse().unwrap()],
            service_ranges: &["10.96.0.0/12".parse().unwrap(), "fd00:96::/108".parse().unwrap()],
            exposed: vec![&exposed],
            vni: Some(1),
            ..Host::default()
        };
        let text = ruleset(std::iter::empty(), &host, own(Some(Ipv4Addr::new(10, 96, 0, 10))));
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
        for other in [
            0,
            MARK_EXPOSED,
            MARK_LED,
            MARK_SENT_ON,
            MARK_ANSWER,
            MARK_HOST_ENDPOINT,
            0x4000,
            0x8000,
        ] {
            assert_ne!(other & EITHER, MARK_EGRESS & EITHER, "{other:#x}");
        }
        assert_eq!(MARK_ANSWER & 0xe000, 0, "bits of kubelet, kube-proxy and portmap");
    }
}
