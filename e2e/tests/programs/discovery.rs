//! Neighbour discovery and DHCP at the agent: the questions that it answers, and the messages that no pod may send.

use std::net::Ipv6Addr;

use anyhow::Result;
use thuban_common::counters::Counter;

use crate::{
    answers::advertisement,
    fixture::{self, Expect, Fixture},
    frames::{Packet, Packet6, udp},
    rows::{GUEST, LOCAL_MAC, TENANT, ip, ip6},
    world::{Hook, Role, World},
};

/// Link-local address that TENANT's kernel gives itself.
const LINK_LOCAL: Ipv6Addr = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 0x64);

fn fixture(description: &'static str, packet: &Packet6, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Agent(TENANT.index), packet.bytes(), expect)
}

/// Returns `ff02::1:ff..`, the destination of solicitations of an address.
fn solicited_node(target: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = target.octets();
    Ipv6Addr::new(
        0xff02,
        0,
        0,
        0,
        0,
        1,
        0xff00 | u16::from(a),
        u16::from_be_bytes([b, c]),
    )
}

/// Returns a solicitation of TENANT with its MAC.
fn solicitation(source: Ipv6Addr, target: Ipv6Addr) -> Packet6 {
    let rest = [&[0; 4][..], &target.octets(), &[1, 1], &TENANT.mac()].concat();
    Packet6::udp(TENANT.mac(), source, solicited_node(target)).icmp(135, &rest)
}

fn advertised(source: Ipv6Addr, target: Ipv6Addr) -> Expect {
    Expect::Reply {
        bytes: advertisement(TENANT, source, target),
        counter: Counter::NeighbourReplies,
    }
}

#[test]
fn solicitations_are_answered_with_the_gateways_mac() -> Result<()> {
    let gateway: Ipv6Addr = "fe80::5468:7562:6101".parse()?;
    let neighbour = ip6(0, 1, 0x12);
    let mut unicast = solicitation(TENANT.v6, neighbour);
    unicast.to = neighbour;
    let rest = [&[0; 4][..], &neighbour.octets(), &[1, 1], &TENANT.mac()].concat();
    let unicast = unicast.icmp(135, &rest);
    let answered = |description, source, target| {
        fixture(
            description,
            &solicitation(source, target),
            advertised(source, target),
        )
    };
    fixture::run(
        &mut World::new()?,
        &[
            answered("gateway", TENANT.v6, gateway),
            answered("neighbour", TENANT.v6, neighbour),
            answered("nobody that is known", TENANT.v6, ip6(0, 1, 0x77)),
            answered("from the link-local address", LINK_LOCAL, gateway),
            fixture(
                "to the neighbour alone",
                &unicast,
                advertised(TENANT.v6, neighbour),
            ),
        ],
    )
}

#[test]
fn what_must_find_an_address_free_or_is_wrong_gets_no_answer() -> Result<()> {
    let neighbour = ip6(0, 1, 0x12);
    let good = solicitation(TENANT.v6, neighbour);
    let mut routed = good.clone();
    routed.hop_limit = 254;
    let mut short = good.clone();
    short.payload.truncate(24);
    let mut code = good.clone();
    code.payload[1] = 1;
    let silent = |description, packet: &Packet6| {
        fixture(description, packet, Expect::DropAtTc(Counter::Ipv6Discovery))
    };
    let forged = |description, source| {
        let expect = Expect::DropAtTc(Counter::SpoofedSource);
        fixture(description, &solicitation(source, neighbour), expect)
    };
    fixture::run(
        &mut World::new()?,
        &[
            silent("the pod's own address", &solicitation(TENANT.v6, TENANT.v6)),
            silent("its own, from the link", &solicitation(LINK_LOCAL, TENANT.v6)),
            silent(
                "a probe for a duplicate",
                &solicitation(Ipv6Addr::UNSPECIFIED, TENANT.v6),
            ),
            silent(
                "a probe of a neighbour",
                &solicitation(Ipv6Addr::UNSPECIFIED, neighbour),
            ),
            silent("hop limit 254", &routed),
            silent("without a MAC", &short),
            silent("code 1", &code),
            forged("a neighbour's address", ip6(0, 1, 0x13)),
            forged("another VPC's address", GUEST.v6),
        ],
    )
}

#[test]
fn what_only_routers_say_is_forbidden_and_the_rest_is_noise() -> Result<()> {
    let nodes = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
    let to = |to, kind| Packet6::udp(TENANT.mac(), LINK_LOCAL, to).icmp(kind, &[0; 28]);
    let dropped = |description, packet: &Packet6, reason| fixture(description, packet, Expect::Drop(reason));
    let report = Packet6::udp(
        TENANT.mac(),
        LINK_LOCAL,
        Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 0x16),
    )
    .carrying(0, &[58, 0, 5, 2, 0, 0, 1, 0, 143, 0, 0, 0, 0, 0, 0, 0]);
    let mut fixtures = vec![
        dropped("router advertisement", &to(nodes, 134), Counter::RouterForbidden),
        dropped("redirect", &to(nodes, 137), Counter::RouterForbidden),
        dropped("router solicitation", &to(nodes, 133), Counter::Ipv6Discovery),
        dropped("neighbour advertisement", &to(nodes, 136), Counter::Ipv6Discovery),
        dropped("listener report", &to(nodes, 131), Counter::Ipv6Discovery),
        dropped("listener report, version 2", &report, Counter::Ipv6Discovery),
        dropped("a ping of all nodes", &to(nodes, 128), Counter::Ipv6Discovery),
    ];
    // It is not sent to one pod either, whatever the source.
    for neighbour in [ip6(0, 1, 0x12), ip6(0, 1, 0x50)] {
        let own = |kind| Packet6::udp(TENANT.mac(), TENANT.v6, neighbour).icmp(kind, &[0; 28]);
        fixtures.extend([
            dropped("advertisement to a pod", &own(134), Counter::RouterForbidden),
            dropped("redirect to a pod", &own(137), Counter::RouterForbidden),
            dropped(
                "neighbour advertisement to a pod",
                &own(136),
                Counter::Ipv6Discovery,
            ),
        ]);
    }
    fixture::run(&mut World::new()?, &fixtures)
}

#[test]
fn no_pod_gives_addresses_to_others() -> Result<()> {
    let neighbour = ip(10, 0, 1, 12);
    let dhcp = |source, destination| {
        Packet::udp(TENANT.mac(), TENANT.address, neighbour)
            .carrying(17, &udp(source, destination, &[0; 40]))
            .bytes()
    };
    let dhcp6 = |source, destination| {
        Packet6::udp(TENANT.mac(), TENANT.v6, ip6(0, 1, 0x12))
            .carrying(17, &udp(source, destination, &[0; 40]))
            .bytes()
    };
    let agent = |description, frame, is_delivered| {
        let expect = if is_delivered {
            Expect::Local {
                mac: crate::rows::LOCAL_MAC,
            }
        } else {
            Expect::Drop(Counter::RouterForbidden)
        };
        Fixture::new(description, Role::Agent(TENANT.index), frame, expect)
    };
    let mut tcp = dhcp(67, 68);
    tcp[23] = 6;
    fixture::run(
        &mut World::new()?,
        &[
            agent("DHCP server", dhcp(67, 68), false),
            agent("DHCP client", dhcp(68, 67), true),
            agent("DHCP relay", dhcp(67, 67), true),
            agent("DHCPv6 server", dhcp6(547, 546), false),
            agent("DHCPv6 client", dhcp6(546, 547), true),
            agent("DHCP's ports in IPv6", dhcp6(67, 68), true),
            agent("DHCPv6's ports in IPv4", dhcp(547, 546), true),
            agent("DHCP's ports in TCP", tcp, true),
        ],
    )
}

#[test]
fn discovery_hides_behind_no_extension_header() -> Result<()> {
    let neighbour = ip6(0, 1, 0x12);
    let mut fixtures = Vec::new();
    for kind in [0, 43, 60] {
        let mut hidden = Packet6::udp(TENANT.mac(), TENANT.v6, neighbour).extended(kind);
        fixtures.push(fixture(
            "extension header as packets have it",
            &hidden,
            Expect::Local { mac: LOCAL_MAC },
        ));
        hidden.hop_limit = 255;
        fixtures.push(fixture(
            "extension header with discovery's hop limit",
            &hidden,
            Expect::Drop(Counter::RouterForbidden),
        ));
    }
    for target in [ip(10, 0, 1, 12).to_ipv6_mapped(), "ff02::5".parse()?] {
        fixtures.push(fixture(
            "nobody's address",
            &solicitation(TENANT.v6, target),
            Expect::Drop(Counter::Ipv6Discovery),
        ));
    }
    // XDP leaves solicitations to tc.
    let hooks: &[Hook] = &[Hook::Tc];
    for fixture in fixtures.iter_mut().rev().take(2) {
        fixture.hooks = hooks;
    }
    fixture::run(&mut World::new()?, &fixtures)
}
