//! The agent: every verdict and every reason to drop.

use anyhow::{Result, ensure};
use thuban_common::{counters::Counter, tables::VpcEntry};

use crate::{
    answers::{TRACKED, arp_reply},
    fixture::{self, Expect, Fixture},
    frames::{Packet, arp, other, tcp, udp},
    rows::{BOUNCED, DIVIDED, Endpoint, GUEST, HERE, LOCAL_MAC, SECOND, STRAY, TENANT, THIRD, UNREACHED, ip},
    world::{Hook, Role, World},
};

const HOST: std::net::Ipv4Addr = ip(169, 254, 64, 1);

fn packet(endpoint: Endpoint, to: std::net::Ipv4Addr) -> Packet {
    Packet::udp(endpoint.mac(), endpoint.address, to)
}

fn fixture(description: &'static str, endpoint: Endpoint, frame: Vec<u8>, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Agent(endpoint.index), frame, expect)
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
fn xdp_leaves_endpoints_with_a_limit_to_tc() -> Result<()> {
    fixture::run(
        &mut World::new()?,
        &[fixture(
            "same droplet, an endpoint with a limit of what it receives",
            TENANT,
            packet(TENANT, ip(10, 0, 1, 16)).bytes(),
            Expect::LocalAtTc { mac: LOCAL_MAC },
        )],
    )
}

#[test]
fn packets_find_their_way() -> Result<()> {
    let mut marked = packet(TENANT, ip(10, 0, 1, 50));
    marked.traffic_class = 0xbb;
    let with_options = {
        let mut frame = packet(TENANT, ip(10, 0, 1, 50)).bytes();
        frame[14] = 0x46;
        frame
    };
    fixture::run(
        &mut World::new()?,
        &[
            fixture(
                "same droplet",
                TENANT,
                packet(TENANT, ip(10, 0, 1, 12)).bytes(),
                Expect::Local { mac: LOCAL_MAC },
            ),
            fixture(
                "same droplet, a veth that takes nothing from XDP",
                TENANT,
                packet(TENANT, ip(10, 0, 1, 15)).bytes(),
                Expect::LocalAtTc { mac: LOCAL_MAC },
            ),
            fixture(
                "direct row",
                TENANT,
                packet(TENANT, ip(10, 0, 1, 50)).bytes(),
                sent(SECOND, 100, Counter::SentDirect),
            ),
            fixture(
                "DSCP and ECN go out",
                TENANT,
                marked.bytes(),
                Expect::Encapsulated {
                    to: SECOND,
                    vni: 100,
                    traffic_class: 0xbb,
                    counter: Counter::SentDirect,
                },
            ),
            fixture(
                "IP options",
                TENANT,
                with_options,
                sent(SECOND, 100, Counter::SentDirect),
            ),
            fixture(
                "TCP",
                TENANT,
                packet(TENANT, ip(10, 0, 1, 50)).carrying(6, &tcp(2)).bytes(),
                sent(SECOND, 100, Counter::SentDirect),
            ),
            fixture(
                "unknown in the own network: bouncer",
                TENANT,
                packet(TENANT, ip(10, 0, 1, 90)).bytes(),
                sent(THIRD, 100, Counter::SentToBouncer),
            ),
            fixture(
                "another network: divider",
                TENANT,
                packet(TENANT, ip(10, 0, 2, 90)).bytes(),
                sent(SECOND, 100, Counter::SentToDivider),
            ),
            fixture(
                "no network that is known here: divider",
                TENANT,
                packet(TENANT, ip(10, 0, 200, 1)).bytes(),
                sent(SECOND, 100, Counter::SentToDivider),
            ),
            fixture(
                "bouncer on this droplet",
                BOUNCED,
                packet(BOUNCED, ip(10, 0, 3, 30)).bytes(),
                sent(SECOND, 100, Counter::Bounced),
            ),
            fixture(
                "divider on this droplet",
                DIVIDED,
                packet(DIVIDED, ip(10, 7, 1, 30)).bytes(),
                sent(THIRD, 102, Counter::Divided),
            ),
            fixture(
                "divider and bouncer on this droplet",
                DIVIDED,
                packet(DIVIDED, ip(10, 7, 2, 30)).bytes(),
                sent(SECOND, 102, Counter::Bounced),
            ),
            fixture(
                "next hop without a neighbour entry",
                TENANT,
                packet(TENANT, ip(10, 0, 1, 60)).bytes(),
                Expect::EncapsulatedAtTc {
                    to: UNREACHED,
                    vni: 100,
                    counter: Counter::SentDirect,
                },
            ),
        ],
    )
}

#[test]
fn forged_and_broken_packets_are_dropped() -> Result<()> {
    let to = ip(10, 0, 1, 50);
    let good = packet(TENANT, to);
    let mut spoofed = good.clone();
    spoofed.from = ip(10, 0, 1, 12);
    let mut version = good.bytes();
    version[14] = 0x65;
    let mut short = good.bytes();
    short[16..18].copy_from_slice(&[0, 19]);
    let dropped = |description, frame, reason| fixture(description, TENANT, frame, Expect::Drop(reason));
    fixture::run(
        &mut World::new()?,
        &[
            fixture(
                "no attachment",
                STRAY,
                packet(STRAY, to).bytes(),
                Expect::Drop(Counter::NoAttachment),
            ),
            dropped(
                "another MAC",
                Packet::udp([2; 6], TENANT.address, to).bytes(),
                Counter::SpoofedMac,
            ),
            dropped("a neighbour's address", spoofed.bytes(), Counter::SpoofedSource),
            dropped("version 6 in IPv4", version, Counter::BadHeader),
            dropped("total length below the header", short, Counter::BadHeader),
            dropped(
                "ends in the IPv4 header",
                good.bytes()[..30].to_vec(),
                Counter::Truncated,
            )
            .at_xdp_only(),
            dropped(
                "ends before the ports",
                good.bytes()[..36].to_vec(),
                Counter::Truncated,
            ),
            dropped(
                "multicast",
                packet(TENANT, ip(224, 0, 0, 1)).bytes(),
                Counter::NotUnicast,
            ),
            dropped(
                "broadcast",
                packet(TENANT, ip(255, 255, 255, 255)).bytes(),
                Counter::NotUnicast,
            ),
            dropped(
                "outside the VPC",
                packet(TENANT, ip(8, 8, 8, 8)).bytes(),
                Counter::OutsideVpc,
            ),
            dropped("a droplet", packet(TENANT, SECOND).bytes(), Counter::OutsideVpc),
            dropped(
                "direct row to this droplet",
                packet(TENANT, ip(10, 0, 1, 51)).bytes(),
                Counter::NoEndpoint,
            ),
            dropped("LLDP", other(TENANT.mac(), 0x88cc, &[0; 40]), Counter::NotIpv4),
            dropped(
                "VLAN tag",
                other(TENANT.mac(), 0x8100, &[0; 40]),
                Counter::VlanTagged,
            ),
            fixture(
                "no such endpoint behind the bouncer here",
                BOUNCED,
                packet(BOUNCED, ip(10, 0, 3, 99)).bytes(),
                Expect::Drop(Counter::NoEndpoint),
            ),
            fixture(
                "network without bouncers",
                GUEST,
                packet(GUEST, ip(10, 5, 0, 99)).bytes(),
                Expect::Drop(Counter::NoBouncer),
            ),
            fixture(
                "VPC without dividers",
                GUEST,
                packet(GUEST, ip(10, 5, 1, 99)).bytes(),
                Expect::Drop(Counter::NoDivider),
            ),
            fixture(
                "network without bouncers, divided here",
                DIVIDED,
                packet(DIVIDED, ip(10, 7, 3, 99)).bytes(),
                Expect::Drop(Counter::NoBouncer),
            ),
        ],
    )
}

#[test]
fn arp_is_answered_for_all_but_the_pod_itself() -> Result<()> {
    let (mac, address) = (TENANT.mac(), TENANT.address);
    let ask = |sender, target| arp(mac, 1, mac, sender, target);
    let reply = |target| Expect::Reply {
        bytes: arp_reply(TENANT, target),
        counter: Counter::ArpReplies,
    };
    let mut world = World::new()?;
    for (description, frame, expect) in [
        ("gateway", ask(address, ip(10, 0, 1, 1)), reply(ip(10, 0, 1, 1))),
        (
            "neighbour",
            ask(address, ip(10, 0, 1, 12)),
            reply(ip(10, 0, 1, 12)),
        ),
    ] {
        fixture::run(&mut world, &[fixture(description, TENANT, frame, expect)])?;
    }
    // XDP leaves ARP to tc, which drops.
    for (description, frame, reason) in [
        ("itself", ask(address, address), Counter::ArpIgnored),
        (
            "probe",
            ask(ip(0, 0, 0, 0), ip(10, 0, 1, 40)),
            Counter::ArpIgnored,
        ),
        (
            "reply",
            arp(mac, 2, mac, address, ip(10, 0, 1, 12)),
            Counter::ArpIgnored,
        ),
        (
            "forged address",
            ask(ip(10, 0, 1, 1), ip(10, 0, 1, 12)),
            Counter::SpoofedArp,
        ),
        (
            "forged MAC",
            arp(mac, 1, [2; 6], address, ip(10, 0, 1, 12)),
            Counter::SpoofedArp,
        ),
        (
            "too short",
            ask(address, ip(10, 0, 1, 1))[..40].to_vec(),
            Counter::Truncated,
        ),
    ] {
        let outcome = world.run(Role::Agent(TENANT.index), Hook::Tc, &frame)?;
        ensure!(outcome.verdict == 2, "{description}: verdict {}", outcome.verdict);
        ensure!(
            outcome.counted.get(reason.name()) == Some(&1),
            "{description}: {:?}",
            outcome.counted
        );
        let outcome = world.run(Role::Agent(TENANT.index), Hook::Xdp, &frame)?;
        ensure!(
            outcome.verdict == 2 && outcome.counted.is_empty(),
            "{description} at XDP: {:?}",
            outcome.counted
        );
    }
    Ok(())
}

#[test]
fn only_answers_and_allowed_packets_reach_the_host() -> Result<()> {
    let tenant = |protocol, payload: &[u8]| packet(TENANT, HOST).carrying(protocol, payload).bytes();
    let guest = |to, protocol, payload: &[u8]| packet(GUEST, to).carrying(protocol, payload).bytes();
    let mut fragment = packet(GUEST, ip(8, 8, 8, 8)).carrying(17, &udp(1, 6081, b"hello"));
    fragment.fragment = 0x2000;
    let passed = || Expect::Pass(Some(Counter::ToHost));
    let refused = || Expect::Drop(Counter::HostForbidden);
    let geneve = udp(50000, 6081, &[0; 20]);
    fixture::run(
        &mut World::new()?,
        &[
            fixture("TCP answer", TENANT, tenant(6, &tcp(0x12)), passed()),
            fixture("TCP opening", TENANT, tenant(6, &tcp(0x02)), refused()),
            fixture(
                "UDP from a port that answers",
                TENANT,
                tenant(17, &udp(53, 40000, &[0; 12])),
                refused(),
            ),
            fixture(
                "UDP question",
                TENANT,
                tenant(17, &udp(40000, 53, &[0; 12])),
                refused(),
            ),
            fixture("ping answer", TENANT, tenant(1, &[0; 40]), passed()),
            fixture("ping", TENANT, tenant(1, &[8; 40]), refused()),
            fixture(
                "host access: opening",
                GUEST,
                guest(HOST, 6, &tcp(0x02)),
                passed(),
            ),
            fixture(
                "host access: UDP",
                GUEST,
                guest(HOST, 17, &udp(40000, 53, &[0; 12])),
                passed(),
            ),
            fixture(
                "host access: outside",
                GUEST,
                guest(ip(8, 8, 8, 8), 17, &udp(1, 53, &[0; 12])),
                passed(),
            ),
            fixture(
                "host access: Geneve",
                GUEST,
                guest(HERE, 17, &geneve),
                Expect::Drop(Counter::GeneveForbidden),
            ),
            fixture(
                "host access: Geneve in a fragment",
                GUEST,
                fragment.bytes(),
                Expect::Drop(Counter::GeneveForbidden),
            ),
            fixture(
                "host access: multicast",
                GUEST,
                guest(ip(224, 0, 0, 251), 17, &udp(1, 5353, b"x")),
                Expect::Drop(Counter::NotUnicast),
            ),
        ],
    )
}

/// Returns an ICMP error about a packet to an address.
fn quoting(destination: std::net::Ipv4Addr) -> Vec<u8> {
    let mut error = vec![3; 40];
    error[24..28].copy_from_slice(&destination.octets());
    error
}

#[test]
fn conntrack_judges_answers_by_protocols_without_state() -> Result<()> {
    let to = |endpoint, protocol, payload: &[u8]| packet(endpoint, TRACKED).carrying(protocol, payload);
    let tenant = |protocol, payload: &[u8]| to(TENANT, protocol, payload).bytes();
    let passed = || Expect::Pass(Some(Counter::ToHost));
    let refused = || Expect::Drop(Counter::HostForbidden);
    let answer = udp(53, 40000, &[0; 12]);
    let part = |fragment| {
        let mut packet = to(TENANT, 17, &answer);
        packet.fragment = fragment;
        packet.bytes()
    };
    let fixtures = [
        fixture("UDP", TENANT, tenant(17, &answer), passed()),
        fixture("UDP, first fragment", TENANT, part(0x2000), passed()),
        fixture("UDP, last fragment", TENANT, part(100), passed()),
        fixture("SCTP", TENANT, tenant(132, &answer), passed()),
        fixture(
            "ICMP error",
            TENANT,
            tenant(1, &quoting(TENANT.address)),
            passed(),
        ),
        fixture(
            "of another endpoint",
            TENANT,
            tenant(1, &quoting(SECOND)),
            refused(),
        ),
        fixture("ICMP error, cut off", TENANT, tenant(1, &[3; 20]), refused()),
        fixture("ping", TENANT, tenant(1, &[8; 40]), refused()),
        fixture("redirect", TENANT, tenant(1, &[5; 40]), refused()),
        fixture("TCP answer", TENANT, tenant(6, &tcp(0x12)), refused()),
        fixture("TCP opening", TENANT, tenant(6, &tcp(0x02)), refused()),
        fixture("another protocol", TENANT, tenant(47, &[0; 40]), refused()),
        fixture(
            "Geneve",
            TENANT,
            tenant(17, &udp(50000, 6081, &[0; 20])),
            Expect::Drop(Counter::GeneveForbidden),
        ),
        fixture(
            "host access: UDP",
            GUEST,
            to(GUEST, 17, &answer).bytes(),
            passed(),
        ),
        fixture(
            "host access: TCP",
            GUEST,
            to(GUEST, 6, &tcp(0x02)).bytes(),
            refused(),
        ),
    ];
    fixture::run(&mut World::new()?, &fixtures)
}

#[test]
fn a_vpc_without_a_row_has_no_dividers() -> Result<()> {
    let mut world = World::new()?;
    world.programs.remove::<u32, VpcEntry>("VPCS", &100)?;
    let frame = packet(TENANT, ip(10, 0, 2, 90)).bytes();
    fixture::run(
        &mut world,
        &[fixture(
            "no VPC",
            TENANT,
            frame,
            Expect::Drop(Counter::UnknownVni),
        )],
    )
}

#[test]
fn fragments_of_a_datagram_go_one_way() -> Result<()> {
    let mut world = World::new()?;
    let mut ports = Vec::new();
    // The first fragment shows ports, the others may show anything.
    for (fragment, payload) in [
        (0x2000, udp(1234, 80, b"first")),
        (0x2001, udp(9, 9, b"more")),
        (0x0002, vec![7; 20]),
    ] {
        let mut packet = packet(TENANT, ip(10, 0, 1, 50)).carrying(17, &payload);
        packet.fragment = fragment;
        let outcome = world.run(Role::Agent(TENANT.index), Hook::Tc, &packet.bytes())?;
        ensure!(outcome.verdict == 7, "{:?}", outcome.counted);
        ports.push(outcome.frame[34..36].to_vec());
    }
    ensure!(ports[1] == ports[0] && ports[2] == ports[0], "{ports:?}");
    Ok(())
}
