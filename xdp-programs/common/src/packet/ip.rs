//! An IP packet of either family, as agent, transit and trace read it.
//!
//! Invariant: an IPv6 packet never has a mapped IPv4 address, so that its keys are never an IPv4 endpoint's.

use super::{
    ipv4::{self, Ipv4Header},
    ipv6::{self, Ipv6Header},
};
use crate::{
    counters::Counter,
    tables::{Address, HOST_SOURCE, HOST_SOURCE_V6, HOST_TRACKED, HOST_TRACKED_V6},
};

/// An IP packet's addresses, flow, and fields of the fixed header.
/// Aligned so that the compiler copies it by words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpPacket {
    /// The source, as tables key it.
    pub source: Address,
    /// The destination, as tables key it.
    pub destination: Address,
    padding: u32,
    /// Bytes from the IP header on, by the header's own length; for IPv6 beyond 65535 only the header's 40.
    pub length: u32,
    /// Raw source and destination port, 0 where [`IpPacket::has_ports`] says no.
    pub ports: [u16; 2],
    /// IPv4's protocol, IPv6's next header (an extension's number if there is one).
    pub protocol: u8,
    /// DSCP and ECN.
    pub traffic_class: u8,
    flags: u8,
    /// TCP's flags, 0 where [`IpPacket::has_ports`] says no or they are not read.
    pub tcp_flags: u8,
}

const V6: u8 = 1;
const FRAGMENT: u8 = 2;
const LATER_FRAGMENT: u8 = 4;
const OPTIONS: u8 = 8;

impl IpPacket {
    /// Returns the packet that the header describes. The ports are not read.
    #[inline(always)]
    pub fn from_v4(header: &Ipv4Header) -> Result<Self, Counter> {
        let mut packet = Self::default();
        packet.read_v4(header).map(|()| packet)
    }

    /// Does what [`IpPacket::from_v4`] does, for IPv6.
    #[inline(always)]
    pub fn from_v6(header: &Ipv6Header) -> Result<Self, Counter> {
        let mut packet = Self {
            source: header.source(),
            destination: header.destination(),
            ..Self::default()
        };
        let [a, b, c, d, ..] = header.words;
        packet.read_v6([a, b, c, d]).map(|()| packet)
    }

    /// Does what [`IpPacket::from_v4`] does, in place: programs have little stack.
    #[inline(always)]
    pub fn read_v4(&mut self, header: &Ipv4Header) -> Result<(), Counter> {
        if !header.is_valid() {
            return Err(Counter::BadHeader);
        }
        let flag = |is, bit| if is { bit } else { 0 };
        self.source = ipv4::mapped(header.source());
        self.destination = ipv4::mapped(header.destination());
        self.length = u32::from(header.total_length());
        self.ports = [0; 2];
        self.protocol = header.protocol();
        self.traffic_class = header.traffic_class();
        self.tcp_flags = 0;
        self.flags = flag(header.is_fragment(), FRAGMENT)
            | flag(header.is_later_fragment(), LATER_FRAGMENT)
            | flag(header.has_options(), OPTIONS);
        Ok(())
    }

    /// Does what [`IpPacket::from_v6`] does, in place, with the header's first words. Source and destination are there
    /// already.
    #[inline(always)]
    pub fn read_v6(&mut self, first: [u16; 4]) -> Result<(), Counter> {
        let is_version_6 = first[0].to_ne_bytes()[0] >> 4 == 6;
        if !is_version_6 || ipv6::is_mapped(&self.source) || ipv6::is_mapped(&self.destination) {
            return Err(Counter::BadHeader);
        }
        let next = first[3].to_ne_bytes()[0];
        let kind = match next {
            ipv6::FRAGMENT => FRAGMENT | LATER_FRAGMENT,
            next if ipv6::is_extension(next) => OPTIONS,
            _ => 0,
        };
        self.length = ipv6::LENGTH as u32 + u32::from(u16::from_be(first[2]));
        self.ports = [0; 2];
        self.protocol = next;
        self.traffic_class = (u16::from_be(first[0]) >> 4) as u8;
        self.tcp_flags = 0;
        self.flags = V6 | kind;
        Ok(())
    }

    #[inline(always)]
    pub const fn is_v6(&self) -> bool {
        self.flags & V6 != 0
    }

    /// Returns the bytes of the fixed header.
    #[inline(always)]
    pub const fn header_length(&self) -> u32 {
        if self.is_v6() {
            ipv6::LENGTH as u32
        } else {
            ipv4::LENGTH as u32
        }
    }

    /// Whether the packet is a fragment, the first included.
    #[inline(always)]
    pub const fn is_fragment(&self) -> bool {
        self.flags & FRAGMENT != 0
    }

    /// Whether the packet is a fragment that doesn't begin with the transport header. Any fragment of IPv6 counts,
    /// because its offset isn't read.
    #[inline(always)]
    pub const fn is_later_fragment(&self) -> bool {
        self.flags & LATER_FRAGMENT != 0
    }

    /// Returns the datagram that a fragment is a part of, as if it were whole: with its protocol and, if the fragment
    /// shows them, its ports.
    #[inline(always)]
    #[must_use]
    pub const fn whole(&self, protocol: u8, ports: [u16; 2]) -> Self {
        Self {
            ports,
            protocol,
            flags: self.flags & !(FRAGMENT | LATER_FRAGMENT),
            ..*self
        }
    }

    /// Has the packet be one of the other direction of its flow.
    #[inline(always)]
    pub fn turn(&mut self) {
        core::mem::swap(&mut self.source, &mut self.destination);
        let [from, to] = self.ports;
        self.ports = [to, from];
    }

    /// Whether the packet has IPv4 options, or IPv6 extension headers other than a fragment's.
    #[inline(always)]
    pub const fn has_options(&self) -> bool {
        self.flags & OPTIONS != 0
    }

    /// Whether the transport header begins right behind the fixed header.
    #[inline(always)]
    pub const fn shows_transport(&self) -> bool {
        self.flags & (FRAGMENT | OPTIONS) == 0
    }

    /// Whether the 4 bytes behind the fixed header are ports that all packets of the flow carry.
    #[inline(always)]
    pub const fn has_ports(&self) -> bool {
        self.shows_transport() && matches!(self.protocol, ipv4::TCP | ipv4::UDP | ipv4::SCTP)
    }

    /// Whether the packet goes to the host's own address towards pods.
    #[inline(always)]
    pub fn is_to_host(&self) -> bool {
        if self.is_v6() {
            self.destination == HOST_SOURCE_V6
        } else {
            self.destination == ipv4::mapped(HOST_SOURCE)
        }
    }

    /// Whether the packet goes to the address of the host that only conntrack knows.
    #[inline(always)]
    pub fn is_to_tracked_host(&self) -> bool {
        if self.is_v6() {
            self.destination == HOST_TRACKED_V6
        } else {
            self.destination == ipv4::mapped(HOST_TRACKED)
        }
    }

    /// Whether one endpoint or one host elsewhere may have the destination.
    #[inline(always)]
    pub const fn is_to_unicast(&self) -> bool {
        if self.is_v6() {
            ipv6::is_unicast(&self.destination)
        } else {
            ipv4::is_unicast(self.destination[12])
        }
    }

    /// Whether a host outside of the node may have the source.
    #[inline(always)]
    pub fn is_from_outside(&self) -> bool {
        let source = &self.source;
        if self.is_v6() {
            ipv6::is_unicast(source) && *source != HOST_TRACKED_V6
        } else {
            ipv4::is_unicast(source[12]) && (source[12], source[13]) != (HOST_SOURCE[0], HOST_SOURCE[1])
        }
    }

    /// Whether the packet is an answer of a DHCP server (RFC 2131, RFC 8415): pods must not give addresses to others.
    #[inline(always)]
    pub const fn is_from_dhcp_server(&self) -> bool {
        let (server, client) = if self.is_v6() { (547, 546) } else { (67, 68) };
        self.protocol == ipv4::UDP
            && self.ports[0] == u16::to_be(server)
            && self.ports[1] == u16::to_be(client)
    }
}

const _: () = assert!(size_of::<IpPacket>() == 48);

#[cfg(test)]
mod tests {
    use super::IpPacket;
    use crate::{
        counters::Counter,
        packet::{
            flow,
            ipv4::{Ipv4Header, mapped},
            ipv6::{ICMPV6, Ipv6Header},
        },
        tables::{HOST_SOURCE, HOST_SOURCE_V6, HOST_TRACKED, HOST_TRACKED_V6},
        testing::Random,
    };

    const FROM: [u8; 16] = [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

    fn v6(to: [u8; 16], next: u8) -> IpPacket {
        IpPacket::from_v6(&Ipv6Header::new(&FROM, &to, next, 64, 8)).unwrap()
    }

    #[test]
    fn ipv6_never_disguises_as_ipv4() {
        let header = |from, to| Ipv6Header::new(from, to, 17, 64, 8);
        let disguised = mapped([10, 0, 0, 1]);
        assert_eq!(
            IpPacket::from_v6(&header(&disguised, &FROM)),
            Err(Counter::BadHeader)
        );
        assert_eq!(
            IpPacket::from_v6(&header(&FROM, &disguised)),
            Err(Counter::BadHeader)
        );
    }

    #[test]
    fn extensions_and_fragments_hide_the_transport() {
        assert!(v6(FROM, 17).has_ports() && v6(FROM, 6).shows_transport());
        assert!(v6(FROM, 44).is_fragment() && v6(FROM, 44).is_later_fragment());
        assert!(!v6(FROM, 44).has_ports() && !v6(FROM, 44).has_options());
        for next in [0, 43, 51, 60, 135, 139, 140] {
            assert!(v6(FROM, next).has_options() && !v6(FROM, next).shows_transport());
        }
        assert!(!v6(FROM, ICMPV6).has_ports());
    }

    #[test]
    fn the_host_is_known_in_both_families() {
        assert!(v6(HOST_SOURCE_V6, 6).is_to_host() && !v6(FROM, 6).is_to_host());
        assert!(v6(HOST_TRACKED_V6, 17).is_to_tracked_host() && !v6(HOST_SOURCE_V6, 17).is_to_tracked_host());
        let mut header = Ipv4Header { words: [0; 10] };
        header.words[0] = u16::from_ne_bytes([0x45, 0]);
        header.words[1] = 20_u16.to_be();
        [header.words[8], header.words[9]] = crate::packet::words2(HOST_SOURCE);
        let packet = IpPacket::from_v4(&header).unwrap();
        assert!(packet.is_to_host() && !packet.is_to_tracked_host());
        [header.words[8], header.words[9]] = crate::packet::words2(HOST_TRACKED);
        let packet = IpPacket::from_v4(&header).unwrap();
        assert!(packet.is_to_tracked_host() && !packet.is_to_host());
    }

    #[test]
    fn random_headers_are_read_or_refused() {
        let mut random = Random::from_clock();
        for _ in 0..200_000 {
            let mut words = [0_u16; 20];
            for word in &mut words {
                *word = random.u32() as u16;
            }
            if random.below(2) == 0 {
                words[0] = u16::from_ne_bytes([0x45 + random.below(3) as u8, 0]);
            } else {
                words[0] = u16::from_ne_bytes([0x60, 0]);
            }
            let ports = [random.u32() as u16, random.u32() as u16];
            let v4 = Ipv4Header {
                words: words[..10].try_into().unwrap(),
            };
            for packet in [IpPacket::from_v4(&v4), IpPacket::from_v6(&Ipv6Header { words })] {
                let Ok(mut packet) = packet else { continue };
                packet.ports = if packet.has_ports() { ports } else { [0; 2] };
                assert!(flow::source_port(flow::hash(&packet)) >= 49152);
                assert!(packet.length >= 20, "seed {}", random.seed());
                assert_eq!(
                    packet.is_v6(),
                    !packet
                        .source
                        .starts_with(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff])
                );
            }
        }
    }
}
