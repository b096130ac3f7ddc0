//! Forms of a datagram other than the form in which droplets send Geneve: the node's stack would take each of them.

use std::{
    cell::Cell,
    net::{Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context, Result};
use thuban_e2e::rig::topology::Topology;
use thuban_testkit::packets::{Ipv4, checksum};

const UDP: u8 = 17;
const MORE: u16 = 0x2000;
/// Another address of droplet 2.
const SECOND: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 77);
pub const SECOND6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 2);
/// The IPv6 address of the forger.
const FROM6: Ipv6Addr = Ipv6Addr::new(0xfd00, 9, 0, 0, 0, 0, 0, 0x77);

/// A function that builds frames from an outer source and a UDP header with payload.
type Build = Box<dyn Fn(Ipv4Addr, &[u8]) -> Vec<Vec<u8>>>;

pub struct Shape {
    pub name: String,
    pub build: Build,
    /// Whether transit itself drops it, and counts `bad_header` once for each datagram.
    pub is_counted: bool,
    /// Whether a datagram of this shape for another port reaches the node's sockets.
    pub comes_to_node: bool,
}

/// Returns a frame between MACs, the source's of nobody.
fn ethernet(to: [u8; 6], kind: u16, packet: &[u8]) -> Vec<u8> {
    [&to[..], &[2, 9, 9, 9, 9, 9], &kind.to_be_bytes(), packet].concat()
}

fn ipv4(from: Ipv4Addr, to: Ipv4Addr) -> Ipv4 {
    Ipv4 {
        fragment: 0,
        identification: next_identification(),
        ..Ipv4::new(UDP, from, to)
    }
}

/// Returns a new identification: fragments of two datagrams must not be taken for those of one.
fn next_identification() -> u16 {
    thread_local!(static NEXT: Cell<u16> = const { Cell::new(1) });
    NEXT.with(|next| next.replace(next.get().wrapping_add(1)))
}

/// Returns a datagram in two fragments, the first with this many bytes of it.
fn fragments(header: &Ipv4, udp: &[u8], first: usize) -> [Vec<u8>; 2] {
    let (head, tail) = udp.split_at(first.min((udp.len() - 1) / 8 * 8));
    let part = |fragment: u16, payload: &[u8]| {
        Ipv4 {
            fragment,
            ..header.clone()
        }
        .around(payload)
    };
    [part(MORE, head), part((head.len() / 8) as u16, tail)]
}

/// Returns the datagram in IPv6, with a correct checksum.
fn ipv6(udp: &[u8]) -> Vec<u8> {
    let mut udp = udp.to_vec();
    udp[6..8].copy_from_slice(&[0, 0]);
    let mut covered = [FROM6.octets(), SECOND6.octets()].concat();
    covered.extend((udp.len() as u32).to_be_bytes());
    covered.extend([0, 0, 0, UDP]);
    covered.extend(&udp);
    udp[6..8].copy_from_slice(&checksum(&covered).to_be_bytes());
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((udp.len() as u16).to_be_bytes());
    packet.extend([UDP, 64]);
    packet.extend(FROM6.octets());
    packet.extend(SECOND6.octets());
    packet.extend(udp);
    packet
}

/// Returns all shapes for droplet 2, and gives it the other addresses that they need.
pub fn shapes(topology: &Topology, mac: [u8; 6]) -> Result<Vec<Shape>> {
    let droplet = topology.rig.droplets.get(1).context("droplet 2")?;
    droplet
        .namespace
        .command(&format!("ip addr add {SECOND}/32 dev lo"))?;
    droplet
        .namespace
        .command(&format!("ip addr add {SECOND6}/64 dev uplink nodad"))?;
    let node = droplet.address;
    let mut shapes = Vec::new();
    let mut add = |name: &str, is_counted: bool, comes_to_node: bool, build: Build| {
        shapes.push(Shape {
            name: name.to_owned(),
            build,
            is_counted,
            comes_to_node,
        });
    };
    for (to, is_counted) in [(node, true), (SECOND, false)] {
        for (name, options) in [
            ("router alert", vec![0x94, 4, 0, 0]),
            ("no operation", vec![1; 4]),
            ("as many options as there may be", vec![1; 40]),
        ] {
            let build = move |from, udp: &[u8]| {
                let header = Ipv4 {
                    options: options.clone(),
                    ..ipv4(from, to)
                };
                vec![ethernet(mac, 0x800, &header.around(udp))]
            };
            add(&format!("{name} to {to}"), is_counted, true, Box::new(build));
        }
        for (name, first, is_reversed) in [
            ("the first fragment with the ports alone", 8, false),
            ("the first fragment with all inner headers", 96, false),
            ("the last fragment first", 64, true),
        ] {
            let build = move |from, udp: &[u8]| {
                let mut parts =
                    fragments(&ipv4(from, to), udp, first).map(|part| ethernet(mac, 0x800, &part));
                if is_reversed {
                    parts.reverse();
                }
                parts.into()
            };
            add(&format!("{name} to {to}"), is_counted, true, Box::new(build));
        }
        let build = move |from, udp: &[u8]| {
            let header = Ipv4 {
                fragment: 16,
                ..ipv4(from, to)
            };
            vec![ethernet(mac, 0x800, &header.around(udp))]
        };
        add(
            &format!("a later fragment alone to {to}"),
            false,
            false,
            Box::new(build),
        );
    }
    let everyone = [0xff; 6];
    let group = [1, 0, 0x5e, 0, 0, 1];
    for (name, to, mac) in [
        ("another address of the node", SECOND, mac),
        (
            "the subnet's broadcast",
            Ipv4Addr::new(172, 31, 99, 255),
            everyone,
        ),
        (
            "the subnet's broadcast, to the node's MAC",
            Ipv4Addr::new(172, 31, 99, 255),
            mac,
        ),
        ("everybody", Ipv4Addr::BROADCAST, everyone),
        ("all hosts of the link", Ipv4Addr::new(224, 0, 0, 1), group),
    ] {
        let build = move |from, udp: &[u8]| vec![ethernet(mac, 0x800, &ipv4(from, to).around(udp))];
        add(name, false, true, Box::new(build));
    }
    for (name, tag, comes) in [("a priority tag", 0_u16, true), ("a VLAN tag", 5, false)] {
        let build = move |from, udp: &[u8]| {
            let tagged = [&tag.to_be_bytes()[..], &[8, 0], &ipv4(from, node).around(udp)].concat();
            vec![ethernet(mac, 0x8100, &tagged)]
        };
        add(name, false, comes, Box::new(build));
    }
    let build = move |_, udp: &[u8]| vec![ethernet(mac, 0x86dd, &ipv6(udp))];
    add("IPv6", false, true, Box::new(build));
    let build = move |_, udp: &[u8]| vec![ethernet([0x33, 0x33, 0, 0, 0, 1], 0x86dd, &ipv6(udp))];
    add("IPv6, to a multicast MAC", false, true, Box::new(build));
    Ok(shapes)
}
