//! Packets that don't fit the path: the errors that the pod gets, and the path MTUs that routers on the underlay
//! report.

use std::net::Ipv4Addr;

use anyhow::{Result, ensure};
use thuban_common::{
    counters::Counter,
    tables::{CONFIG_TRANSIT_AT_XDP, PATH_MTU_LIFE, PathMtuEntry},
};
use thuban_testkit::packets::checksum;

use crate::{
    answers::{too_big, too_big6},
    fixture::{self, Expect, Fixture},
    frames::{Packet, Packet6, Tunnel, header, tcp, udp},
    rows::{Endpoint, HERE, MTU, SECOND, TENANT, THIRD, ip, ip6},
    world::{Hook, Role, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];

fn fixture(description: &'static str, frame: Vec<u8>, expect: Expect) -> Fixture {
    Fixture::new(description, Role::Agent(TENANT.index), frame, expect)
}

fn packet(endpoint: Endpoint, to: Ipv4Addr) -> Packet {
    Packet::udp(endpoint.mac(), endpoint.address, to)
}

/// Returns a datagram of TENANT to an endpoint of the second droplet, with `length` bytes of IP.
fn sized(length: usize) -> Packet {
    packet(TENANT, ip(10, 0, 1, 50)).carrying(17, &udp(1, 2, &vec![7; length - 28]))
}

fn sized6(length: usize) -> Packet6 {
    Packet6::udp(TENANT.mac(), TENANT.v6, ip6(0, 1, 0x50)).carrying(17, &udp(1, 2, &vec![7; length - 48]))
}

fn answered(bytes: Vec<u8>) -> Expect {
    Expect::Reply {
        bytes,
        counter: Counter::TooBigAnswered,
    }
}

fn sent(to: Ipv4Addr, counter: Counter) -> Expect {
    Expect::Encapsulated {
        to,
        vni: 100,
        traffic_class: 0,
        counter,
    }
}

#[test]
fn the_largest_packet_of_the_path_is_sent() -> Result<()> {
    fixture::run(
        &mut World::new()?,
        &[
            fixture("IPv4", sized(1450).bytes(), sent(SECOND, Counter::SentDirect)),
            fixture("IPv6", sized6(1450).bytes(), sent(SECOND, Counter::SentDirect)),
        ],
    )
}

#[test]
fn larger_packets_are_answered_with_the_paths_mtu() -> Result<()> {
    let with = |change: &dyn Fn(&mut Packet)| {
        let mut packet = sized(1451);
        change(&mut packet);
        packet.bytes()
    };
    let may_be_fragmented = with(&|packet| packet.fragment = 0);
    let first_fragment = with(&|packet| packet.fragment = 0x2000);
    let to_bouncer = with(&|packet| packet.to = ip(10, 0, 1, 90));
    let ping = with(&|packet| {
        packet.protocol = 1;
        packet.payload[0] = 8;
    });
    let v6 = sized6(1451);
    let fragment6 = v6
        .clone()
        .carrying(44, &[&[17, 0, 0, 9, 0, 0, 0, 1][..], &[3; 1403]].concat());
    let ping6 = v6.clone().icmp(128, &[5; 1407]);
    let mut fixtures = Vec::new();
    for (description, frame) in [
        ("don't fragment", sized(1451).bytes()),
        ("may be fragmented", may_be_fragmented),
        ("a first fragment", first_fragment),
        ("by a bouncer", to_bouncer),
        ("a ping", ping),
        ("far too large", sized(3000).bytes()),
    ] {
        let answer = too_big(TENANT, &frame, 1450);
        fixtures.push(fixture(description, frame, answered(answer)));
    }
    for (description, frame) in [
        ("IPv6", v6.bytes()),
        ("IPv6, a fragment", fragment6.bytes()),
        ("IPv6, a ping", ping6.bytes()),
        ("IPv6, far too large", sized6(3000).bytes()),
    ] {
        let answer = too_big6(TENANT, &frame, 1450);
        fixtures.push(fixture(description, frame, answered(answer)));
    }
    fixture::run(&mut World::new()?, &fixtures)
}

#[test]
fn later_fragments_and_errors_are_answered_by_silence() -> Result<()> {
    let with = |change: &dyn Fn(&mut Packet)| {
        let mut packet = sized(1451);
        change(&mut packet);
        packet.bytes()
    };
    let error = |kind: u8| {
        with(&|packet| {
            packet.protocol = 1;
            packet.payload[0] = kind;
        })
    };
    let error6 = sized6(1451).icmp(1, &[5; 1407]);
    let dropped = |description, frame| fixture(description, frame, Expect::DropAtTc(Counter::TooBig));
    fixture::run(
        &mut World::new()?,
        &[
            dropped("a later fragment", with(&|packet| packet.fragment = 0x2010)),
            dropped("the last fragment", with(&|packet| packet.fragment = 0x0010)),
            dropped("unreachable", error(3)),
            dropped("time exceeded", error(11)),
            dropped("IPv6 unreachable", error6.bytes()),
        ],
    )
}

#[test]
fn a_gso_frame_is_measured_by_its_segments() -> Result<()> {
    let segments = [tcp(0x10), vec![0; 3000]].concat();
    let frame = packet(TENANT, ip(10, 0, 1, 50)).carrying(6, &segments).bytes();
    let frame6 = Packet6::udp(TENANT.mac(), TENANT.v6, ip6(0, 1, 0x50)).carrying(6, &segments);
    let datagrams = packet(TENANT, ip(10, 0, 1, 50)).carrying(17, &udp(1, 2, &[0; 3000]));
    let mut world = World::new()?;
    for (description, frame, largest) in [
        ("TCP", frame, 1410),
        ("TCP, IPv6", frame6.bytes(), 1390),
        ("UDP", datagrams.bytes(), 1422),
    ] {
        // The kernel refuses to grow a GSO frame in test runs, because the frame has no type.
        for (segment, counter) in [
            (largest, Counter::AdjustRoomFailed),
            (largest + 1, Counter::TooBigAnswered),
        ] {
            let outcome = world.run_segmented(Role::Agent(TENANT.index), Hook::Tc, &frame, segment)?;
            ensure!(
                outcome.counted.contains_key(counter.name()),
                "{description} of {segment}: {:?}",
                outcome.counted
            );
        }
    }
    let frame = sized(3000).bytes();
    let outcome = world.run_segmented(Role::Agent(TENANT.index), Hook::Tc, &frame, 1423)?;
    ensure!(
        outcome.verdict == 7 && outcome.frame == too_big(TENANT, &frame, 1450),
        "{:02x?}",
        outcome.frame
    );
    Ok(())
}

/// The report of a router on the underlay about a packet of this droplet.
struct Said {
    kind: [u8; 2],
    mtu: u16,
    quoted: Tunnel,
}

impl Said {
    fn of(to: Ipv4Addr, mtu: u16) -> Self {
        Self {
            kind: [3, 4],
            mtu,
            quoted: Tunnel::new(HERE, to, 100),
        }
    }

    /// Returns the frame, with the quoted packet (from its IP header on) changed.
    fn frame(&self, change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut quoted = self.quoted.around([0; 12], &sized(1450).bytes()).split_off(14);
        change(&mut quoted);
        quoted.truncate(60);
        let [kind, code] = self.kind;
        let mut icmp = vec![kind, code, 0, 0, 0, 0];
        icmp.extend(self.mtu.to_be_bytes());
        icmp.extend(quoted);
        let sum = checksum(&icmp);
        icmp[2..4].copy_from_slice(&sum.to_be_bytes());
        let mut frame = [&ETHERNET[..], &[8, 0]].concat();
        frame.extend(header(0, icmp.len(), 0, 64, 1, ip(198, 51, 100, 1), HERE));
        frame.extend(icmp);
        frame
    }
}

/// Runs a router's report through transit; returns whether transit learnt from it. The host gets the report in any
/// case.
fn learns(world: &mut World, frame: &[u8]) -> Result<bool> {
    let at_xdp = world.run(Role::Transit, Hook::Xdp, frame)?;
    ensure!(
        at_xdp.verdict == 2 && at_xdp.counted.is_empty(),
        "XDP leaves it to tc: {:?}",
        at_xdp.counted
    );
    let outcome = world.run(Role::Transit, Hook::Tc, frame)?;
    ensure!(outcome.verdict == 0 && outcome.frame == frame, "passed unchanged");
    let is_learnt = outcome.counted.get(Counter::PathMtuLearnt.name()) == Some(&1);
    ensure!(is_learnt || outcome.counted.is_empty(), "{:?}", outcome.counted);
    Ok(is_learnt)
}

fn path_mtu(world: &World, droplet: Ipv4Addr) -> Option<u32> {
    let entry: PathMtuEntry = world.programs.get("PATH_MTUS", &droplet.octets()).ok()?;
    Some(entry.mtu)
}

#[test]
fn router_reported_path_mtu_is_used_until_it_expires() -> Result<()> {
    let mut world = World::new()?;
    ensure!(learns(&mut world, &Said::of(SECOND, 1400).frame(|_| ()))?);
    ensure!(path_mtu(&world, SECOND) == Some(1400));
    let (fits, large, large6) = (sized(1350).bytes(), sized(1351).bytes(), sized6(1351).bytes());
    let mut elsewhere = sized(1450);
    elsewhere.to = ip(10, 0, 1, 90);
    let (answer, answer6) = (too_big(TENANT, &large, 1350), too_big6(TENANT, &large6, 1350));
    fixture::run(
        &mut world,
        &[
            fixture("the path's size", fits, sent(SECOND, Counter::SentDirect)),
            fixture("one more", large.clone(), answered(answer)),
            fixture("one more, IPv6", large6, answered(answer6)),
            fixture(
                "another path",
                elsewhere.bytes(),
                sent(THIRD, Counter::SentToBouncer),
            ),
        ],
    )?;
    let learnt: PathMtuEntry = world.programs.get("PATH_MTUS", &SECOND.octets())?;
    let expired = PathMtuEntry {
        time: learnt.time.wrapping_sub(PATH_MTU_LIFE),
        ..learnt
    };
    world.programs.insert("PATH_MTUS", SECOND.octets(), expired)?;
    let sent = sent(SECOND, Counter::SentDirect);
    fixture::run(&mut world, &[fixture("ten minutes later", large, sent)])
}

#[test]
fn less_than_any_path_carries_is_not_believed() -> Result<()> {
    let mut world = World::new()?;
    for (said, learnt) in [(1, 626), (626, 626), (627, 627)] {
        ensure!(
            learns(&mut world, &Said::of(SECOND, said).frame(|_| ()))?,
            "{said}"
        );
        ensure!(path_mtu(&world, SECOND) == Some(learnt), "{said}");
    }
    ensure!(learns(&mut world, &Said::of(SECOND, 68).frame(|_| ()))?);
    // IPv6 has no paths below 1280, whatever a router says.
    let (large, large6) = (sized(577).bytes(), sized6(577).bytes());
    let (answer, answer6) = (too_big(TENANT, &large, 576), too_big6(TENANT, &large6, 1280));
    fixture::run(
        &mut world,
        &[
            fixture("576", sized(576).bytes(), sent(SECOND, Counter::SentDirect)),
            fixture("577", large, answered(answer)),
            fixture("577, IPv6", large6, answered(answer6)),
        ],
    )
}

#[test]
fn what_is_not_about_our_tunnels_teaches_nothing() -> Result<()> {
    let mut world = World::new()?;
    let unchanged = |said: Said| said.frame(|_| ());
    let with = |change: &dyn Fn(&mut Said)| {
        let mut said = Said::of(SECOND, 1400);
        change(&mut said);
        said.frame(|_| ())
    };
    let quoting = |change: &dyn Fn(&mut Vec<u8>)| Said::of(SECOND, 1400).frame(|quoted| change(quoted));
    let mut with_options = unchanged(Said::of(SECOND, 1400));
    with_options[14] = 0x46;
    let mut to_another = unchanged(Said::of(SECOND, 1400));
    to_another[30..34].copy_from_slice(&THIRD.octets());
    let mut fragment = unchanged(Said::of(SECOND, 1400));
    fragment[20] = 0x20;
    for (description, frame) in [
        ("no droplet", unchanged(Said::of(ip(192, 0, 2, 99), 1400))),
        ("not from here", with(&|said| said.quoted.from = THIRD)),
        (
            "another port",
            quoting(&|quoted| quoted[22..24].copy_from_slice(&[0, 53])),
        ),
        ("no UDP", quoting(&|quoted| quoted[9] = 6)),
        ("options in the quote", quoting(&|quoted| quoted[0] = 0x46)),
        ("no MTU", unchanged(Said::of(SECOND, 0))),
        ("the uplink's MTU", unchanged(Said::of(SECOND, MTU as u16))),
        ("more than the uplink's", unchanged(Said::of(SECOND, 9000))),
        ("port unreachable", with(&|said| said.kind = [3, 3])),
        ("an echo request", with(&|said| said.kind = [8, 0])),
        ("options", with_options),
        ("to another host", to_another),
        ("a fragment", fragment),
        (
            "ends in the quoted UDP header",
            unchanged(Said::of(SECOND, 1400))[..14 + 20 + 8 + 20 + 6].to_vec(),
        ),
    ] {
        ensure!(!learns(&mut world, &frame)?, "{description}");
    }
    for droplet in [SECOND, THIRD, ip(192, 0, 2, 99)] {
        ensure!(path_mtu(&world, droplet).is_none(), "{droplet}");
    }
    // Transit at tc learns the same.
    world.configure_with(0)?;
    ensure!(learns(&mut world, &unchanged(Said::of(SECOND, 1400)))?);
    world.configure_with(CONFIG_TRANSIT_AT_XDP)
}
