//! The expected behaviour of the programs, in plain Rust over the rows of the world: written from the design and
//! ARCHITECTURE.md, not from the programs. It uses only the programs' constants, and the hash and pick that choose a
//! role's member.
//!
//! Addresses are `IpAddr`s here, so that a mapped IPv6 address never equals an IPv4 one.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

use thuban_common::{
    counters::Counter,
    packet::{flow, ip::IpPacket, ipv4::Ipv4Header, ipv6::Ipv6Header},
    select::pick,
    tables::{LOCAL_TAKES_XDP, RemoteRow},
};
use thuban_e2e::programs::members;

use crate::{
    fixture::Expect,
    rows::{
        ATTACHED, BOUNCED, Endpoint, HERE, LOCAL_MAC, LOCALS, MTU, REMOTES, SUBNETS, Subnet, UNREACHED, VPCS,
    },
    world::Hook,
};

/// Bytes around an inner IP packet within the outer one: outer IP, UDP, Geneve, inner Ethernet.
pub const OVERHEAD: u32 = 20 + 8 + 8 + 14;

#[derive(Clone, Copy)]
pub struct Local {
    pub interface: u8,
    pub mac: [u8; 6],
    pub takes_xdp: bool,
    pub has_policy: bool,
}

type Rows = HashMap<(u32, IpAddr), Ipv4Addr>;

pub struct Model {
    pub locals: HashMap<(u32, IpAddr), Local>,
    pub direct: Rows,
    pub bouncer: Rows,
    pub forward: Rows,
    pub forwarders: Rows,
    /// The path MTUs that routers reported for the ways to droplets.
    pub paths: HashMap<Ipv4Addr, u32>,
    /// Interfaces whose endpoints got a packet whose answers are vouched for.
    pub asked: RefCell<HashSet<u8>>,
}

impl Model {
    pub fn new() -> Self {
        let mut locals = HashMap::new();
        for endpoint in ATTACHED {
            let local = Local {
                interface: endpoint.index,
                mac: endpoint.mac(),
                takes_xdp: true,
                has_policy: endpoint.has_policy(),
            };
            locals.insert((endpoint.vni, IpAddr::V4(endpoint.address)), local);
            locals.insert((endpoint.vni, IpAddr::V6(endpoint.v6)), local);
        }
        for (vni, address, flags) in LOCALS {
            let local = Local {
                interface: BOUNCED.index,
                mac: LOCAL_MAC,
                takes_xdp: flags == LOCAL_TAKES_XDP,
                has_policy: BOUNCED.has_policy(),
            };
            locals.insert((vni, address), local);
        }
        let rows = |kind| {
            REMOTES
                .iter()
                .filter(|(row, ..)| *row == kind)
                .map(|(_, vni, address, droplet)| ((*vni, *address), *droplet))
                .collect()
        };
        Self {
            locals,
            direct: rows(RemoteRow::Direct),
            bouncer: rows(RemoteRow::Bouncer),
            forward: rows(RemoteRow::Forward),
            forwarders: rows(RemoteRow::Forwarder),
            paths: HashMap::new(),
            asked: RefCell::default(),
        }
    }

    /// Returns the MTU of the way to a droplet.
    pub fn mtu(&self, droplet: Ipv4Addr) -> u32 {
        self.paths.get(&droplet).copied().unwrap_or(MTU).min(MTU)
    }
}

/// The reason of a drop.
pub type Refusal = Counter;

/// Returns the endpoint behind an interface.
pub fn attached(index: u8) -> Option<Endpoint> {
    ATTACHED.into_iter().find(|endpoint| endpoint.index == index)
}

/// Returns flags and dividers of a VPC.
pub fn vpc(vni: u32) -> Option<(u32, &'static [Ipv4Addr])> {
    VPCS.into_iter()
        .find(|(number, ..)| *number == vni)
        .map(|(_, flags, dividers)| (flags, dividers))
}

/// Returns the smallest network that holds the address.
pub fn subnet(vni: u32, address: IpAddr) -> Option<Subnet> {
    SUBNETS
        .into_iter()
        .filter(|(number, base, prefix, ..)| *number == vni && holds(*base, *prefix, address))
        .max_by_key(|(_, _, prefix, ..)| *prefix)
}

fn holds(base: IpAddr, prefix: u32, address: IpAddr) -> bool {
    match (base, address) {
        (IpAddr::V4(base), IpAddr::V4(address)) => (base.to_bits() ^ address.to_bits()) >> (32 - prefix) == 0,
        (IpAddr::V6(base), IpAddr::V6(address)) => {
            (base.to_bits() ^ address.to_bits()) >> (128 - prefix) == 0
        }
        _ => false,
    }
}

/// Returns the member of a role for a packet.
pub fn member(droplets: &[Ipv4Addr], packet: &Packet) -> Option<Ipv4Addr> {
    pick(&members(droplets), packet.hash).map(Ipv4Addr::from)
}

/// Whether a hook can send to a droplet: XDP only sends to one whose neighbour entry exists.
pub fn reaches(hook: Hook, droplet: Ipv4Addr) -> bool {
    hook == Hook::Tc || droplet != UNREACHED
}

/// The frame goes unchanged to tc, which decides last.
pub const TO_TC: Expect = Expect::Pass(None);

/// An inner IP packet.
pub struct Packet {
    pub source: IpAddr,
    pub destination: IpAddr,
    /// IPv4's protocol or IPv6's next header.
    pub protocol: u8,
    pub class: u8,
    /// Length in the header, from the IP header on.
    pub length: usize,
    pub is_fragment: bool,
    pub is_later_fragment: bool,
    pub has_options: bool,
    /// Ports; zeros where the packet doesn't show them.
    pub ports: [u16; 2],
    pub hash: u32,
    /// The bytes behind the fixed header, to the end of the frame.
    pub rest: Vec<u8>,
}

impl Packet {
    pub const fn is_v6(&self) -> bool {
        self.source.is_ipv6()
    }

    /// Reads the bytes from an IP header on.
    pub fn read(ethertype: [u8; 2], bytes: &[u8]) -> Result<Self, Refusal> {
        let (mut packet, mut hashed) = match ethertype {
            [0x08, 0x00] => Self::read_v4(bytes)?,
            [0x86, 0xdd] => Self::read_v6(bytes)?,
            _ => return Err(Counter::NotIpv4),
        };
        let has_ports = matches!(packet.protocol, 6 | 17 | 132);
        if has_ports && !packet.is_fragment && !packet.has_options {
            let &[a, b, c, d, ..] = &packet.rest[..] else {
                return Err(Counter::Truncated);
            };
            packet.ports = [u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d])];
        }
        hashed.ports = packet.ports.map(u16::to_be);
        packet.hash = flow::hash(&hashed);
        Ok(packet)
    }

    fn read_v4(bytes: &[u8]) -> Result<(Self, IpPacket), Refusal> {
        let header: [u8; 20] = first(bytes)?;
        let length = usize::from(header[2]) << 8 | usize::from(header[3]);
        let words = usize::from(header[0] & 15);
        if header[0] >> 4 != 4 || words < 5 || length < 4 * words {
            return Err(Counter::BadHeader);
        }
        let fragment = u16::from_be_bytes([header[6], header[7]]);
        let raw = Ipv4Header { words: raw(&header) };
        let packet = Self {
            source: Ipv4Addr::new(header[12], header[13], header[14], header[15]).into(),
            destination: Ipv4Addr::new(header[16], header[17], header[18], header[19]).into(),
            protocol: header[9],
            class: header[1],
            length,
            // The packet has more fragments, or an offset.
            is_fragment: fragment & 0x3fff != 0,
            is_later_fragment: fragment & 0x1fff != 0,
            has_options: words != 5,
            ports: [0; 2],
            hash: 0,
            rest: bytes[20..].to_vec(),
        };
        Ok((packet, IpPacket::from_v4(&raw)?))
    }

    fn read_v6(bytes: &[u8]) -> Result<(Self, IpPacket), Refusal> {
        let header: [u8; 40] = first(bytes)?;
        let address = |at: usize| -> Ipv6Addr {
            let mut octets = [0; 16];
            octets.copy_from_slice(&header[at..at + 16]);
            octets.into()
        };
        let (source, destination) = (address(8), address(24));
        let is_disguised = |address: Ipv6Addr| address.to_ipv4_mapped().is_some();
        if header[0] >> 4 != 6 || is_disguised(source) || is_disguised(destination) {
            return Err(Counter::BadHeader);
        }
        let next = header[6];
        let raw = Ipv6Header { words: raw(&header) };
        let packet = Self {
            source: source.into(),
            destination: destination.into(),
            protocol: next,
            class: header[0] << 4 | header[1] >> 4,
            length: 40 + (usize::from(header[4]) << 8 | usize::from(header[5])),
            // A fragment header hides what follows it, also in the first fragment.
            is_fragment: next == 44,
            is_later_fragment: next == 44,
            has_options: matches!(next, 0 | 43 | 51 | 60 | 135 | 139 | 140),
            ports: [0; 2],
            hash: 0,
            rest: bytes[40..].to_vec(),
        };
        Ok((packet, IpPacket::from_v6(&raw)?))
    }
}

/// Returns the first bytes.
pub fn first<const N: usize>(bytes: &[u8]) -> Result<[u8; N], Refusal> {
    bytes.first_chunk().copied().ok_or(Counter::Truncated)
}

fn raw<const BYTES: usize, const WORDS: usize>(bytes: &[u8; BYTES]) -> [u16; WORDS] {
    std::array::from_fn(|word| u16::from_ne_bytes([bytes[2 * word], bytes[2 * word + 1]]))
}

/// Returns the result of a frame at a hook: an error is a drop.
pub fn expected(outcome: Result<Expect, Refusal>) -> Expect {
    outcome.unwrap_or_else(Expect::Drop)
}

/// Returns the droplet of a row. Refuses if this droplet has no such endpoint, or if a row would send the packet to
/// itself.
pub fn elsewhere(droplet: Option<Ipv4Addr>) -> Result<Ipv4Addr, Refusal> {
    droplet
        .filter(|droplet| *droplet != HERE)
        .ok_or(Counter::NoEndpoint)
}
