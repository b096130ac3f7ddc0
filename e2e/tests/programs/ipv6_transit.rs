//! IPv6 inside Geneve at transit.

use std::net::Ipv6Addr;

use anyhow::Result;
use thuban_common::counters::Counter;

use crate::{
    fixture::{self, Expect, Fixture},
    frames::{Packet6, Tunnel, mapped},
    rows::{HERE, LOCAL_MAC, SECOND, TENANT, THIRD, UNREACHED, ip6},
    world::{Role, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];

fn wrapped(packet: &Packet6) -> Vec<u8> {
    Tunnel::new(SECOND, HERE, 100).around(ETHERNET, &packet.bytes())
}

/// Returns a packet from an endpoint of another droplet that no row knows.
fn remote(to: Ipv6Addr) -> Packet6 {
    Packet6::udp([2, 0, 0, 0, 0, 9], ip6(0, 1, 0x40), to)
}

#[test]
fn frames_are_delivered_forwarded_bounced_and_divided() -> Result<()> {
    let local = remote(ip6(0, 1, 0x12));
    let delivered = |description, packet: &Packet6, options: &[u8]| {
        let frame = Tunnel::new(SECOND, HERE, 100)
            .with_options(options)
            .around(ETHERNET, &packet.bytes());
        let expect = Expect::Delivered {
            mac: LOCAL_MAC,
            length: 50 + options.len(),
            vni: 100,
        };
        Fixture::new(description, Role::Transit, frame, expect)
    };
    let hop = |description, frame, to, counter| {
        Fixture::new(description, Role::Transit, frame, Expect::Hop { to, counter })
    };
    let divided = |to, sender| {
        let packet = Packet6::udp([2; 6], ip6(7, 0, 0x40), to);
        Tunnel::new(sender, HERE, 102).around(ETHERNET, &packet.bytes())
    };
    let mut fixtures = vec![
        delivered("local endpoint", &local, &[]),
        delivered("with an option", &local, &[1, 2, 3, 0]),
        delivered("with all options there can be", &local, &[0; 252]),
        delivered("a ping", &local.clone().icmp(128, &[0; 20]), &[]),
        delivered("nothing inside", &local.clone().carrying(59, &[]), &[]),
        hop(
            "forward row",
            wrapped(&remote(ip6(0, 1, 0x70))),
            THIRD,
            Counter::Forwarded,
        ),
        hop(
            "bouncer",
            wrapped(&remote(ip6(0, 3, 0x33))),
            THIRD,
            Counter::Bounced,
        ),
        hop(
            "divider",
            divided(ip6(7, 1, 0x30), SECOND),
            THIRD,
            Counter::Divided,
        ),
        hop(
            "divider and bouncer",
            divided(ip6(7, 2, 0x30), THIRD),
            SECOND,
            Counter::Bounced,
        ),
        Fixture::new(
            "next hop without a neighbour entry",
            Role::Transit,
            wrapped(&remote(ip6(0, 1, 0x72))),
            Expect::HopAtTc {
                to: UNREACHED,
                counter: Counter::Forwarded,
            },
        ),
    ];
    for kind in [0, 43, 44, 51, 60] {
        fixtures.push(delivered("an extension header", &local.extended(kind), &[]));
    }
    fixture::run(&mut World::new()?, &fixtures)
}

#[test]
fn what_arrives_is_checked() -> Result<()> {
    let local = ip6(0, 1, 0x12);
    let dropped =
        |description, frame, reason| Fixture::new(description, Role::Transit, frame, Expect::Drop(reason));
    let from = |sender, source: Ipv6Addr| {
        let packet = Packet6::udp([2; 6], source, local);
        Tunnel::new(sender, HERE, 100).around(ETHERNET, &packet.bytes())
    };
    let good = wrapped(&remote(local));
    let mut version = good.clone();
    version[64] = 0x45;
    // An address that is an IPv4 endpoint's key must never find its rows.
    let disguised = |host| wrapped(&remote(mapped(host)));
    fixture::run(
        &mut World::new()?,
        &[
            dropped("mapped, a local endpoint", disguised(12), Counter::BadHeader),
            dropped("mapped, a forward row", disguised(70), Counter::BadHeader),
            dropped("mapped source", from(SECOND, mapped(50)), Counter::BadHeader),
            dropped(
                "compatible, a local endpoint",
                wrapped(&remote("::10.0.1.12".parse()?)),
                Counter::NoEndpoint,
            ),
            dropped(
                "direct row, a stranger",
                from(UNREACHED, ip6(0, 1, 0x50)),
                Counter::SourceMismatch,
            ),
            dropped(
                "bouncer's row, a stranger",
                from(UNREACHED, ip6(0, 3, 0x30)),
                Counter::SourceMismatch,
            ),
            dropped(
                "an endpoint of this droplet",
                from(UNREACHED, TENANT.v6),
                Counter::SourceMismatch,
            ),
            dropped(
                "a source outside the VPC",
                from(SECOND, ip6(7, 0, 0x40)),
                Counter::SourceMismatch,
            ),
            dropped(
                "another VPC's range",
                wrapped(&remote(ip6(7, 0, 0x11))),
                Counter::NoEndpoint,
            ),
            dropped(
                "unknown to the bouncer",
                wrapped(&remote(ip6(0, 3, 0x99))),
                Counter::NoEndpoint,
            ),
            dropped(
                "back to the sender",
                wrapped(&remote(ip6(0, 3, 0x30))),
                Counter::WouldReturn,
            ),
            dropped("version 4", version, Counter::BadHeader),
            dropped(
                "ends in the inner IPv6",
                good[..64 + 39].to_vec(),
                Counter::Truncated,
            ),
            dropped(
                "ends before the ports",
                good[..64 + 43].to_vec(),
                Counter::Truncated,
            ),
        ],
    )
}
