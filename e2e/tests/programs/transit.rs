//! Transit: every verdict and every reason to drop.

use anyhow::{Result, ensure};
use thuban_common::{counters::Counter, tables::ConfigEntry};

use crate::{
    fixture::{self, Expect, Fixture},
    frames::{Packet, Tunnel, header, other, udp},
    rows::{HERE, LOCAL_MAC, SECOND, THIRD, UNREACHED, ip},
    world::{Hook, Role, UPLINK_MAC, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];

fn fixture(description: &'static str, frame: Vec<u8>, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Transit, frame, expect)
}

/// Returns a packet from an endpoint of another droplet that no row knows.
fn inner(to: std::net::Ipv4Addr) -> Vec<u8> {
    Packet::udp([2, 0, 0, 0, 0, 9], ip(10, 0, 1, 40), to).bytes()
}

fn dropped(description: &'static str, frame: Vec<u8>, reason: Counter) -> Fixture {
    fixture(description, frame, Expect::Drop(reason))
}

fn tunnel() -> Tunnel {
    Tunnel::new(SECOND, HERE, 100)
}

fn wrapped(to: std::net::Ipv4Addr) -> Vec<u8> {
    tunnel().around(ETHERNET, &inner(to))
}

#[test]
fn frames_are_delivered_forwarded_bounced_and_divided() -> Result<()> {
    let delivered = |length| Expect::Delivered {
        mac: LOCAL_MAC,
        length,
        vni: 100,
    };
    let local = ip(10, 0, 1, 12);
    let with_options = |bytes: &[u8]| tunnel().with_options(bytes).around(ETHERNET, &inner(local));
    let divided = |to| {
        let packet = Packet::udp([2; 6], ip(10, 7, 0, 40), to);
        Tunnel::new(SECOND, HERE, 102).around(ETHERNET, &packet.bytes())
    };
    let bounced = |to| wrapped(to);
    let mut last_hop = tunnel();
    last_hop.ttl = 2;
    fixture::run(
        &mut World::new()?,
        &[
            fixture("local endpoint", wrapped(local), delivered(50)),
            fixture("with an option", with_options(&[1, 2, 3, 0]), delivered(54)),
            fixture(
                "with all options there can be",
                with_options(&[0; 252]),
                delivered(302),
            ),
            fixture(
                "forward row",
                wrapped(ip(10, 0, 1, 70)),
                Expect::Hop {
                    to: THIRD,
                    counter: Counter::Forwarded,
                },
            ),
            fixture(
                "bouncer",
                Tunnel::new(THIRD, HERE, 100).around(ETHERNET, &inner(ip(10, 0, 3, 30))),
                Expect::Hop {
                    to: SECOND,
                    counter: Counter::Bounced,
                },
            ),
            fixture(
                "bouncer, to the third",
                bounced(ip(10, 0, 3, 33)),
                Expect::Hop {
                    to: THIRD,
                    counter: Counter::Bounced,
                },
            ),
            fixture(
                "bouncer with options",
                tunnel()
                    .with_options(&[1, 2, 3, 0])
                    .around(ETHERNET, &inner(ip(10, 0, 3, 33))),
                Expect::Hop {
                    to: THIRD,
                    counter: Counter::Bounced,
                },
            ),
            fixture(
                "one hop left",
                last_hop.around(ETHERNET, &inner(ip(10, 0, 3, 33))),
                Expect::Hop {
                    to: THIRD,
                    counter: Counter::Bounced,
                },
            ),
            fixture(
                "divider",
                divided(ip(10, 7, 1, 30)),
                Expect::Hop {
                    to: THIRD,
                    counter: Counter::Divided,
                },
            ),
            fixture(
                "divider and bouncer",
                Tunnel::new(THIRD, HERE, 102).around(
                    ETHERNET,
                    &Packet::udp([2; 6], ip(10, 7, 0, 40), ip(10, 7, 2, 30)).bytes(),
                ),
                Expect::Hop {
                    to: SECOND,
                    counter: Counter::Bounced,
                },
            ),
            fixture(
                "next hop without a neighbour entry",
                wrapped(ip(10, 0, 1, 72)),
                Expect::HopAtTc {
                    to: UNREACHED,
                    counter: Counter::Forwarded,
                },
            ),
        ],
    )
}

#[test]
fn foreign_traffic_passes_unchanged() -> Result<()> {
    let passed = |description, frame| fixture(description, frame, Expect::Pass(None));
    let plain = |from, to, protocol, payload: &[u8]| {
        let mut frame = [&ETHERNET[..], &[8, 0]].concat();
        frame.extend(header(0, payload.len(), 0, 64, protocol, from, to));
        frame.extend(payload);
        frame
    };
    let fragment = |port| {
        let mut frame = plain(SECOND, HERE, 17, &udp(40_000, port, b"first part"));
        frame[20] = 0x20;
        frame
    };
    let mut later = fragment(6081);
    later[21] = 4;
    let mut geneve_elsewhere = fragment(6081);
    geneve_elsewhere[30..34].copy_from_slice(&THIRD.octets());
    let mut of_tcp = plain(SECOND, HERE, 6, &udp(40_000, 6081, &[0; 12]));
    of_tcp[20] = 0x20;
    let elsewhere = Tunnel::new(SECOND, THIRD, 100).around(ETHERNET, &inner(ip(10, 0, 1, 12)));
    fixture::run(
        &mut World::new()?,
        &[
            passed("ARP", other([2; 6], 0x0806, &[0; 28])),
            passed("IPv6", other([2; 6], 0x86dd, &[0; 60])),
            passed("a tiny frame", [&ETHERNET[..], &[8, 0, 0x45]].concat()).at_xdp_only(),
            passed("TCP", plain(SECOND, HERE, 6, &[0; 20])),
            passed(
                "another UDP port",
                plain(SECOND, HERE, 17, &udp(6081, 53, b"query")),
            ),
            passed("Geneve for another host", elsewhere),
            passed("a fragment for another port", fragment(53)),
            passed("a later fragment, whose port nobody knows", later),
            passed("a fragment of Geneve for another host", geneve_elsewhere),
            passed("a fragment of TCP", of_tcp),
            passed("a VLAN tag", other([2; 6], 0x8100, &[0; 60])),
        ],
    )
}

#[test]
fn wrong_outer_headers_are_dropped() -> Result<()> {
    let local = ip(10, 0, 1, 12);
    let with = |change: &dyn Fn(&mut Tunnel)| {
        let mut tunnel = tunnel();
        change(&mut tunnel);
        tunnel.around(ETHERNET, &inner(local))
    };
    let mut fragment = wrapped(local);
    fragment[20] = 0x20;
    let mut strangers = Tunnel::new(ip(192, 0, 2, 99), HERE, 100).around(ETHERNET, &inner(local));
    strangers[20] = 0x20;
    let mut ip_options = wrapped(local);
    ip_options[14] = 0x47;
    ip_options.splice(34..34, [0x94, 4, 0, 0, 1, 1, 1, 1]);
    fixture::run(
        &mut World::new()?,
        &[
            dropped("a first fragment", fragment, Counter::BadHeader),
            dropped("a stranger's first fragment", strangers, Counter::BadHeader),
            dropped("behind IP options", ip_options, Counter::BadHeader),
            dropped(
                "unknown droplet",
                with(&|tunnel| tunnel.from = ip(192, 0, 2, 99)),
                Counter::UnknownDroplet,
            ),
            dropped(
                "this droplet's own address",
                with(&|tunnel| tunnel.from = HERE),
                Counter::UnknownDroplet,
            ),
            dropped(
                "unknown VNI",
                with(&|tunnel| tunnel.vni = 999),
                Counter::UnknownVni,
            ),
            dropped(
                "version 1",
                with(&|tunnel| tunnel.first = [0x40, 0]),
                Counter::BadHeader,
            ),
            dropped(
                "control packet",
                with(&|tunnel| tunnel.first = [0, 0x80]),
                Counter::BadHeader,
            ),
            dropped(
                "no Ethernet inside",
                with(&|tunnel| tunnel.protocol = 0x0800),
                Counter::BadHeader,
            ),
            dropped(
                "critical flag",
                with(&|tunnel| tunnel.first = [0, 0x40]),
                Counter::CriticalOption,
            ),
            dropped(
                "critical option",
                tunnel()
                    .with_options(&[1, 2, 0x83, 0])
                    .around(ETHERNET, &inner(local)),
                Counter::CriticalOption,
            ),
            dropped(
                "option beyond the options",
                tunnel()
                    .with_options(&[1, 2, 3, 5])
                    .around(ETHERNET, &inner(local)),
                Counter::BadHeader,
            ),
        ],
    )
}

#[test]
fn broken_and_truncated_inner_frames_are_dropped() -> Result<()> {
    let local = ip(10, 0, 1, 12);
    let mut bad_inner = inner(local);
    bad_inner[14] = 0x54;
    let arp = other([2; 6], 0x0806, &[0; 60]);
    fixture::run(
        &mut World::new()?,
        &[
            dropped("ARP inside", tunnel().around(ETHERNET, &arp), Counter::NotIpv4),
            dropped(
                "broken inner header",
                tunnel().around(ETHERNET, &bad_inner),
                Counter::BadHeader,
            ),
            dropped(
                "ends in Geneve",
                wrapped(local)[..46].to_vec(),
                Counter::Truncated,
            ),
            dropped(
                "ends in the inner Ethernet",
                wrapped(local)[..60].to_vec(),
                Counter::Truncated,
            ),
            dropped(
                "ends in the inner IPv4",
                wrapped(local)[..80].to_vec(),
                Counter::Truncated,
            ),
            dropped(
                "ends before the ports",
                wrapped(local)[..86].to_vec(),
                Counter::Truncated,
            ),
        ],
    )
}

#[test]
fn frames_without_a_next_hop_are_dropped() -> Result<()> {
    let mut used_up = tunnel();
    used_up.ttl = 1;
    fixture::run(
        &mut World::new()?,
        &[
            dropped(
                "TTL used up",
                used_up.around(ETHERNET, &inner(ip(10, 0, 3, 33))),
                Counter::TtlExpired,
            ),
            dropped("no role here", wrapped(ip(10, 0, 2, 90)), Counter::NoEndpoint),
            dropped("outside the VPC", wrapped(ip(8, 8, 8, 8)), Counter::NoEndpoint),
            dropped(
                "unknown to the bouncer",
                wrapped(ip(10, 0, 3, 99)),
                Counter::NoEndpoint,
            ),
            dropped(
                "the bouncer's row says here",
                wrapped(ip(10, 0, 3, 31)),
                Counter::NoEndpoint,
            ),
            dropped(
                "the forward row says here",
                wrapped(ip(10, 0, 1, 71)),
                Counter::NoEndpoint,
            ),
            dropped(
                "back to the sender",
                wrapped(ip(10, 0, 3, 30)),
                Counter::WouldReturn,
            ),
            dropped(
                "a network without bouncers",
                Tunnel::new(SECOND, HERE, 102).around(
                    ETHERNET,
                    &Packet::udp([2; 6], ip(10, 7, 0, 40), ip(10, 7, 3, 1)).bytes(),
                ),
                Counter::NoBouncer,
            ),
        ],
    )
}

#[test]
fn options_in_an_aggregated_frame_are_refused() -> Result<()> {
    // No aggregation understood these options: those of the first segment would count for all.
    let with = |options: &[u8]| {
        let segments = Packet::udp([2; 6], ip(10, 0, 1, 40), ip(10, 0, 1, 12)).carrying(17, &[0; 1200]);
        tunnel().with_options(options).around(ETHERNET, &segments.bytes())
    };
    let mut world = World::new()?;
    let outcome = world.run_segmented(Role::Transit, Hook::Tc, &with(&[1, 2, 3, 0]), 600)?;
    ensure!(
        outcome.verdict == 2 && outcome.counted.contains_key(Counter::BadHeader.name()),
        "{:?}",
        outcome.counted
    );
    let outcome = world.run_segmented(Role::Transit, Hook::Tc, &with(&[]), 600)?;
    ensure!(
        !outcome.counted.contains_key(Counter::BadHeader.name()),
        "{:?}",
        outcome.counted
    );
    Ok(())
}

#[test]
fn nothing_is_ours_before_the_droplet_is_configured() -> Result<()> {
    let mut world = World::new()?;
    world.programs.configure(ConfigEntry {
        droplet: [0; 4],
        uplink: 0,
        mtu: 0,
        flags: 0,
        seed: 0,
    })?;
    let frame = Packet::udp([2, 0, 0, 0, 0, 100], ip(10, 0, 1, 11), ip(10, 0, 1, 12)).bytes();
    for (hook, pass, drop) in [(Hook::Tc, 0, 2), (Hook::Xdp, 2, 1)] {
        let outcome = world.run(Role::Transit, hook, &wrapped(ip(10, 0, 1, 12)))?;
        ensure!(
            outcome.verdict == pass && outcome.counted.is_empty(),
            "{:?}",
            outcome.counted
        );
        let outcome = world.run(Role::Agent(0), hook, &frame)?;
        ensure!(
            outcome.verdict == drop && outcome.counted.contains_key("no_config"),
            "{:?}",
            outcome.counted
        );
    }
    Ok(())
}

#[test]
fn random_frames_never_reach_an_endpoint_unchecked() -> Result<()> {
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)?
        .as_nanos() as u64
        | 1;
    println!("seed {seed}");
    let mut state = seed;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut world = World::new()?;
    let good = wrapped(ip(10, 0, 1, 12));
    ensure!(good[..6] == UPLINK_MAC);
    for _ in 0..300 {
        // It is a good frame with some bytes of the outer headers changed.
        let mut frame = good.clone();
        for _ in 0..=random() % 3 {
            let place = 12 + random() as usize % 38;
            frame[place] = random() as u8;
        }
        let has_vni = frame[46..49] == good[46..49];
        let is_from_droplet = frame[26..30] == good[26..30] || matches!(frame[26..30], [192, 0, 2, 1..=4]);
        for hook in [Hook::Tc, Hook::Xdp] {
            let outcome = world.run(Role::Transit, hook, &frame)?;
            let is_delivered =
                outcome.counted.contains_key("delivered") || outcome.counted.contains_key("decapsulated_xdp");
            ensure!(
                !is_delivered || has_vni && is_from_droplet,
                "seed {seed}: {frame:02x?}"
            );
        }
    }
    Ok(())
}
