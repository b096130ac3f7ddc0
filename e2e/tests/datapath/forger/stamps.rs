//! Stamps: what the inner MACs of a packet between droplets say of its sender's class and egress set.
//!
//! The underlay proves nothing. So a forger with a droplet's address may say any class, and may say that its packet is
//! an answer: both are what that droplet could say. It can do no more than that. Without a droplet's address it reaches
//! nobody. A pod never chooses its stamp: its agent writes the MACs anew.

use std::{
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    policy::{STAMP_FRONT, STAMP_GUARDED, STAMP_REPLY},
    tables::GATEWAY_MAC,
};
use thuban_e2e::rig::{
    capture::{self, Wire},
    topology::{BLUE, RED, Topology},
};
use thuban_testkit::packets::{Ipv4, ethernet, stamp};

use super::LATE;
use crate::{
    counter, each,
    isolation::{datagram, geneve},
    policies::{grant, judge},
};

const FRIEND: u32 = 0x11;
const STRANGER: u32 = 0x12;
const SERVER: u32 = 0x13;
/// The server's ingress set.
const INGRESS: u32 = 0x21;
/// An egress set that accepts everybody.
const OPEN: u32 = 0x22;
/// An egress set that accepts nobody.
const SHUT: u32 = 0x23;
/// An id that no droplet knows.
const UNKNOWN: u32 = 0x99;

const REPLY: u8 = STAMP_REPLY as u8;
const GUARDED: u8 = STAMP_GUARDED as u8;
const FRONT: u8 = STAMP_FRONT as u8;

/// How long frames are collected at once.
const MOMENT: Duration = Duration::from_millis(30);

/// The first of the ports; each packet has its own.
const FIRST_PORT: u16 = 7800;

/// Returns a TCP segment without data, in an Ethernet frame. It has no checksum, so that no stack answers it.
fn segment(from: Ipv4Addr, to: Ipv4Addr, port: u16, flags: u8) -> Vec<u8> {
    let mut tcp = 7777_u16.to_be_bytes().to_vec();
    tcp.extend(port.to_be_bytes());
    tcp.extend([0; 8]);
    tcp.extend([0x50, flags, 0xff, 0xff, 0, 0, 0, 0]);
    ethernet(&Ipv4::new(6, from, to).around(&tcp))
}

/// Sends a packet to this port of an endpoint. Returns how often it came there, and by how much its droplet's counter
/// grew. Waits until one of them has happened.
fn outcome(
    topology: &Topology,
    (droplet, endpoint): (usize, &Wire),
    port: u16,
    reason: Counter,
    send: impl FnOnce() -> Result<()>,
) -> Result<(usize, u64)> {
    let source = topology.first.address.octets();
    let is_ours =
        |frame: &[u8]| frame.len() >= 38 && frame[26..30] == source && frame[36..38] == port.to_be_bytes();
    let before = counter(topology, droplet, reason)?;
    send()?;
    let (mut came, deadline) = (0, Instant::now() + LATE);
    loop {
        came += endpoint.collect(MOMENT, is_ours).len();
        let counted = counter(topology, droplet, reason)? - before;
        if came > 0 || counted > 0 || Instant::now() >= deadline {
            return Ok((came, counted));
        }
    }
}

/// Writes the policies of the server (`second`) and of the VPC of the same addresses. The server accepts the friends.
fn isolate_servers(topology: &mut Topology) -> Result<()> {
    let Topology {
        rig,
        second,
        second_blue,
        ..
    } = topology;
    let droplet = rig.droplet(2)?;
    for (vni, pod) in [(RED, &*second), (BLUE, &*second_blue)] {
        grant(droplet, vni, INGRESS, 0, false)?;
        judge(droplet, pod, SERVER, [INGRESS, 0])?;
    }
    grant(droplet, RED, INGRESS, FRIEND, true)?;
    grant(droplet, RED, OPEN, 0, true)?;
    grant(droplet, RED, SHUT, 0, false)
}

/// What a forger sends: a datagram, or a TCP segment with these flags.
type Sent = Option<u8>;

/// Returns what the inner MACs say, what is sent by them, and why the server's droplet drops it; none: it delivers it.
fn cases() -> Vec<(&'static str, [u8; 12], Sent, Option<Counter>)> {
    let (ingress, egress) = (Some(Counter::PolicyIngress), Some(Counter::PolicyEgress));
    let front = Some(Counter::SourceMismatch);
    let plain = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
    let of_version = |version| {
        let mut macs = stamp(FRIEND, 0, 0);
        macs[0] = version;
        macs
    };
    let reserved = |class| {
        let mut macs = stamp(class, 0, 0xe0);
        macs[0] |= 0xf0;
        for at in [4, 5, 10, 11] {
            macs[at] = 0xff;
        }
        macs
    };
    let (udp, syn, ack) = (None, Some(2), Some(0x10));
    vec![
        // Who says a class that is accepted is of it: only the droplet's word is behind any stamp.
        ("a friend", stamp(FRIEND, 0, 0), udp, None),
        ("a limited friend", stamp(FRIEND, OPEN, 0), udp, None),
        ("with reserved bits", reserved(FRIEND), udp, None),
        // Whatever else it says, or doesn't, is no class that is accepted.
        ("no stamp", plain, udp, ingress),
        ("ids without stamp", of_version(2), udp, ingress),
        ("another version", of_version(7), udp, ingress),
        ("no class", stamp(0, 0, 0), udp, ingress),
        ("another class", stamp(STRANGER, 0, 0), udp, ingress),
        ("reserved bits alone", reserved(STRANGER), udp, ingress),
        ("the server's class", stamp(SERVER, 0, 0), udp, ingress),
        ("nobody's class", stamp(UNKNOWN, 0, 0), udp, ingress),
        ("a set for a class", stamp(INGRESS, 0, 0), udp, ingress),
        ("a class for a set", stamp(0, FRIEND, 0), udp, ingress),
        ("guarded", stamp(STRANGER, 0, GUARDED), udp, ingress),
        // A set that the droplet doesn't know, or that is of the other direction, accepts nobody.
        ("a shut set", stamp(FRIEND, SHUT, 0), udp, egress),
        ("an unknown set", stamp(FRIEND, UNKNOWN, 0), udp, egress),
        ("the server's set", stamp(FRIEND, INGRESS, 0), udp, egress),
        // An answer was judged where its question was: the droplet's word again. What opens a connection is no answer.
        ("an answer", stamp(STRANGER, SHUT, REPLY), udp, None),
        ("an answer by TCP", stamp(STRANGER, SHUT, REPLY), ack, None),
        ("no answer by TCP", stamp(STRANGER, 0, 0), ack, ingress),
        ("a SYN", stamp(STRANGER, 0, REPLY), syn, ingress),
        ("all of it", stamp(STRANGER, 0, REPLY | GUARDED), syn, ingress),
        // A front's clients are outside, and the sender is not.
        ("a front", stamp(FRIEND, 0, FRONT), udp, front),
    ]
}

#[test]
fn a_forged_stamp_says_what_a_droplet_could_and_no_more() -> Result<()> {
    each(|topology| {
        topology.make_direct()?;
        isolate_servers(topology)?;
        let [one, three] = [0, 2].map(|index| topology.rig.droplets[index].address);
        let (first, second) = (topology.first.address, topology.second.address);
        let wire = Wire::open(&topology.rig.bridge, "d2")?;
        let red = Wire::open(&topology.second.namespace, "eth0")?;
        let blue = Wire::open(&topology.second_blue.namespace, "eth0")?;
        let mut port = FIRST_PORT;
        for (what, macs, sent, expected) in cases() {
            // The third one is no droplet, and knows all that a droplet does.
            for outer in [one, three, Ipv4Addr::new(172, 31, 99, 77)] {
                port += 1;
                let inner = match sent {
                    None => datagram(first, second, port),
                    Some(flags) => segment(first, second, port, flags),
                };
                let inner = [&macs, &inner[12..]].concat();
                let expected = if outer == one || outer == three {
                    expected
                } else {
                    Some(Counter::UnknownDroplet)
                };
                let frame = geneve(topology, outer, 2, RED, &inner)?;
                let reason = expected.unwrap_or(Counter::PolicyIngress);
                let happened = outcome(topology, (2, &red), port, reason, || wire.inject(&frame))?;
                let wanted = if expected.is_none() { (1, 0) } else { (0, 1) };
                ensure!(
                    happened == wanted,
                    "{what} from {outer}: came and counted {} {happened:?}, not {wanted:?}",
                    reason.name()
                );
            }
        }
        // Ids are of one VPC: the other one has a set with this id too.
        port += 1;
        let inner = [&stamp(FRIEND, 0, 0), &datagram(first, second, port)[12..]].concat();
        let frame = geneve(topology, one, 2, BLUE, &inner)?;
        let reason = Counter::PolicyIngress;
        let happened = outcome(topology, (2, &blue), port, reason, || wire.inject(&frame))?;
        ensure!(happened == (0, 1), "a friend of the other VPC: {happened:?}");
        Ok(())
    })
}

/// Returns the inner MACs of the Geneve frame with a datagram to this port.
fn sent_stamp(wire: &Wire, port: u16) -> Result<Vec<u8>> {
    let is_ours =
        |frame: &[u8]| capture::vni(frame) == Some(RED) && frame.get(86..88) == Some(&port.to_be_bytes()[..]);
    let deadline = Instant::now() + LATE;
    loop {
        let frames = wire.collect(MOMENT, is_ours);
        if let Some(frame) = frames.first() {
            return Ok(frame[50..62].to_vec());
        }
        ensure!(Instant::now() < deadline, "no frame to port {port} on the wire");
    }
}

/// A pod's source MAC is its own, or its agent drops the frame. As a stamp, that MAC would say this class.
fn class_of_mac(mac: [u8; 6]) -> u32 {
    u32::from_be_bytes([0, mac[1], mac[2], mac[3]])
}

#[test]
fn a_pods_macs_never_become_the_stamp_of_its_packets() -> Result<()> {
    each(|topology| {
        topology.make_direct()?;
        let class = class_of_mac(topology.first.mac);
        let Topology {
            rig,
            first,
            neighbour,
            second,
            ..
        } = &mut *topology;
        // The servers accept the class that the pod's frames say, and not the pod's.
        for (number, server) in [(1, &*neighbour), (2, &*second)] {
            let droplet = rig.droplet(number)?;
            grant(droplet, RED, INGRESS, 0, false)?;
            grant(droplet, RED, INGRESS, class, true)?;
            grant(droplet, RED, OPEN, 0, true)?;
            judge(droplet, server, SERVER, [INGRESS, 0])?;
        }
        judge(rig.droplet(1)?, first, STRANGER, [INGRESS, OPEN])?;
        let eth0 = Wire::open(&first.namespace, "eth0")?;
        let servers = [
            (1, neighbour.address, Wire::open(&neighbour.namespace, "eth0")?),
            (2, second.address, Wire::open(&second.namespace, "eth0")?),
        ];
        let (from, mac) = (first.address, first.mac);
        let mut port = FIRST_PORT;
        for is_accepted in [false, true] {
            for (number, to, server) in &servers {
                let number = *number;
                grant(topology.rig.droplet(number)?, RED, INGRESS, STRANGER, is_accepted)?;
                for destination in [GATEWAY_MAC, [6, 0, 0, 0, 0, 0], [6, 0, 0, SHUT as u8, 0, 0]] {
                    port += 1;
                    let wire = Wire::open(&topology.rig.bridge, "d2")?;
                    let frame = datagram(from, *to, port);
                    let frame = [&destination[..], &mac, &frame[12..]].concat();
                    let reason = Counter::PolicyIngress;
                    let happened = outcome(topology, (number, server), port, reason, || eth0.inject(&frame))?;
                    let wanted = if is_accepted { (1, 0) } else { (0, 1) };
                    let case = || format!("to {to} by {destination:02x?}: {happened:?}, not {wanted:?}");
                    ensure!(happened == wanted, case());
                    if number == 2 {
                        let sent = sent_stamp(&wire, port).with_context(case)?;
                        let own = stamp(STRANGER, OPEN, GUARDED);
                        ensure!(sent == own, "{}: the stamp is {sent:02x?}", case());
                    }
                }
            }
        }
        // A MAC that is a stamp with flags isn't the pod's.
        let mut forged = datagram(from, servers[1].1, port + 1);
        forged[..6].copy_from_slice(&GATEWAY_MAC);
        forged[6..12].copy_from_slice(&stamp(class, 0, REPLY)[6..]);
        let reason = Counter::SpoofedMac;
        let server = (1, &servers[1].2);
        let happened = outcome(topology, server, port + 1, reason, || eth0.inject(&forged))?;
        ensure!(happened == (0, 1), "a MAC that is a stamp: {happened:?}");
        Ok(())
    })
}
