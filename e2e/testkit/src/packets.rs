//! Packets byte by byte, written apart from the code under test.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::{AsRawFd, OwnedFd},
};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrIn, sendto, socket,
};

/// Port of Geneve.
pub const GENEVE: u16 = 6081;
const UDP: u8 = 17;
const DO_NOT_FRAGMENT: u16 = 0x4000;

/// Returns the Internet's checksum over whole bytes: RFC 1071.
pub fn checksum(bytes: &[u8]) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | pair.get(1).copied().map_or(0, u32::from));
    let mut sum: u32 = words.sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Fails, with the place of the first difference, unless the bytes are as they should be.
pub fn ensure_same(is: &[u8], should: &[u8]) -> Result<()> {
    let differs = is.iter().zip(should).position(|(is, should)| is != should);
    ensure!(
        is == should,
        "{} bytes instead of {}, first difference at {differs:?}:\n{is:02x?}\n{should:02x?}",
        is.len(),
        should.len()
    );
    Ok(())
}

/// Fields of an IPv4 header that tests choose.
#[derive(Clone)]
pub struct Ipv4 {
    pub from: Ipv4Addr,
    pub to: Ipv4Addr,
    pub protocol: u8,
    pub ttl: u8,
    pub traffic_class: u8,
    pub identification: u16,
    /// Flags and fragment offset.
    pub fragment: u16,
    /// Options, in whole words.
    pub options: Vec<u8>,
}

impl Ipv4 {
    /// Makes a header without options; the packet must not be fragmented.
    pub fn new(protocol: u8, from: Ipv4Addr, to: Ipv4Addr) -> Self {
        Self {
            from,
            to,
            protocol,
            ttl: 64,
            traffic_class: 0,
            identification: 0,
            fragment: DO_NOT_FRAGMENT,
            options: Vec::new(),
        }
    }

    /// Returns the header of a payload of this many bytes, with a correct checksum.
    pub fn header(&self, payload: usize) -> Vec<u8> {
        let length = 20 + self.options.len();
        let mut header = vec![0x40 + (length / 4) as u8, self.traffic_class];
        header.extend(((length + payload) as u16).to_be_bytes());
        header.extend(self.identification.to_be_bytes());
        header.extend(self.fragment.to_be_bytes());
        header.extend([self.ttl, self.protocol, 0, 0]);
        header.extend(self.from.octets());
        header.extend(self.to.octets());
        header.extend(&self.options);
        let sum = checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        header
    }

    pub fn around(&self, payload: &[u8]) -> Vec<u8> {
        [&self.header(payload.len()), payload].concat()
    }
}

/// Returns an IPv4 header without options, with a correct checksum.
pub fn header(
    traffic_class: u8,
    payload: usize,
    fragment: u16,
    ttl: u8,
    protocol: u8,
    from: Ipv4Addr,
    to: Ipv4Addr,
) -> Vec<u8> {
    let fields = Ipv4 {
        ttl,
        traffic_class,
        fragment,
        ..Ipv4::new(protocol, from, to)
    };
    fields.header(payload)
}

/// Returns a UDP header without checksum, and the payload.
pub fn udp(source: u16, destination: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = source.to_be_bytes().to_vec();
    bytes.extend(destination.to_be_bytes());
    bytes.extend((8 + payload.len() as u16).to_be_bytes());
    bytes.extend([0, 0]);
    bytes.extend(payload);
    bytes
}

/// Returns one UDP datagram as an IPv4 packet.
pub fn datagram(from: SocketAddrV4, to: SocketAddrV4, payload: &[u8]) -> Vec<u8> {
    Ipv4::new(UDP, *from.ip(), *to.ip()).around(&udp(from.port(), to.port(), payload))
}

/// Returns an IPv4 packet in Ethernet between two MACs of nobody: the droplet that delivers it writes them anew.
pub fn ethernet(packet: &[u8]) -> Vec<u8> {
    [&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0], packet].concat()
}

/// Returns the inner MACs that say a class and an egress set. `flags`: those of the first byte of the source.
pub fn stamp(class: u32, egress_set: u32, flags: u8) -> [u8; 12] {
    let mut macs = [0; 12];
    macs[1..4].copy_from_slice(&egress_set.to_be_bytes()[1..]);
    macs[7..10].copy_from_slice(&class.to_be_bytes()[1..]);
    (macs[0], macs[6]) = (6, 2 | flags);
    macs
}

/// Geneve around a frame, everything but the outer Ethernet header as droplets write it.
#[derive(Clone)]
pub struct Tunnel {
    pub from: Ipv4Addr,
    pub to: Ipv4Addr,
    pub vni: u32,
    pub ttl: u8,
    pub traffic_class: u8,
    pub source_port: u16,
    /// Version and option length, flags.
    pub first: [u8; 2],
    pub protocol: u16,
    pub options: Vec<u8>,
}

impl Tunnel {
    pub fn new(from: Ipv4Addr, to: Ipv4Addr, vni: u32) -> Self {
        Self {
            from,
            to,
            vni,
            ttl: 64,
            traffic_class: 0,
            source_port: 50000,
            first: [0, 0],
            protocol: 0x6558,
            options: Vec::new(),
        }
    }

    /// Makes the tunnel around [`probe`].
    pub fn probe(from: Ipv4Addr, to: Ipv4Addr) -> Self {
        Self {
            first: [0, 0x80],
            protocol: 0x88b5,
            ..Self::new(from, to, 0)
        }
    }

    /// Adds options, and their length to the header.
    #[must_use]
    pub fn with_options(mut self, options: &[u8]) -> Self {
        self.first[0] = (options.len() / 4) as u8;
        self.options = options.to_vec();
        self
    }

    /// Returns the outer IPv4 packet.
    pub fn packet(&self, inner: &[u8]) -> Vec<u8> {
        let mut geneve = self.first.to_vec();
        geneve.extend(self.protocol.to_be_bytes());
        geneve.extend((self.vni << 8).to_be_bytes());
        geneve.extend(&self.options);
        geneve.extend(inner);
        let outer = Ipv4 {
            ttl: self.ttl,
            traffic_class: self.traffic_class,
            ..Ipv4::new(UDP, self.from, self.to)
        };
        outer.around(&udp(self.source_port, GENEVE, &geneve))
    }

    /// Returns the outer frame; `macs` are the destination's and the source's.
    pub fn around(&self, macs: [u8; 12], inner: &[u8]) -> Vec<u8> {
        [&macs[..], &[8, 0], &self.packet(inner)].concat()
    }
}

/// Returns a probe's own bytes; kinds: 1 wanted, 2 question, 3 answer.
pub fn probe(kind: u16, secret: u64) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &[0; 2], &secret.to_ne_bytes()].concat()
}

/// Sends IPv4 packets with the header as it stands (`IP_HDRINCL`), from the namespace of the thread that opened it. The
/// kernel fills in the header's checksum, and an identification of 0.
pub struct Raw(OwnedFd);

impl Raw {
    pub fn open() -> Result<Self> {
        let socket = socket(
            AddressFamily::Inet,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::Raw,
        )?;
        Ok(Self(socket))
    }

    pub fn send(&self, packet: &[u8]) -> Result<()> {
        let to = SockaddrIn::new(packet[16], packet[17], packet[18], packet[19], 0);
        sendto(self.0.as_raw_fd(), packet, &to, MsgFlags::empty()).context("sending a raw packet")?;
        Ok(())
    }
}

/// Sends one packet through a [`Raw`].
pub fn send_raw(packet: &[u8]) -> Result<()> {
    Raw::open()?.send(packet)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddrV4};

    use super::{Ipv4, Tunnel, checksum, datagram, ethernet};

    const FROM: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
    const TO: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);

    #[test]
    fn the_checksum_is_that_of_the_standards_example() {
        // RFC 1071, section 3.
        assert_eq!(checksum(&[0, 1, 0xf2, 3, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(checksum(&[0xff]), 0x00ff);
    }

    #[test]
    fn lengths_and_checksums_are_right() {
        let with_options = Ipv4 {
            options: vec![0x94, 4, 0, 0],
            ..Ipv4::new(1, FROM, TO)
        };
        let packet = with_options.around(&[0; 5]);
        assert_eq!(packet[..4], [0x46, 0, 0, 29]);
        assert_eq!(checksum(&packet[..24]), 0);
        let packet = datagram(SocketAddrV4::new(FROM, 1), SocketAddrV4::new(TO, 2), b"hello");
        assert_eq!(packet[20..28], [0, 1, 0, 2, 0, 13, 0, 0]);
        assert_eq!(checksum(&packet[..20]), 0);
    }

    #[test]
    fn a_tunnel_carries_its_vni_around_the_frame() {
        let inner = ethernet(&[1, 2, 3]);
        let frame = Tunnel::new(FROM, TO, 0x0a_0b0c).around([9; 12], &inner);
        assert_eq!(frame[12..14], [8, 0]);
        assert_eq!(frame[36..38], [0x17, 0xc1]);
        assert_eq!(frame[42..50], [0, 0, 0x65, 0x58, 0x0a, 0x0b, 0x0c, 0]);
        assert_eq!(frame[50..], inner);
    }
}
