//! IPv6 at the agent: every way and every reason to drop that IPv4 has, and those that only IPv6 has.

use std::net::Ipv6Addr;

use anyhow::Result;
use thuban_common::counters::Counter;

use crate::{
    answers::TRACKED6,
    fixture::{self, Expect, Fixture},
    frames::{Packet6, mapped, tcp, udp},
    rows::{BOUNCED, DIVIDED, Endpoint, GUEST, LOCAL_MAC, SECOND, SPREAD, TENANT, THIRD, UNREACHED, ip6},
    world::{Role, World},
};

fn packet(endpoint: Endpoint, to: Ipv6Addr) -> Packet6 {
    Packet6::udp(endpoint.mac(), endpoint.v6, to)
}

fn fixture(description: &'static str, endpoint: Endpoint, packet: &Packet6, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Agent(endpoint.index), packet.bytes(), expect)
}

fn dropped(description: &'static str, packet: &Packet6, reason: Counter) -> Fixture {
    fixture(description, TENANT, packet, Expect::Drop(reason))
}

fn sent(to: std::net::Ipv4Addr, vni: u32, counter: Counter) -> Expect {
    Expect::Encapsulated {
        to,
        vni,
        traffic_class: 0,
        counter,
    }
}

#[test]
fn packets_find_their_way() -> Result<()> {
    let direct = packet(TENANT, ip6(0, 1, 0x50));
    let to_second = || sent(SECOND, 100, Counter::SentDirect);
    let tenant = |description, packet: &Packet6, expect| fixture(description, TENANT, packet, expect);
    let mut fixtures = vec![
        tenant(
            "same droplet",
            &packet(TENANT, ip6(0, 1, 0x12)),
            Expect::Local { mac: LOCAL_MAC },
        ),
        tenant(
            "same droplet, a veth that takes nothing from XDP",
            &packet(TENANT, ip6(0, 1, 0x15)),
            Expect::LocalAtTc { mac: LOCAL_MAC },
        ),
        tenant("direct row", &direct, to_second()),
        tenant("TCP", &direct.clone().carrying(6, &tcp(2)), to_second()),
        tenant("a ping", &direct.clone().icmp(128, &[0; 20]), to_second()),
        tenant(
            "an unknown protocol",
            &direct.clone().carrying(253, &[1; 9]),
            to_second(),
        ),
        tenant("nothing inside", &direct.clone().carrying(59, &[]), to_second()),
        tenant(
            "unknown in the own network: bouncer",
            &packet(TENANT, ip6(0, 1, 0x90)),
            sent(THIRD, 100, Counter::SentToBouncer),
        ),
        tenant(
            "another network: divider",
            &packet(TENANT, ip6(0, 2, 0x90)),
            sent(SECOND, 100, Counter::SentToDivider),
        ),
        tenant(
            "no network that is known here: divider",
            &packet(TENANT, ip6(0, 0x99, 0x90)),
            sent(SECOND, 100, Counter::SentToDivider),
        ),
        fixture(
            "bouncer on this droplet",
            BOUNCED,
            &packet(BOUNCED, ip6(0, 3, 0x30)),
            sent(SECOND, 100, Counter::Bounced),
        ),
        fixture(
            "divider on this droplet",
            DIVIDED,
            &packet(DIVIDED, ip6(7, 1, 0x30)),
            sent(THIRD, 102, Counter::Divided),
        ),
        fixture(
            "divider and bouncer on this droplet",
            DIVIDED,
            &packet(DIVIDED, ip6(7, 2, 0x30)),
            sent(SECOND, 102, Counter::Bounced),
        ),
        fixture(
            "the same address in another VPC",
            SPREAD,
            &packet(SPREAD, ip6(0, 1, 0x50)),
            sent(THIRD, 103, Counter::SentDirect),
        ),
        tenant(
            "next hop without a neighbour entry",
            &packet(TENANT, ip6(0, 1, 0x60)),
            Expect::EncapsulatedAtTc {
                to: UNREACHED,
                vni: 100,
                counter: Counter::SentDirect,
            },
        ),
    ];
    for (description, kind) in [
        ("hop-by-hop", 0),
        ("routing header", 43),
        ("fragment", 44),
        ("authentication header", 51),
        ("destination options", 60),
    ] {
        fixtures.push(tenant(description, &direct.extended(kind), to_second()));
    }
    fixture::run(&mut World::new()?, &fixtures)
}

#[test]
fn forged_and_broken_packets_are_dropped() -> Result<()> {
    let direct = ip6(0, 1, 0x50);
    let good = packet(TENANT, direct);
    let from = |source| Packet6::udp(TENANT.mac(), source, direct);
    let cut = |description, length: usize| {
        let frame = good.bytes()[..length].to_vec();
        let expect = Expect::Drop(Counter::Truncated);
        Fixture::new(description, Role::Agent(TENANT.index), frame, expect)
    };
    let mut version = good.bytes();
    version[14] = 0x45;
    let mut fixtures = vec![
        dropped(
            "a neighbour's address",
            &from(ip6(0, 1, 0x12)),
            Counter::SpoofedSource,
        ),
        dropped(
            "the gateway's address",
            &from("fe80::5468:7562:6101".parse()?),
            Counter::SpoofedSource,
        ),
        dropped(
            "nobody's address",
            &from(Ipv6Addr::UNSPECIFIED),
            Counter::SpoofedSource,
        ),
        dropped(
            "its IPv4 address, compatible",
            &from("::10.0.1.11".parse()?),
            Counter::SpoofedSource,
        ),
        dropped("its IPv4 address, mapped", &from(mapped(11)), Counter::BadHeader),
        Fixture::new(
            "version 4",
            Role::Agent(TENANT.index),
            version,
            Expect::Drop(Counter::BadHeader),
        ),
        cut("ends in the IPv6 header", 14 + 39).at_xdp_only(),
        cut("ends before the ports", 14 + 40 + 3),
    ];
    for kind in [0, 43, 44, 60] {
        fixtures.push(dropped(
            "forged behind an extension header",
            &from(ip6(0, 1, 0x12)).extended(kind),
            Counter::SpoofedSource,
        ));
    }
    fixture::run(&mut World::new()?, &fixtures)
}

#[test]
fn packets_without_a_way_to_their_destination_are_dropped() -> Result<()> {
    let to = |text: &str| anyhow::Ok(packet(TENANT, text.parse()?));
    fixture::run(
        &mut World::new()?,
        &[
            dropped(
                "mapped, a local endpoint",
                &to("::ffff:10.0.1.12")?,
                Counter::BadHeader,
            ),
            dropped(
                "mapped, a direct row",
                &to("::ffff:10.0.1.50")?,
                Counter::BadHeader,
            ),
            dropped("another link's", &to("fe80::1")?, Counter::NotUnicast),
            dropped("multicast", &to("ff02::fb")?, Counter::NotUnicast),
            dropped("loopback", &to("::1")?, Counter::NotUnicast),
            dropped("unspecified", &to("::")?, Counter::NotUnicast),
            dropped("compatible", &to("::10.0.1.50")?, Counter::NotUnicast),
            dropped("outside the VPC", &to("2001:db8::1")?, Counter::OutsideVpc),
            dropped(
                "another VPC's range",
                &packet(TENANT, ip6(7, 0, 0x11)),
                Counter::OutsideVpc,
            ),
            dropped(
                "direct row to this droplet",
                &packet(TENANT, ip6(0, 1, 0x51)),
                Counter::NoEndpoint,
            ),
            fixture(
                "no such endpoint behind the bouncer here",
                BOUNCED,
                &packet(BOUNCED, ip6(0, 3, 0x99)),
                Expect::Drop(Counter::NoEndpoint),
            ),
            fixture(
                "the bouncer's row says here",
                BOUNCED,
                &packet(BOUNCED, ip6(0, 3, 0x31)),
                Expect::Drop(Counter::NoEndpoint),
            ),
            fixture(
                "network without bouncers",
                GUEST,
                &packet(GUEST, ip6(5, 0, 0x99)),
                Expect::Drop(Counter::NoBouncer),
            ),
            fixture(
                "VPC without dividers",
                GUEST,
                &packet(GUEST, ip6(5, 1, 0x99)),
                Expect::Drop(Counter::NoDivider),
            ),
        ],
    )
}

#[test]
fn only_answers_and_allowed_packets_reach_the_host() -> Result<()> {
    let host: Ipv6Addr = "fe80::5468:7562:6101".parse()?;
    let tenant = |description, change: &dyn Fn(Packet6) -> Packet6, is_passed| {
        let expect = if is_passed {
            Expect::Pass(Some(Counter::ToHost))
        } else {
            Expect::Drop(Counter::HostForbidden)
        };
        fixture(description, TENANT, &change(packet(TENANT, host)), expect)
    };
    let guest = |description, packet: Packet6| {
        fixture(description, GUEST, &packet, Expect::Pass(Some(Counter::ToHost)))
    };
    fixture::run(
        &mut World::new()?,
        &[
            tenant("TCP answer", &|packet| packet.carrying(6, &tcp(0x12)), true),
            tenant("TCP data", &|packet| packet.carrying(6, &tcp(0x18)), true),
            tenant("TCP reset", &|packet| packet.carrying(6, &tcp(0x04)), true),
            tenant("TCP opening", &|packet| packet.carrying(6, &tcp(0x02)), false),
            tenant(
                "UDP",
                &|packet| packet.carrying(17, &udp(53, 40000, b"answer")),
                false,
            ),
            tenant("ping answer", &|packet| packet.icmp(129, &[0; 20]), true),
            tenant("unreachable", &|packet| packet.icmp(1, &[0; 60]), true),
            tenant("ping", &|packet| packet.icmp(128, &[0; 20]), false),
            tenant("node information", &|packet| packet.icmp(139, &[0; 20]), false),
            tenant("a fragment", &|packet| packet.extended(44), false),
            tenant("an extension header", &|packet| packet.extended(60), false),
            guest(
                "host access: opening",
                packet(GUEST, host).carrying(6, &tcp(0x02)),
            ),
            guest("host access: UDP", packet(GUEST, host)),
            guest("host access: outside", packet(GUEST, "2001:db8::1".parse()?)),
            // Droplets take Geneve only by IPv4.
            guest(
                "host access: Geneve",
                packet(GUEST, "2001:db8::1".parse()?).carrying(17, &udp(1, 6081, &[0; 20])),
            ),
        ],
    )
}

#[test]
fn conntrack_judges_answers_by_protocols_without_state() -> Result<()> {
    let to_host = packet(TENANT, TRACKED6);
    let quoting = |destination: Ipv6Addr| {
        let mut quote = [0; 60];
        quote[28..44].copy_from_slice(&destination.octets());
        quote
    };
    let tenant = |description, packet: &Packet6, is_passed| {
        let expect = if is_passed {
            Expect::Pass(Some(Counter::ToHost))
        } else {
            Expect::Drop(Counter::HostForbidden)
        };
        fixture(description, TENANT, packet, expect)
    };
    let fixtures = [
        tenant("UDP", &to_host, true),
        tenant(
            "SCTP",
            &to_host.clone().carrying(132, &udp(53, 40000, b"answer")),
            true,
        ),
        tenant("a fragment", &to_host.extended(44), true),
        tenant("an extension header", &to_host.extended(60), false),
        tenant("unreachable", &to_host.clone().icmp(1, &quoting(TENANT.v6)), true),
        tenant(
            "of another endpoint",
            &to_host.clone().icmp(1, &quoting(TRACKED6)),
            false,
        ),
        tenant("ping", &to_host.clone().icmp(128, &[0; 20]), false),
        tenant("TCP answer", &to_host.clone().carrying(6, &tcp(0x12)), false),
        tenant("TCP opening", &to_host.carrying(6, &tcp(0x02)), false),
    ];
    fixture::run(&mut World::new()?, &fixtures)
}
