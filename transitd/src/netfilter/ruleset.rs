//! Fills in `thuban.nft`, the text of table `inet thuban`, for `nft -f`. It uses no crate: `nftables` and
//! `nftables-json` start the same program, with JSON that is harder to review than rules.
//!
//! Pure. Packets that agents pass to the host's stack have a mark (`thuban_common::host_stack`), and rules match on
//! that mark alone. The exceptions are the node's own packets, and packets from anybody to services that the node
//! exposes.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use ipnet::IpNet;
use thuban_api::cluster_dns::ClusterDns;
use thuban_common::host_stack::{
    CONNECTION_EXPOSED, CONNECTION_LED, CONNECTION_SENT_ON, DENIED, MARK_ANSWER, MARK_DENIED,
    MARK_DENIED_MASK, MARK_EGRESS, MARK_EGRESS_HOST, MARK_FORBIDDEN, MARK_FROM_POD, MARK_FROM_POD_MASK,
    MARK_HOST_ENDPOINT, MARK_MASK, NFT_TABLE, REJECTED, priority,
};
use thuban_common::policy::REJECTIONS_PER_WINDOW;
use thuban_common::tables::{HOST_SOURCE, HOST_SOURCE_V6, HOST_TRACKED, HOST_TRACKED_V6};
use thuban_rows::NodeService;

use super::host::{Host, from_pod};
use super::node_ports;
use super::served::Served;
use super::template::Values;
use crate::attachments::HOST_PREFIX;
use crate::dns::DNS_PORT;
use crate::netlink::host_end::HOST_END;

const TEMPLATE: &str = include_str!("thuban.nft");
/// The node's own source address towards pods.
const HOST: Ipv4Addr = Ipv4Addr::from_octets(HOST_SOURCE);
const HOST6: Ipv6Addr = Ipv6Addr::from_octets(HOST_SOURCE_V6);
/// The same by protocols whose answers conntrack alone tells.
const TRACKED: Ipv4Addr = Ipv4Addr::from_octets(HOST_TRACKED);
const TRACKED6: Ipv6Addr = Ipv6Addr::from_octets(HOST_TRACKED_V6);
/// Queries a second by UDP that one pod of a tenant may send, and as many at once after a rest. All pods share the
/// socket in which the queries wait.
const MAX_QUERIES: u32 = 1024;
/// The most pods that are counted at a time: more than a node has.
const MAX_ASKERS: u32 = 65_535;

/// The addresses that transitd is started with.
#[derive(Clone, Copy, Debug)]
pub struct OwnAddresses {
    /// The cluster's DNS, in front of which this node has a listener.
    pub dns: Option<ClusterDns>,
    /// The underlay address of this droplet.
    pub underlay: Ipv4Addr,
    /// The first and last source port of pods' connections; `None`: any, as for the node's own connections.
    pub pod_ports: Option<(u16, u16)>,
}

impl OwnAddresses {
    /// Whether tenants that reach this service get a view of it, if they need one.
    pub fn has_view_of(&self, service: &NodeService) -> bool {
        let mut dns = self.dns.into_iter().flat_map(ClusterDns::addresses);
        !service.names || dns.any(|dns| dns == service.address)
    }
}

impl Host<'_> {
    /// Returns matches for the ranges of the node's VPC, of families that its endpoint has.
    fn to_own_ranges(&self) -> impl Iterator<Item = String> {
        let own = self.ranges.iter().filter(|range| self.has_family_of(range));
        own.map(|range| format!("{} daddr {range}", family(range.addr())))
    }

    fn has_family_of(&self, range: &IpNet) -> bool {
        let mut own = self.addresses.iter();
        own.any(|own| own.is_ipv4() == range.addr().is_ipv4())
    }

    /// Returns the rules that mark packets which the endpoint is to send, once their destination is known.
    fn to_services(&self, from_pod: &str) -> Vec<String> {
        let by_family = self.addresses.iter().flat_map(|own| {
            let ranges = self.service_ranges.iter();
            let ranges = ranges.filter(|range| range.addr().is_ipv4() == own.is_ipv4());
            ranges.flat_map(|range| {
                let to = format!("{} daddr {range}", family(*own));
                // A packet to an address that the node serves itself, and that it did not translate, is refused.
                let suffix = if own.is_ipv4() { "" } else { "6" };
                let to = format!("{} daddr != @addresses{suffix} {to}", family(*own));
                let others = format!("meta mark & {MARK_MASK:#x} != {MARK_HOST_ENDPOINT:#x}");
                [
                    // The pod's number stays in the mark: the endpoint's agent counts by it.
                    format!("{from_pod} {to} meta mark set meta mark & {:#x} | {MARK_HOST_ENDPOINT:#x}", !MARK_MASK),
                    format!(
                        "{others} ct direction original ct status dnat {to} meta mark set {MARK_HOST_ENDPOINT:#x}"
                    ),
                ]
            })
        });
        by_family.collect()
    }

    /// Returns the rules that drop packets to services which would leave by another interface, because the endpoint is
    /// not there.
    fn astray(&self, from_pod: &str) -> Vec<String> {
        let ranges = self.service_ranges.iter();
        let rules = ranges.flat_map(|range| {
            let to = format!("{} daddr {range} oifname != \"{HOST_END}\"", family(range.addr()));
            let sent_on = format!("meta mark & {MARK_MASK:#x} == {MARK_HOST_ENDPOINT:#x}");
            [from_pod, &sent_on].map(|mark| format!("{mark} {to} counter drop"))
        });
        rules.collect()
    }

    /// Returns the rules of source addresses. A packet that leaves by the endpoint gets the endpoint's address. A
    /// packet that has the endpoint's address and leaves elsewhere, to an address that nodes serve, gets the node's.
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

    /// Returns the match for packets of a family to other VPCs than the node's.
    fn to_tenant(&self, is_v6: bool) -> String {
        let (number, name) = if is_v6 { ("ipv6", "ip6") } else { ("ipv4", "ip") };
        let own = self.ranges.iter().filter(|range| range.addr().is_ipv6() == is_v6);
        let own: Vec<_> = own.map(ToString::to_string).collect();
        if own.is_empty() {
            format!("meta nfproto {number}")
        } else {
            format!("{name} daddr != {{ {} }}", own.join(", "))
        }
    }

    fn fill(&self, values: &mut Values) {
        let from_pod = from_pod("==");
        let is_v4 = |range: &&IpNet| range.addr().is_ipv4();
        let is_v6 = |range: &&IpNet| range.addr().is_ipv6();
        values.joined("closed", self.closed.iter().filter(is_v4));
        values.joined("closed6", self.closed.iter().filter(is_v6));
        values.joined("open", self.open.iter().filter(|open| open.is_ipv4()));
        values.joined("open6", self.open.iter().filter(|open| open.is_ipv6()));
        values.each("private_range", self.private.iter().copied().filter(is_v4));
        values.each("private_range6", self.private.iter().copied().filter(is_v6));
        values.joined("fronts", self.fronts.iter().filter(|front| front.is_ipv4()));
        values.joined("fronts6", self.fronts.iter().filter(|front| front.is_ipv6()));
        values.joined("droplets", self.droplets.keys());
        let droplets6: BTreeSet<_> = self.droplets.values().flatten().collect();
        values.joined("droplets6", droplets6);
        values.each("underlay6", self.underlay6);
        values.each("to_services", self.to_services(&from_pod));
        values.each("to_own_range", self.to_own_ranges());
        values.joined("own_ranges", self.ranges.iter().filter(is_v4));
        values.joined("own_ranges6", self.ranges.iter().filter(is_v6));
        values.one("led", format_args!("oifname \"{HOST_PREFIX}*\" ct status dnat"));
        values.one("to_tenant", self.to_tenant(false));
        values.one("to_tenant6", self.to_tenant(true));
        values.each("own_sources", self.sources());
        values.each("astray", self.astray(&from_pod));
    }
}

pub(super) fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "ip" } else { "ip6" }
}

/// The table `inet thuban`.
#[derive(Debug)]
pub struct Ruleset {
    pub text: String,
    /// The addresses outside of the cluster of which it leads ports to backends, each with its Services.
    pub outside: BTreeSet<(IpAddr, String)>,
}

/// Returns the whole table, with the services that the node serves; two services with one address count as one.
pub fn ruleset<'a>(
    services: impl Iterator<Item = &'a NodeService>,
    host: &Host,
    own: OwnAddresses,
) -> Ruleset {
    let mut values = Values::default();
    constants(&mut values);
    let served = Served::new(services, host);
    served.fill(&mut values);
    values.one("UNDERLAY", own.underlay);
    dns(own.dns, &mut values);
    let ports = own.pod_ports.map(|(first, last)| format!("{first}-{last}"));
    values.each("pod_ports", ports);
    host.fill(&mut values);
    Ruleset {
        text: values.fill(TEMPLATE),
        outside: served.outside(),
    }
}

/// Fills in the matches for packets to the cluster's DNS, the way to its view, and what tells that nobody listens
/// there.
fn dns(dns: Option<ClusterDns>, values: &mut Values) {
    let addresses = || dns.into_iter().flat_map(ClusterDns::addresses);
    let to = |address: IpAddr| format!("{} daddr {address}", family(address));
    values.each("to_dns", addresses().map(to));
    let views = addresses().flat_map(|address| {
        let view = SocketAddr::new(
            if address.is_ipv4() {
                HOST.into()
            } else {
                HOST6.into()
            },
            DNS_PORT,
        );
        ["udp", "tcp"].map(|transport| {
            let family = family(address);
            format!("{} {transport} dport 53 dnat {family} to {view}", to(address))
        })
    });
    values.each("to_dns_view", views);
    let errors = addresses().map(|address| {
        let icmp = if address.is_ipv4() { "icmp" } else { "icmpv6" };
        format!("ct original {} {icmp} type destination-unreachable", to(address))
    });
    values.each("dns_is_away", errors);
    let elsewhere = addresses().filter(IpAddr::is_ipv6).map(|address| {
        format!("meta nfproto ipv6 ct original ip6 daddr != {address} meta l4proto {{ tcp, udp }} th dport {DNS_PORT}")
    });
    values.each("to_listener_itself", elsewhere);
}

fn constants(values: &mut Values) {
    values.one("NFT_TABLE", NFT_TABLE);
    values.one("LEASE", node_ports::LEASE);
    values.one("NODE_PORT_STALE", node_ports::STALE);
    for (name, mark) in [
        ("MARK_MASK", MARK_MASK),
        ("MARK_ANSWER", MARK_ANSWER),
        ("MARK_DENIED", MARK_DENIED),
        ("MARK_EGRESS_HOST", MARK_EGRESS_HOST),
        ("MARK_FORBIDDEN", MARK_FORBIDDEN),
        ("MARK_HOST_ENDPOINT", MARK_HOST_ENDPOINT),
        ("CONNECTION_LED", CONNECTION_LED),
        ("CONNECTION_SENT_ON", CONNECTION_SENT_ON),
        ("CONNECTION_EXPOSED", CONNECTION_EXPOSED),
    ] {
        values.mark(name, mark);
    }
    for (chain, priority) in [
        ("TRACK", priority::TRACK),
        ("STALE", priority::STALE),
        ("TRANSLATE", priority::TRANSLATE),
        ("TRANSLATE_OWN", priority::TRANSLATE_OWN),
        ("SEND_ON", priority::SEND_ON),
        ("GONE", priority::GONE),
        ("LEAD", priority::LEAD),
        ("LEAVE", priority::LEAVE),
        ("SERVE", priority::SERVE),
        ("GUARD", priority::GUARD),
    ] {
        values.one(chain, priority);
    }
    values.one("MAX_ASKERS", MAX_ASKERS);
    values.one("MAX_QUERIES", MAX_QUERIES);
    values.one("MAX_REJECTIONS", REJECTIONS_PER_WINDOW);
    values.one("DNS_PORT", DNS_PORT);
    values.one("HOST", HOST);
    values.one("HOST6", HOST6);
    values.one("HOST_TRACKED", TRACKED);
    values.one("HOST_TRACKED6", TRACKED6);
    values.one("by_conntrack", "meta l4proto { udp, sctp }");
    values.one("HOST_END", HOST_END);
    values.one("HOST_PREFIX", HOST_PREFIX);
    let egress = |is| format!("meta mark & {MARK_MASK:#x} {is} {MARK_EGRESS:#x}");
    values.one("from_tenant", egress("=="));
    values.one("not_from_tenant", egress("!="));
    values.one("from_pod", from_pod("=="));
    values.one("not_from_pod", from_pod("!="));
    let marked = |mask, mark| format!("meta mark & {mask:#x} == {mark:#x}");
    values.one("denied", marked(MARK_DENIED_MASK, MARK_DENIED));
    values.one(
        "denied_tenant",
        marked(MARK_MASK & !REJECTED, MARK_EGRESS | DENIED),
    );
    values.one("forbidden", marked(MARK_MASK & !REJECTED, MARK_FORBIDDEN));
    values.one("rejected", marked(REJECTED, REJECTED));
    values.mark("other_bits", !MARK_MASK);
    values.mark("not_denied", !(DENIED | REJECTED));
    values.mark("not_rejected", MARK_MASK & !REJECTED);
    values.one(
        "answer_to_pod",
        format_args!("ct mark & {MARK_FROM_POD_MASK:#x} == {MARK_FROM_POD:#x}"),
    );
}

#[cfg(test)]
mod tests {
    use thuban_api::identifiers::{Vni, mapped};
    use thuban_proto::transit as proto;
    use thuban_rows::Exposed;

    use super::*;

    fn own(dns: Option<ClusterDns>) -> OwnAddresses {
        OwnAddresses {
            dns,
            underlay: Ipv4Addr::new(172, 31, 0, 5),
            pod_ports: Some((10_000, 32_767)),
        }
    }

    fn service(address: &str, backends: &[(&str, u32)]) -> NodeService {
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
        NodeService::try_from(proto::ServiceRow {
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
        )
        .text;
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
        )
        .text;
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
    fn exposed_ports_lead_to_service_through_nodes_endpoint() {
        let exposed = Exposed::try_from(proto::ExposedRow {
            vni: 1,
            address: mapped(service("10.96.0.7", &[]).address).to_vec(),
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
            addresses: vec![mapped(service("192.0.2.1", &[]).address).to_vec()],
            service: "red/web".to_owned(),
            ..Default::default()
        })
        .unwrap();
        let host = Host {
            addresses: vec!["10.42.0.9".parse().unwrap()],
            service_ranges: &["10.96.0.0/12".parse().unwrap(), "fd00:96::/108".parse().unwrap()],
            exposed: vec![&exposed],
            vni: Vni::new(1),
            fronts: ["203.0.113.9".parse().unwrap()].into(),
            ..Host::default()
        };
        let made = ruleset(
            std::iter::empty(),
            &host,
            own(Some("10.96.0.10,fd00:96::a".parse().unwrap())),
        );
        assert_eq!(
            made.outside,
            [("192.0.2.1".parse().unwrap(), "red/web".to_owned())].into()
        );
        let text = made.text;
        for part in [
            "elements = { 203.0.113.9 }",
            "meta mark & 0x1ffd != 0x54 ip daddr @fronts counter drop",
            "17 . 30053 : goto port-0 }",
            "192.0.2.1 . 6 . 80 : goto port-1, 192.0.2.1 . 17 . 53 : goto port-0",
            "meta l4proto 6 dnat ip to numgen random mod 1 map { 0 : 10.96.0.7 . 80 }",
            "meta mark & 0x1ffd == 0x54 ip daddr != @addresses ip daddr 10.96.0.0/12 meta mark set meta mark & \
             0xffffe000 | 0x53",
            "meta mark & 0x1fff != 0x53 ct direction original ct status dnat ip daddr != @addresses ip daddr \
             10.96.0.0/12 meta mark set 0x53",
            "oifname \"thuban0\" ip saddr != 10.42.0.9 masquerade",
            "ip daddr 10.96.0.10 udp dport 53 dnat ip to 169.254.64.1:6085",
            "ip6 daddr fd00:96::a tcp dport 53 dnat ip6 to [fe80::5468:7562:6101]:6085",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            !text.contains("fd00:96::/108 meta mark set"),
            "without an address of that family: {text}"
        );
    }

    #[test]
    fn every_placeholder_is_filled_in() {
        let service = service("10.96.0.1", &[("172.31.0.1", 6443)]);
        let text = ruleset([&service].into_iter(), &Host::default(), own(None)).text;
        assert!(!text.contains("{{") && !text.contains("}}"), "{text}");
    }
}
