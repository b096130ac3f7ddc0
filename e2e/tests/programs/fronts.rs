//! Fronts: a client outside asks for an address of a load balancer at any droplet's NIC, and a backend on another
//! droplet answers it.

mod connections;
mod tunnel;

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    policy::{GRANT_DENIES, Grant, GrantKey, PEER_OUTSIDE, STAMP_FRONT, Stamp, of_vpc},
    services::{ARRIVING, ConnectionEntry, ConnectionKey, FRONTS},
    tables::{SUBNET_CLOSED, SourceEntry, SourceKey, SubnetEntry},
};
use thuban_e2e::{
    programs::{address, key, members},
    services::Served,
};
use thuban_testkit::packets::{checksum, ensure_same};

use crate::{
    fixture::stamp_bytes,
    frames::Tunnel,
    rows::{BOUNCED, DIVIDED, HERE, SECOND, SPREAD, TENANT, ip, ip6},
    service_world::{SCTP, Segment, TCP, UDP, ensure_delivered, ensure_dropped, octets, send},
    world::{Hook, Outcome, Role, UPLINK_MAC, World},
};

pub const FRONT: IpAddr = IpAddr::V4(ip(203, 0, 113, 80));
pub const FRONT6: IpAddr = IpAddr::V6(ip6(0x113, 0, 0x80));
pub const CLIENT: IpAddr = IpAddr::V4(ip(198, 51, 100, 7));
pub const CLIENT6: IpAddr = IpAddr::V6(ip6(0x198, 0, 7));
/// Backends of VPC 100: one on this droplet, and two addresses on others.
pub const HERE_BACKEND: IpAddr = IpAddr::V4(BOUNCED.address);
pub const HERE_BACKEND6: IpAddr = IpAddr::V6(BOUNCED.v6);
pub const FAR_BACKEND: IpAddr = IpAddr::V4(ip(10, 0, 1, 50));
pub const FAR_BACKEND6: IpAddr = IpAddr::V6(ip6(0, 1, 0x50));
/// What fronts of both families send to: a backend of each, and their droplet.
#[derive(Clone, Copy)]
pub struct Backends {
    v4: IpAddr,
    v6: IpAddr,
    droplet: Ipv4Addr,
}

pub const BACKENDS_HERE: Backends = Backends {
    v4: HERE_BACKEND,
    v6: HERE_BACKEND6,
    droplet: HERE,
};
pub const BACKENDS_FAR: Backends = Backends {
    v4: FAR_BACKEND,
    v6: FAR_BACKEND6,
    droplet: SECOND,
};
/// The flags of fronts of mode Dsr. Those of mode Tunnel have `SERVICE_TUNNEL`.
pub const DSR: u32 = 0;
/// SYN, and an ACK of a connection that goes on.
const OPENS: u8 = 0x02;
pub const GOES_ON: u8 = 0x10;
/// Protocol, backend's port, whether UDP sums.
const PROTOCOLS: [(u8, u16, bool); 4] = [
    (TCP, 8080, true),
    (UDP, 8080, true),
    (UDP, 8080, false),
    (SCTP, 443, true),
];

pub fn front(id: u32, address: IpAddr, protocol: u8) -> Served {
    Served::new(FRONTS, id, address, 443, protocol)
}

/// Writes fronts of both families for VPC 100, with one backend each at this port. `flags`: the fronts' mode.
pub fn serve(world: &mut World, protocol: u8, port: u16, backends: Backends, flags: u32) -> Result<()> {
    for (id, address, backend) in [(1, FRONT, backends.v4), (2, FRONT6, backends.v6)] {
        let served = Served {
            flags,
            ..front(id, address, protocol)
        };
        served.by_fronts(&mut world.programs, 100, &[(backend, port, backends.droplet)])?;
    }
    Ok(())
}

pub fn request(protocol: u8) -> Segment {
    Segment::new(protocol, [7; 6], (CLIENT, 40000), (FRONT, 443))
}

pub fn request6(protocol: u8) -> Segment {
    Segment::new(protocol, [7; 6], (CLIENT6, 40000), (FRONT6, 443))
}

/// Returns the frame of a client's packet to this node.
pub fn outside(segment: &Segment) -> Vec<u8> {
    [&UPLINK_MAC, &segment.bytes()[6..]].concat()
}

/// Runs a client's packet at the NIC.
fn ask(world: &mut World, segment: &Segment) -> Result<Outcome> {
    world.run(Role::Transit, Hook::Tc, &outside(segment))
}

/// Returns the frame by which a front sends a packet to this droplet.
fn fronted(from: Ipv4Addr, vni: u32, segment: &Segment) -> Vec<u8> {
    around(from, vni, &segment.bytes())
}

/// Does the same for any frame.
pub fn around(from: Ipv4Addr, vni: u32, frame: &[u8]) -> Vec<u8> {
    let inner = [&stamp(), &frame[12..]].concat();
    Tunnel::new(from, HERE, vni).around([2; 12], &inner)
}

pub fn stamp() -> [u8; 12] {
    stamp_bytes(Stamp {
        class: 0,
        egress_set: 0,
        flags: STAMP_FRONT,
    })
}

/// Runs a packet that a front on another droplet sent here.
pub fn arrive(world: &mut World, from: Ipv4Addr, vni: u32, segment: &Segment) -> Result<Outcome> {
    world.run(Role::Transit, Hook::Tc, &fronted(from, vni, segment))
}

pub fn ensure_passed(outcome: &Outcome, frame: &[u8], hook: Hook) -> Result<()> {
    ensure_same(&outcome.frame, frame)?;
    let pass = if hook == Hook::Tc { 0 } else { 2 };
    ensure!(
        outcome.verdict == pass && outcome.counted.is_empty(),
        "{} {:?}",
        outcome.verdict,
        outcome.counted
    );
    Ok(())
}

/// Asserts that a packet went on as it is, to a droplet for a VPC, with the mark of a front.
fn ensure_fronted(outcome: &Outcome, segment: &Segment, to: Ipv4Addr, vni: u32) -> Result<()> {
    ensure_sent_on(outcome, &segment.bytes(), to, vni)
}

/// Does the same for any frame.
pub fn ensure_sent_on(outcome: &Outcome, sent: &[u8], to: Ipv4Addr, vni: u32) -> Result<()> {
    let frame = &outcome.frame;
    ensure!(
        frame.len() > 50,
        "verdict {} counted {:?}",
        outcome.verdict,
        outcome.counted
    );
    ensure_same(&frame[50..62], &stamp())?;
    ensure_same(&frame[62..], &sent[12..])?;
    ensure!(
        frame[26..30] == HERE.octets() && frame[30..34] == to.octets(),
        "not to {to}"
    );
    ensure!(frame[46..49] == vni.to_be_bytes()[1..], "not for VPC {vni}");
    ensure!(
        outcome.counted.keys().eq([&Counter::Fronted.name()]),
        "{:?}",
        outcome.counted
    );
    Ok(())
}

/// Asserts that an answer left the node as this segment.
pub fn ensure_left(outcome: &Outcome, segment: &Segment) -> Result<()> {
    ensure_same(&outcome.frame[12..], &segment.bytes()[12..])
        .with_context(|| format!("verdict {} counted {:?}", outcome.verdict, outcome.counted))?;
    ensure!(outcome.verdict == 7 && outcome.counted.keys().eq([&Counter::FrontAnswered.name()]));
    Ok(())
}

pub fn arriving(world: &World, segment: &Segment) -> Result<ConnectionEntry> {
    let key = ConnectionKey {
        vni: 100,
        ports: [segment.from.1.to_be(), segment.to.1.to_be()],
        source: address(segment.from.0),
        destination: address(segment.to.0),
        protocol: segment.protocol,
        direction: ARRIVING,
        padding: 0,
    };
    world.programs.get("CONNECTIONS", &key)
}

#[test]
fn a_front_sends_packets_as_they_are_to_the_backends_droplet() -> Result<()> {
    for (protocol, port, has_sum) in PROTOCOLS {
        let mut world = World::new()?;
        serve(&mut world, protocol, port, BACKENDS_FAR, DSR)?;
        for mut asked in [request(protocol), request6(protocol)] {
            asked.has_sum = has_sum;
            for hook in [Hook::Tc, Hook::Xdp] {
                let outcome = world.run(Role::Transit, hook, &outside(&asked))?;
                ensure_fronted(&outcome, &asked, SECOND, 100)
                    .with_context(|| format!("{protocol} {hook:?}"))?;
                ensure!(outcome.verdict == if hook == Hook::Tc { 7 } else { 3 });
            }
        }
    }
    Ok(())
}

/// Runs a check for each protocol and family, with a front whose backend is here: the client's packet, and the same as
/// the backend gets it.
pub fn each_request_of_a_backend_here(
    check: impl Fn(&mut World, &Segment, &Segment) -> Result<()>,
) -> Result<()> {
    for (protocol, port, has_sum) in PROTOCOLS {
        let mut world = World::new()?;
        serve(&mut world, protocol, port, BACKENDS_HERE, DSR)?;
        for (mut asked, backend) in [
            (request(protocol), HERE_BACKEND),
            (request6(protocol), HERE_BACKEND6),
        ] {
            asked.has_sum = has_sum;
            check(&mut world, &asked, &asked.sent_to((backend, port)))
                .with_context(|| format!("{protocol} at {backend}"))?;
        }
    }
    Ok(())
}

#[test]
fn the_backends_droplet_translates_and_the_answer_is_the_fronts() -> Result<()> {
    each_request_of_a_backend_here(|world, asked, there| {
        let at_xdp = world.run(Role::Transit, Hook::Xdp, &fronted(SECOND, 100, asked))?;
        ensure_passed(&at_xdp, &fronted(SECOND, 100, asked), Hook::Xdp)?;
        for _ in 0..2 {
            let outcome = arrive(world, SECOND, 100, asked)?;
            ensure_delivered(&outcome, there, BOUNCED.mac())?;
            ensure!(
                outcome.counted.keys().eq([&Counter::FrontDelivered.name()]),
                "{:?}",
                outcome.counted
            );
        }
        let answer = there.answer(BOUNCED.mac());
        let at_xdp = world.run(Role::Agent(BOUNCED.index), Hook::Xdp, &answer.bytes())?;
        ensure_passed(&at_xdp, &answer.bytes(), Hook::Xdp)?;
        let outcome = send(world, BOUNCED.index, &answer)?;
        ensure_left(&outcome, &answer.sent_from((asked.to.0, 443)))
    })
}

#[test]
fn a_front_delivers_to_a_backend_of_its_own_droplet() -> Result<()> {
    each_request_of_a_backend_here(|world, asked, there| {
        let at_xdp = world.run(Role::Transit, Hook::Xdp, &outside(asked))?;
        ensure_passed(&at_xdp, &outside(asked), Hook::Xdp)?;
        ensure_delivered(&ask(world, asked)?, there, BOUNCED.mac())?;
        let answer = there.answer(BOUNCED.mac());
        let outcome = send(world, BOUNCED.index, &answer)?;
        ensure_left(&outcome, &answer.sent_from((asked.to.0, 443)))
    })
}

#[test]
fn what_no_front_serves_is_the_hosts() -> Result<()> {
    let mut world = World::new()?;
    let asked = outside(&request(TCP));
    for hook in [Hook::Tc, Hook::Xdp] {
        ensure_passed(&world.run(Role::Transit, hook, &asked)?, &asked, hook)?;
    }
    serve(&mut world, TCP, 8080, BACKENDS_FAR, DSR)?;
    front(3, FRONT, UDP).by_fronts(&mut world.programs, 100, &[])?;
    let changed = |at: usize, bytes: &[u8]| {
        let mut frame = asked.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let frames = [
        outside(&request(TCP).sent_to((FRONT, 444))),
        outside(&request(TCP).sent_to((CLIENT, 443))),
        outside(&request(UDP)),
        request(TCP).fragment(5, 0, true, &[0; 40]),
        asked[..36].to_vec(),
        changed(12, &[8, 6]),
    ];
    for frame in frames {
        for hook in [Hook::Tc, Hook::Xdp] {
            ensure_passed(&world.run(Role::Transit, hook, &frame)?, &frame, hook)?;
        }
    }
    // Another host's, on a NIC that lets all frames through.
    let others = changed(0, &[2, 2, 2, 2, 2, 9]);
    ensure_passed(&world.run(Role::Transit, Hook::Tc, &others)?, &others, Hook::Tc)?;
    world.programs.set("FRONTED", 0, 0_u32)?;
    ensure_passed(&ask(&mut world, &request(TCP))?, &asked, Hook::Tc)
}

#[test]
fn nobody_asks_from_addresses_that_no_client_has() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, UDP, 8080, BACKENDS_HERE, DSR)?;
    let v4 = [
        [0, 1, 2, 3],
        [127, 0, 0, 1],
        [224, 0, 0, 1],
        [255; 4],
        [169, 254, 64, 1],
        [169, 254, 64, 2],
    ];
    let v4 = v4
        .map(IpAddr::from)
        .into_iter()
        .chain([SECOND.into(), HERE.into()]);
    let v6 = [
        "::1",
        "::",
        "ff02::1",
        "fe80::5468:7562:6101",
        "100::5468:7562:6102",
    ];
    let v6 = v6.map(|text| text.parse::<IpAddr>().unwrap());
    let asked = v4.map(|source| request(UDP).sent_from((source, 40000)));
    let asked = asked.chain(v6.map(|source| request6(UDP).sent_from((source, 40000))));
    for segment in asked.collect::<Vec<_>>() {
        let frame = outside(&segment);
        for hook in [Hook::Tc, Hook::Xdp] {
            let passed = world.run(Role::Transit, hook, &frame)?;
            ensure_passed(&passed, &frame, hook).with_context(|| format!("{:?}", segment.from))?;
        }
        ensure_dropped(
            &arrive(&mut world, SECOND, 100, &segment)?,
            Counter::SourceMismatch,
        )?;
    }
    Ok(())
}

#[test]
fn only_rows_of_the_backends_own_droplet_let_a_client_in() -> Result<()> {
    let mut world = World::new()?;
    let asked = request(TCP);
    ensure_dropped(&arrive(&mut world, SECOND, 100, &asked)?, Counter::FrontUnknown)?;
    serve(&mut world, TCP, 8080, BACKENDS_HERE, DSR)?;
    // The rows are of VPC 100. In 103 the address is another endpoint's.
    ensure_dropped(&arrive(&mut world, SECOND, 103, &asked)?, Counter::FrontUnknown)?;
    let other = asked.sent_to((FRONT, 80));
    ensure_dropped(&arrive(&mut world, SECOND, 100, &other)?, Counter::FrontUnknown)?;
    ensure_dropped(
        &arrive(&mut world, ip(192, 0, 2, 99), 100, &asked)?,
        Counter::UnknownDroplet,
    )?;
    // Without the mark a client outside is nobody in the VPC.
    let unmarked = Tunnel::new(SECOND, HERE, 100).around([2; 12], &asked.bytes());
    let outcome = world.run(Role::Transit, Hook::Tc, &unmarked)?;
    ensure_dropped(&outcome, Counter::SourceMismatch)?;
    // An answer to such a client would stay in the VPC.
    for own in [TENANT.address, ip(10, 0, 1, 200)] {
        let spoofed = asked.sent_from((own.into(), 40000));
        ensure_dropped(
            &arrive(&mut world, SECOND, 100, &spoofed)?,
            Counter::SourceMismatch,
        )?;
        ensure_dropped(&ask(&mut world, &spoofed)?, Counter::SourceMismatch)?;
    }
    world.programs.remove_local(key(100, BOUNCED.address))?;
    ensure_dropped(&arrive(&mut world, SECOND, 100, &asked)?, Counter::NoEndpoint)?;
    ensure!(arriving(&world, &asked).is_err(), "nothing is remembered of it");
    Ok(())
}

#[test]
fn only_clients_in_source_ranges_are_taken() -> Result<()> {
    for (front, asked) in [(FRONT, request(TCP)), (FRONT6, request6(TCP))] {
        let mut world = World::new()?;
        serve(&mut world, TCP, 8080, BACKENDS_FAR, DSR)?;
        let key = |vni: u32, client| SourceKey {
            vni: vni.to_be_bytes(),
            front: address(front),
            client: address(client),
        };
        let nobody = SourceEntry { admits: 0 };
        // What is said of another VPC's front of the address is nothing to this one.
        world.programs.insert_source(key(101, front), 0, nobody)?;
        ensure_fronted(&ask(&mut world, &asked)?, &asked, SECOND, 100)?;
        world.programs.insert_source(key(100, front), 0, nobody)?;
        for hook in [Hook::Tc, Hook::Xdp] {
            let outcome = world.run(Role::Transit, hook, &outside(&asked))?;
            ensure!(
                outcome.verdict == if hook == Hook::Tc { 2 } else { 1 },
                "{}",
                outcome.verdict
            );
            ensure!(outcome.counted.keys().eq([&Counter::OutOfSourceRanges.name()]));
        }
        world
            .programs
            .insert_source(key(100, asked.from.0), 120, SourceEntry { admits: 1 })?;
        ensure_fronted(&ask(&mut world, &asked)?, &asked, SECOND, 100)?;
        let far = if asked.from.0.is_ipv4() {
            IpAddr::V4(ip(198, 51, 101, 7))
        } else {
            IpAddr::V6(ip6(0x198, 1, 7))
        };
        let other = asked.sent_from((far, 40000));
        ensure_dropped(&ask(&mut world, &other)?, Counter::OutOfSourceRanges)?;
    }
    Ok(())
}

#[test]
fn a_client_in_a_closed_range_is_outside() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, TCP, 8080, BACKENDS_HERE, DSR)?;
    let closed = SubnetEntry {
        network: 0,
        flags: SUBNET_CLOSED,
        bouncers: members(&[]),
    };
    world
        .programs
        .insert_subnet(100, ip(198, 51, 100, 0), 24, closed)?;
    let there = request(TCP).sent_to((HERE_BACKEND, 8080));
    ensure_delivered(
        &arrive(&mut world, SECOND, 100, &request(TCP))?,
        &there,
        BOUNCED.mac(),
    )?;
    let answer = there.answer(BOUNCED.mac());
    ensure_left(
        &send(&mut world, BOUNCED.index, &answer)?,
        &answer.sent_from((FRONT, 443)),
    )
}

#[test]
fn nothing_but_an_answer_leaves() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, TCP, 8080, BACKENDS_HERE, DSR)?;
    let there = request(TCP).sent_to((HERE_BACKEND, 8080));
    arrive(&mut world, SECOND, 100, &request(TCP))?;
    let answer = there.answer(BOUNCED.mac());
    for other in [
        answer.sent_to((CLIENT, 40001)),
        answer.sent_to((IpAddr::V4(ip(198, 51, 100, 8)), 40000)),
        answer.sent_from((HERE_BACKEND, 8081)),
    ] {
        ensure_dropped(&send(&mut world, BOUNCED.index, &other)?, Counter::OutsideVpc)?;
    }
    // The pod opens no connection as the front, by the same ports.
    let own = there.answer(BOUNCED.mac()).with_flags(OPENS);
    ensure_dropped(&send(&mut world, BOUNCED.index, &own)?, Counter::OutsideVpc)?;
    // Another pod of the VPC, and a pod of another VPC, are not that backend.
    let of_tenant = Segment::new(TCP, TENANT.mac(), (TENANT.address.into(), 8080), (CLIENT, 40000));
    ensure_dropped(&send(&mut world, TENANT.index, &of_tenant)?, Counter::OutsideVpc)?;
    let of_other = Segment::new(
        TCP,
        DIVIDED.mac(),
        (DIVIDED.address.into(), 8080),
        (CLIENT, 40000),
    );
    ensure_dropped(&send(&mut world, DIVIDED.index, &of_other)?, Counter::OutsideVpc)?;
    Ok(())
}

#[test]
fn nobody_answers_to_the_overlays_port() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, UDP, 8080, BACKENDS_HERE, DSR)?;
    let asked = request(UDP).sent_from((CLIENT, 6081));
    let there = asked.sent_to((HERE_BACKEND, 8080));
    ensure_delivered(&ask(&mut world, &asked)?, &there, BOUNCED.mac())?;
    let outcome = send(&mut world, BOUNCED.index, &there.answer(BOUNCED.mac()))?;
    ensure_dropped(&outcome, Counter::GeneveForbidden)
}

/// Asserts that a packet of a front went on to a droplet with this class of the stamp, and returns the frame as that
/// droplet would get it from here.
pub fn ensure_passed_on(outcome: &Outcome, to: Ipv4Addr, class: u8) -> Result<()> {
    let frame = &outcome.frame;
    ensure!(
        outcome.verdict == 7 && frame[30..34] == to.octets(),
        "not to {to}: {:?}",
        outcome.counted
    );
    ensure!(outcome.counted.keys().eq([&Counter::Forwarded.name()]));
    ensure!(frame[59] == class && frame[56] == 0x12, "{:?}", &frame[50..62]);
    Ok(())
}

/// Has the ingress set of SPREAD deny all clients outside.
pub fn deny_clients_of_spread(world: &mut World) -> Result<()> {
    let key = GrantKey {
        set: of_vpc(103, u32::from(SPREAD.stamp().flags)),
        peer: PEER_OUTSIDE,
    };
    let denies = Grant {
        list: 0,
        flags: GRANT_DENIES,
    };
    world.programs.insert("GRANTS", key, denies.of(&key))
}

#[test]
fn policies_judge_the_clients_own_address() -> Result<()> {
    let mut world = World::new()?;
    // SPREAD has an ingress set, which allows everything.
    let own = [(SPREAD.address.into(), 8080, HERE)];
    front(1, FRONT, TCP).by_fronts(&mut world.programs, 103, &own)?;
    let there = request(TCP).sent_to((SPREAD.address.into(), 8080));
    ensure_delivered(
        &arrive(&mut world, SECOND, 103, &request(TCP))?,
        &there,
        SPREAD.mac(),
    )?;
    deny_clients_of_spread(&mut world)?;
    for segment in [request(TCP), request(TCP).sent_from((CLIENT, 40001))] {
        ensure_dropped(
            &arrive(&mut world, SECOND, 103, &segment)?,
            Counter::PolicyIngress,
        )?;
        ensure_dropped(&ask(&mut world, &segment)?, Counter::PolicyIngress)?;
    }
    Ok(())
}

#[test]
fn a_packet_that_does_not_fit_is_answered_to_the_client() -> Result<()> {
    let mut world = World::new()?;
    serve(&mut world, UDP, 8080, BACKENDS_FAR, DSR)?;
    for (mut asked, header) in [(request(UDP), 34), (request6(UDP), 54)] {
        asked.payload = vec![1; 1450 - header + 14 - 8 + 1];
        let at_xdp = world.run(Role::Transit, Hook::Xdp, &outside(&asked))?;
        ensure_passed(&at_xdp, &outside(&asked), Hook::Xdp)?;
        let outcome = ask(&mut world, &asked)?;
        ensure!(
            outcome.counted.keys().eq([&Counter::TooBigAnswered.name()]),
            "{:?}",
            outcome.counted
        );
        ensure_same(&outcome.frame[..6], &[7; 6])?;
        let kind = if header == 34 { [3, 4] } else { [2, 0] };
        ensure_same(&outcome.frame[header..header + 2], &kind)?;
        let mtu = u16::from_be_bytes([outcome.frame[header + 6], outcome.frame[header + 7]]);
        ensure!(mtu == 1450, "MTU {mtu}");
        let from = if header == 34 { 26..30 } else { 22..38 };
        ensure_same(&outcome.frame[from], &octets(asked.to.0))?;
        asked.payload.pop();
        ensure_fronted(&ask(&mut world, &asked)?, &asked, SECOND, 100)?;
    }
    // A datagram that may be fragmented is the stack's.
    let mut asked = request(UDP);
    asked.payload = vec![1; 1440];
    let mut frame = outside(&asked);
    frame[20..22].fill(0);
    frame[24..26].fill(0);
    let sum = checksum(&frame[14..34]);
    frame[24..26].copy_from_slice(&sum.to_be_bytes());
    ensure_passed(&world.run(Role::Transit, Hook::Tc, &frame)?, &frame, Hook::Tc)
}
