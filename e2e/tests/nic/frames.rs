//! The frames that played droplets send, and the checks of what the machine sends, written apart from the code under
//! test.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context, Result, bail, ensure};
use thuban_e2e::rig::{capture, droplet::address6};
use thuban_testkit::packets::{Ipv4, Tunnel, checksum, ensure_same};

use crate::plan::{HERE, mac};

/// Bytes of a tunnel's headers, the outer Ethernet header included.
const OUTER: usize = 50;
const ETHERNET: usize = 14;

/// The inner packet's IP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    /// Returns the bytes of ping's data in a packet of this length.
    pub fn data(self, packet: usize) -> usize {
        match self {
            Self::V4 => packet - 28,
            Self::V6 => packet - 48,
        }
    }
}

/// A ping's request between two endpoints.
#[derive(Clone, Copy, Debug)]
pub struct Ping {
    pub family: Family,
    pub from: Ipv4Addr,
    pub to: Ipv4Addr,
    /// Bytes of data.
    pub size: usize,
    pub sequence: u16,
}

impl Ping {
    /// Returns the inner frame, between MACs of nobody.
    pub fn frame(&self) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        match self.family {
            Family::V4 => {
                frame.extend([8, 0]);
                frame.extend(Ipv4::new(1, self.from, self.to).around(&self.message(8)));
            }
            Family::V6 => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0]);
                let message = self.message(128);
                frame.extend((message.len() as u16).to_be_bytes());
                frame.extend([58, 64]);
                frame.extend(address6(self.from).octets());
                frame.extend(address6(self.to).octets());
                frame.extend(message);
            }
        }
        frame
    }

    /// Returns the ICMP message of a type, with its checksum.
    fn message(&self, kind: u8) -> Vec<u8> {
        let mut message = vec![kind, 0, 0, 0, 0x74, 0x68];
        message.extend(self.sequence.to_be_bytes());
        message.extend((0..self.size).map(|index| index as u8));
        let sum = match self.family {
            Family::V4 => checksum(&message),
            Family::V6 => {
                let mut covered = [address6(self.from).octets(), address6(self.to).octets()].concat();
                covered.extend((message.len() as u32).to_be_bytes());
                covered.extend([0, 0, 0, 58]);
                covered.extend(&message);
                checksum(&covered)
            }
        };
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        message
    }

    /// Checks that an IP packet is the answer: addresses exchanged, the same data, right checksums.
    pub fn check_answer(&self, packet: &[u8]) -> Result<()> {
        let swapped = Self {
            from: self.to,
            to: self.from,
            ..*self
        };
        let (header, kind, from, to): (_, _, IpAddr, IpAddr) = match self.family {
            Family::V4 => {
                ensure!(
                    packet.len() > 28 && packet[0] == 0x45 && packet[9] == 1,
                    "no ICMP"
                );
                ensure!(checksum(&packet[..20]) == 0, "the IPv4 header's checksum");
                let [from, to] = [12, 16].map(|at| {
                    let [a, b, c, d] = [0, 1, 2, 3].map(|byte| packet[at + byte]);
                    Ipv4Addr::new(a, b, c, d).into()
                });
                (20, 0, from, to)
            }
            Family::V6 => {
                ensure!(
                    packet.len() > 48 && packet[0] >> 4 == 6 && packet[6] == 58,
                    "no ICMPv6"
                );
                let octets = |at: usize| -> Result<Ipv6Addr> {
                    Ok(Ipv6Addr::from(<[u8; 16]>::try_from(&packet[at..at + 16])?))
                };
                (40, 129, octets(8)?.into(), octets(24)?.into())
            }
        };
        let ends: [IpAddr; 2] = match self.family {
            Family::V4 => [self.to.into(), self.from.into()],
            Family::V6 => [address6(self.to).into(), address6(self.from).into()],
        };
        ensure!([from, to] == ends, "from {from} to {to}");
        ensure_same(&packet[header..], &swapped.message(kind))
    }
}

/// Returns what a droplet sends to the machine's card.
pub fn tunnelled(from: Ipv4Addr, card: [u8; 6], vni: u32, inner: &[u8]) -> Vec<u8> {
    Tunnel::new(from, HERE, vni).around(macs(card, mac(from)), inner)
}

/// Returns what the machine sends on to the next droplet: the outer header is new, its TTL one less.
pub fn sent_on(to: Ipv4Addr, card: [u8; 6], vni: u32, inner: &[u8]) -> Vec<u8> {
    let tunnel = Tunnel {
        ttl: 63,
        ..Tunnel::new(HERE, to, vni)
    };
    tunnel.around(macs(mac(to), card), inner)
}

/// Returns a ping without a tunnel, from a droplet to the machine itself.
pub fn plain(ping: &Ping, card: [u8; 6]) -> Vec<u8> {
    let mut frame = ping.frame();
    frame[..12].copy_from_slice(&macs(card, mac(ping.from)));
    frame
}

/// Checks a tunnel that the agent made, and returns the inner IP packet.
pub fn opened(frame: &[u8], card: [u8; 6], to: Ipv4Addr, vni: u32) -> Result<&[u8]> {
    ensure_same(&frame[..12], &macs(mac(to), card))?;
    match capture::vni(frame) {
        Some(found) if found == vni => {}
        Some(found) => bail!("the VNI is {found}"),
        None => bail!("no Geneve"),
    }
    let outer = &frame[ETHERNET..ETHERNET + 20];
    ensure!(checksum(outer) == 0, "the outer header's checksum");
    ensure_same(&outer[12..], &[HERE.octets(), to.octets()].concat())?;
    frame.get(OUTER + ETHERNET..).context("no inner packet")
}

/// Whether a frame is of a test: Geneve, or a ping of the machine itself.
pub fn is_wanted(frame: &[u8]) -> bool {
    let is_ping = frame.len() > 34 && frame[12..14] == [8, 0] && frame[23] == 1;
    capture::vni(frame).is_some() || is_ping
}

fn macs(to: [u8; 6], from: [u8; 6]) -> [u8; 12] {
    let mut macs = [0; 12];
    macs[..6].copy_from_slice(&to);
    macs[6..].copy_from_slice(&from);
    macs
}
