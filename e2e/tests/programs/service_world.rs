//! Services in the test world: rows, clients' packets with correct checksums, and their expected results. Written apart
//! from the code under test.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Context, Result, ensure};
use thuban_common::{
    counters::Counter,
    tables::{GATEWAY_MAC, SUBNET_SERVICES, SubnetEntry},
};
use thuban_e2e::programs::members;
use thuban_testkit::packets::{checksum, ensure_same};

use crate::{
    fixture::unstamped,
    frames::Tunnel,
    rows::{HERE, ip, ip6},
    world::{Hook, Outcome, Role, World},
};

pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const SCTP: u8 = 132;

/// The flags of a SYN-ACK.
const ANSWERS: u8 = 0x12;

/// The service of the tests, IPv4 and IPv6.
pub const SERVICE: IpAddr = IpAddr::V4(ip(10, 96, 0, 10));
pub const SERVICE6: IpAddr = IpAddr::V6(ip6(0x96, 0, 0x10));

/// A packet of a flow with ports: addresses and ports of both sides.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub source_mac: [u8; 6],
    pub from: (IpAddr, u16),
    pub to: (IpAddr, u16),
    pub protocol: u8,
    /// Flags of TCP. SCTP has [`ANSWERS`] for an INIT ACK.
    pub flags: u8,
    pub sequence: u32,
    pub acknowledged: u32,
    pub payload: Vec<u8>,
    /// Whether it has a checksum: UDP may leave it out.
    pub has_sum: bool,
}

impl Segment {
    pub fn new(protocol: u8, source_mac: [u8; 6], from: (IpAddr, u16), to: (IpAddr, u16)) -> Self {
        Self {
            source_mac,
            from,
            to,
            protocol,
            flags: 0x02,
            sequence: 1000,
            acknowledged: 0,
            payload: b"hello".to_vec(),
            has_sum: true,
        }
    }

    pub fn with_flags(mut self, flags: u8) -> Self {
        self.flags = flags;
        self
    }

    /// Returns the other direction of the same flow.
    pub fn answer(&self, source_mac: [u8; 6]) -> Self {
        let mut answer = self.clone();
        answer.source_mac = source_mac;
        (answer.from, answer.to) = (self.to, self.from);
        if self.protocol != UDP {
            answer.flags = ANSWERS;
        }
        if self.protocol == TCP {
            (answer.sequence, answer.acknowledged) = (7000, self.sequence + 1);
        }
        answer
    }

    /// Returns the same to another destination.
    pub fn sent_to(&self, to: (IpAddr, u16)) -> Self {
        Self { to, ..self.clone() }
    }

    /// Returns the same from another source.
    pub fn sent_from(&self, from: (IpAddr, u16)) -> Self {
        Self { from, ..self.clone() }
    }

    fn transport(&self) -> Vec<u8> {
        let mut bytes = self.from.1.to_be_bytes().to_vec();
        bytes.extend(self.to.1.to_be_bytes());
        let sum_at = match self.protocol {
            TCP => {
                bytes.extend(self.sequence.to_be_bytes());
                bytes.extend(self.acknowledged.to_be_bytes());
                bytes.extend([0x50, self.flags, 0xff, 0xff, 0, 0, 0, 0]);
                16
            }
            UDP => {
                bytes.extend((8 + self.payload.len() as u16).to_be_bytes());
                bytes.extend([0, 0]);
                6
            }
            _ => {
                // The bytes are a CRC32c, which nothing here checks, and an INIT, or an INIT ACK.
                let chunk = if self.flags == ANSWERS { 2 } else { 1 };
                bytes.extend([9, 9, 9, 9, 1, 2, 3, 4, chunk, 0, 0, 20]);
                0
            }
        };
        bytes.extend(&self.payload);
        if sum_at != 0 && self.has_sum {
            let mut pseudo = octets(self.from.0);
            pseudo.extend(octets(self.to.0));
            pseudo.extend((bytes.len() as u32).to_be_bytes());
            pseudo.extend([0, 0, 0, self.protocol]);
            let sum = checksum(&[&pseudo[..], &bytes].concat());
            bytes[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
        }
        bytes
    }

    /// Returns the frame, from the endpoint to the gateway.
    pub fn bytes(&self) -> Vec<u8> {
        let transport = self.transport();
        let mut frame = [&GATEWAY_MAC[..], &self.source_mac].concat();
        if let (IpAddr::V4(from), IpAddr::V4(to)) = (self.from.0, self.to.0) {
            frame.extend([8, 0]);
            frame.extend(crate::frames::header(
                0,
                transport.len(),
                0x4000,
                63,
                self.protocol,
                from,
                to,
            ));
        } else {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((transport.len() as u16).to_be_bytes());
            frame.extend([self.protocol, 63]);
            frame.extend(octets(self.from.0));
            frame.extend(octets(self.to.0));
        }
        frame.extend(transport);
        frame
    }

    /// Returns the fragments of a datagram, each with at most `size` bytes (a multiple of 8) of it.
    pub fn fragments(&self, number: u32, size: usize) -> Vec<Vec<u8>> {
        let transport = self.transport();
        let last = transport.len().div_ceil(size) - 1;
        let parts = transport.chunks(size).enumerate();
        parts
            .map(|(index, part)| self.fragment(number, (index * size) as u16, index != last, part))
            .collect()
    }

    /// Returns the fragment with the bytes from `offset` on.
    pub fn fragment(&self, number: u32, offset: u16, has_more: bool, part: &[u8]) -> Vec<u8> {
        let mut frame = [&GATEWAY_MAC[..], &self.source_mac].concat();
        let more = u16::from(has_more);
        if let (IpAddr::V4(from), IpAddr::V4(to)) = (self.from.0, self.to.0) {
            frame.extend([8, 0]);
            let place = (offset / 8) | (more << 13);
            let mut header = crate::frames::header(0, part.len(), place, 63, self.protocol, from, to);
            header[4..6].copy_from_slice(&(number as u16).to_be_bytes());
            header[10..12].fill(0);
            let sum = checksum(&header);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            frame.extend(header);
        } else {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
            frame.extend((8 + part.len() as u16).to_be_bytes());
            frame.extend([44, 63]);
            frame.extend(octets(self.from.0));
            frame.extend(octets(self.to.0));
            frame.extend([self.protocol, 0]);
            frame.extend((offset | more).to_be_bytes());
            frame.extend(number.to_be_bytes());
        }
        frame.extend(part);
        frame
    }

    /// Returns the frame as an endpoint of this droplet gets it.
    pub fn delivered(&self, mac: [u8; 6]) -> Vec<u8> {
        to_endpoint(&self.bytes(), mac)
    }
}

/// Returns an endpoint's frame as another endpoint of this droplet gets it.
pub fn to_endpoint(frame: &[u8], mac: [u8; 6]) -> Vec<u8> {
    [&mac[..], &GATEWAY_MAC, &frame[12..]].concat()
}

pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// Returns the world with ranges of services in VPCs 100, 102 and 103.
pub fn world() -> Result<World> {
    let mut world = World::new()?;
    let entry = SubnetEntry {
        network: 0,
        flags: SUBNET_SERVICES,
        bouncers: members(&[]),
    };
    for vni in [100, 102, 103] {
        world.programs.insert_subnet(vni, ip(10, 96, 0, 0), 16, entry)?;
        world.programs.insert_subnet(vni, ip6(0x96, 0, 0), 64, entry)?;
    }
    Ok(world)
}

/// Runs a segment at tc of an endpoint's agent.
pub fn send(world: &mut World, index: u8, segment: &Segment) -> Result<Outcome> {
    world.run(Role::Agent(index), Hook::Tc, &segment.bytes())
}

/// Runs a segment at tc of the NIC, in a droplet's tunnel.
pub fn arrive(world: &mut World, droplet: Ipv4Addr, vni: u32, segment: &Segment) -> Result<Outcome> {
    let frame = Tunnel::new(droplet, HERE, vni).around([2; 12], &segment.bytes());
    world.run(Role::Transit, Hook::Tc, &frame)
}

/// Returns the frame that went out, within its tunnel if there is one, with the MACs of the endpoint that sent it.
pub fn inner(outcome: &Outcome) -> Vec<u8> {
    let frame = &outcome.frame;
    let is_tunnel =
        frame.len() > 50 && frame[14] == 0x45 && frame[23] == UDP && frame[36..38] == [0x17, 0xc1];
    if is_tunnel {
        unstamped(&frame[50..])
    } else {
        frame.clone()
    }
}

/// Returns the client's port as a backend sees it, in a frame that went out.
pub fn port_of(outcome: &Outcome) -> u16 {
    let inner = inner(outcome);
    let at = if inner[12..14] == [8, 0] { 34 } else { 54 };
    u16::from_be_bytes([inner[at], inner[at + 1]])
}

/// Asserts that a frame went to an endpoint of this droplet as this segment.
pub fn ensure_delivered(outcome: &Outcome, segment: &Segment, mac: [u8; 6]) -> Result<()> {
    ensure_same(&outcome.frame, &segment.delivered(mac))
        .with_context(|| format!("verdict {} counted {:?}", outcome.verdict, outcome.counted))?;
    ensure!(outcome.verdict == 7, "not redirected: {}", outcome.verdict);
    Ok(())
}

/// Asserts that a frame went to a droplet as this segment.
pub fn ensure_sent(outcome: &Outcome, segment: &Segment, droplet: Ipv4Addr) -> Result<()> {
    ensure_same(&inner(outcome), &segment.bytes())
        .with_context(|| format!("verdict {} counted {:?}", outcome.verdict, outcome.counted))?;
    ensure!(
        outcome.verdict == 7 && outcome.frame[30..34] == droplet.octets(),
        "not to {droplet}"
    );
    Ok(())
}

/// Asserts that a frame was dropped, for this reason.
pub fn ensure_dropped(outcome: &Outcome, reason: Counter) -> Result<()> {
    ensure!(
        outcome.verdict == 2 && outcome.counted.contains_key(reason.name()),
        "verdict {} counted {:?}",
        outcome.verdict,
        outcome.counted
    );
    Ok(())
}
