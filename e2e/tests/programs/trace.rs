//! Records of traced endpoints' packets.

use anyhow::{Context, Result, ensure};
use aya::maps::RingBuf;
use thuban_common::{
    counters::Counter,
    tables::{CONFIG_TRACE, CONFIG_TRANSIT_AT_XDP, NO_COUNTER},
};
use thuban_e2e::programs::{address, key};

use crate::{
    frames::{Packet, Packet6, Tunnel, arp},
    rows::{BOUNCED, GUEST, HERE, SECOND, STRAY, TENANT, THIRD, ip, ip6},
    world::{Hook, Role, World},
};

const ETHERNET: [u8; 12] = [2, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2];

/// A record as it lies in the ring buffer, after its time.
#[derive(Debug, PartialEq, Eq)]
struct Record {
    vni: u32,
    interface: u32,
    source: [u8; 16],
    destination: [u8; 16],
    length: u32,
    counter: u32,
    next: [u8; 4],
    ports: [u16; 2],
    protocol: u8,
    point: u8,
    rank: u16,
    set: u32,
}

impl Record {
    fn read(bytes: &[u8]) -> Result<Self> {
        ensure!(bytes.len() == 72, "{} bytes", bytes.len());
        let word = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let port = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        ensure!(bytes[..8] != [0; 8], "no time");
        Ok(Self {
            vni: word(8),
            interface: word(12),
            source: bytes[16..32].try_into()?,
            destination: bytes[32..48].try_into()?,
            length: word(48),
            counter: word(52),
            next: bytes[56..60].try_into()?,
            ports: [port(60), port(62)],
            protocol: bytes[64],
            point: bytes[65],
            rank: u16::from_ne_bytes([bytes[66], bytes[67]]),
            set: word(68),
        })
    }
}

/// Returns the rank and the set of each record.
pub fn take_denials(world: &mut World) -> Result<Vec<(u16, u32)>> {
    let records = take(world)?;
    Ok(records.iter().map(|record| (record.rank, record.set)).collect())
}

fn take(world: &mut World) -> Result<Vec<Record>> {
    let map = world.programs.ebpf.map_mut("TRACE").context("TRACE")?;
    let mut ring: RingBuf<_> = map.try_into()?;
    let mut records = Vec::new();
    while let Some(item) = ring.next() {
        records.push(Record::read(&item)?);
    }
    Ok(records)
}

/// Returns a world that traces TENANT in both families, and a remote endpoint of VPC 100.
fn traced(until: u64) -> Result<World> {
    let mut world = World::new()?;
    world.configure_with(CONFIG_TRANSIT_AT_XDP | CONFIG_TRACE)?;
    for endpoint in [
        key(100, TENANT.address),
        key(100, TENANT.v6),
        key(100, ip(10, 0, 1, 40)),
    ] {
        world.programs.insert("TRACED", endpoint, until)?;
    }
    Ok(world)
}

const AT: [(Hook, u8); 2] = [(Hook::Tc, 0), (Hook::Xdp, 1)];

/// Returns the record of a datagram of [`Packet::udp`] at a hook, without its end.
fn datagram(world: &World, point: u8, length: usize) -> Record {
    let interface = if point < 2 {
        world.interfaces[0]
    } else {
        world.uplink
    };
    Record {
        vni: 100,
        interface,
        source: address(TENANT.address),
        destination: [0; 16],
        length: length as u32,
        counter: 0,
        next: [0; 4],
        ports: [1234, 80],
        protocol: 17,
        point,
        rank: 0,
        set: 0,
    }
}

#[test]
fn packets_of_an_agent_are_written_down_with_their_end() -> Result<()> {
    let mut world = traced(u64::MAX)?;
    let v4 = |to| Packet::udp(TENANT.mac(), TENANT.address, to).bytes();
    let v6 = Packet6::udp(TENANT.mac(), TENANT.v6, ip6(0, 1, 0x90)).bytes();
    let direct = address(ip(10, 0, 1, 50));
    for (hook, point) in AT {
        for (frame, source, destination, counter, next) in [
            (
                v4(ip(10, 0, 1, 50)),
                address(TENANT.address),
                direct,
                Counter::SentDirect,
                SECOND.octets(),
            ),
            (
                v4(ip(10, 0, 1, 12)),
                address(TENANT.address),
                address(ip(10, 0, 1, 12)),
                Counter::DeliveredLocal,
                [0; 4],
            ),
            (
                v4(ip(8, 8, 8, 8)),
                address(TENANT.address),
                address(ip(8, 8, 8, 8)),
                Counter::OutsideVpc,
                [0; 4],
            ),
            (
                v6.clone(),
                address(TENANT.v6),
                address(ip6(0, 1, 0x90)),
                Counter::SentToBouncer,
                THIRD.octets(),
            ),
        ] {
            world.run(Role::Agent(TENANT.index), hook, &frame)?;
            let expected = Record {
                source,
                destination,
                counter: counter as u32,
                next,
                ..datagram(&world, point, frame.len())
            };
            let records = take(&mut world)?;
            ensure!(records == [expected], "{counter:?} at {hook:?}: {records:#?}");
        }
    }
    Ok(())
}

#[test]
fn what_ends_before_its_addresses_are_read_is_the_pods() -> Result<()> {
    let mut world = traced(u64::MAX)?;
    let forged = Packet::udp([2; 6], TENANT.address, ip(10, 0, 1, 50)).bytes();
    let asked = arp(TENANT.mac(), 1, TENANT.mac(), TENANT.address, ip(10, 0, 1, 1));
    for (hook, point) in AT {
        let answer = if hook == Hook::Tc {
            Counter::ArpReplies as u32
        } else {
            NO_COUNTER
        };
        for (frame, counter) in [(&forged, Counter::SpoofedMac as u32), (&asked, answer)] {
            world.run(Role::Agent(TENANT.index), hook, frame)?;
            let expected = Record {
                counter,
                ports: [0; 2],
                protocol: 0,
                ..datagram(&world, point, frame.len())
            };
            let records = take(&mut world)?;
            ensure!(records == [expected], "at {hook:?}: {records:#?}");
        }
    }
    Ok(())
}

#[test]
fn trace_records_wire_packets_by_source_and_destination() -> Result<()> {
    let mut world = traced(u64::MAX)?;
    let wrapped =
        |from, to| Tunnel::new(SECOND, HERE, 100).around(ETHERNET, &Packet::udp([2; 6], from, to).bytes());
    let (remote, local) = (ip(10, 0, 1, 40), ip(10, 0, 1, 12));
    for (hook, point, delivered) in [
        (Hook::Tc, 2, Counter::Delivered),
        (Hook::Xdp, 3, Counter::DecapsulatedXdp),
    ] {
        for (from, to, counter, next) in [
            (remote, local, delivered, [0; 4]),
            (ip(10, 0, 1, 44), TENANT.address, delivered, [0; 4]),
            (remote, ip(10, 0, 3, 33), Counter::Bounced, THIRD.octets()),
            (remote, ip(10, 0, 2, 90), Counter::NoEndpoint, [0; 4]),
        ] {
            let frame = wrapped(from, to);
            world.run(Role::Transit, hook, &frame)?;
            let expected = Record {
                source: address(from),
                destination: address(to),
                counter: counter as u32,
                next,
                ..datagram(&world, point, frame.len())
            };
            let records = take(&mut world)?;
            ensure!(records == [expected], "{counter:?} at {hook:?}: {records:#?}");
        }
    }
    Ok(())
}

/// Returns frames that must give no record in [`traced`]: other endpoints, and the same address in another VPC.
fn untraced() -> Vec<(Role, Vec<u8>)> {
    let of = |endpoint: crate::rows::Endpoint, to| {
        let packet = Packet::udp(endpoint.mac(), endpoint.address, to);
        (Role::Agent(endpoint.index), packet.bytes())
    };
    let elsewhere = Packet::udp([2; 6], TENANT.address, ip(10, 0, 1, 40)).bytes();
    vec![
        of(GUEST, ip(8, 8, 8, 8)),
        of(BOUNCED, ip(10, 0, 3, 30)),
        of(STRAY, ip(10, 0, 1, 50)),
        (
            Role::Transit,
            Tunnel::new(SECOND, HERE, 103).around(ETHERNET, &elsewhere),
        ),
        (Role::Transit, Packet::udp([2; 6], TENANT.address, HERE).bytes()),
    ]
}

#[test]
fn nothing_else_is_written_down() -> Result<()> {
    let of_tenant = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50)).bytes();
    let traced_frame = (Role::Agent(TENANT.index), of_tenant);
    let mut world = traced(u64::MAX)?;
    // Bytes that the previous frame left behind must not show.
    for (role, frame) in untraced() {
        for hook in [Hook::Tc, Hook::Xdp] {
            world.run(traced_frame.0, hook, &traced_frame.1)?;
            ensure!(take(&mut world)?.len() == 1);
            world.run(role, hook, &frame)?;
            let records = take(&mut world)?;
            ensure!(records.is_empty(), "{role:?} at {hook:?}: {records:#?}");
        }
    }
    world.configure_with(CONFIG_TRANSIT_AT_XDP)?;
    world.run(traced_frame.0, Hook::Tc, &traced_frame.1)?;
    ensure!(take(&mut world)?.is_empty(), "without the flag");
    let mut ended = traced(1)?;
    ended.run(traced_frame.0, Hook::Tc, &traced_frame.1)?;
    ensure!(take(&mut ended)?.is_empty(), "after its time");
    Ok(())
}

#[test]
fn a_record_without_room_is_counted() -> Result<()> {
    const MOST: usize = 10_000;
    let mut world = traced(u64::MAX)?;
    take(&mut world)?;
    let frame = Packet::udp(TENANT.mac(), TENANT.address, ip(10, 0, 1, 50)).bytes();
    let before = world.programs.counter(Counter::TraceLost)?;
    let mut sent = 0;
    while world.programs.counter(Counter::TraceLost)? == before {
        ensure!(sent < MOST, "nothing was lost of {sent} records");
        world.run_uncounted(Role::Agent(TENANT.index), Hook::Tc, &frame, 0)?;
        sent += 1;
    }
    let records = take(&mut world)?.len();
    ensure!(records + 1 == sent, "{records} of {sent} records");
    let outcome = world.run(Role::Agent(TENANT.index), Hook::Tc, &frame)?;
    let counted = outcome.counted.contains_key(Counter::TraceLost.name());
    ensure!(!counted && take(&mut world)?.len() == 1, "there is room again");
    Ok(())
}
