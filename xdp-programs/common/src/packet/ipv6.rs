//! IPv6 (RFC 8200), the fixed header.

use super::{Header, checksum};
use crate::tables::Address;

/// Bytes of the header without extensions.
pub const LENGTH: usize = 40;
/// The hop limit of an answer.
const HOP_LIMIT: u8 = 64;
pub const HOP_BY_HOP: u8 = 0;
pub const FRAGMENT: u8 = 44;
pub const ICMPV6: u8 = 58;

/// Whether a next header is an extension's, other than a fragment's: hop-by-hop, routing, authentication, destination
/// options, mobility, HIP, shim6.
#[inline(always)]
pub const fn is_extension(next: u8) -> bool {
    matches!(next, HOP_BY_HOP | 43 | 51 | 60 | 135 | 139 | 140)
}

/// The 40 bytes as raw words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv6Header {
    pub words: [u16; 20],
}

// SAFETY: repr(C), twenty u16.
unsafe impl Header for Ipv6Header {}

impl Ipv6Header {
    #[inline(always)]
    pub const fn new(
        source: &Address,
        destination: &Address,
        next: u8,
        hop_limit: u8,
        payload_length: u16,
    ) -> Self {
        let (from, to) = (words8(source), words8(destination));
        Self {
            words: [
                0x6000_u16.to_be(),
                0,
                payload_length.to_be(),
                u16::from_ne_bytes([next, hop_limit]),
                from[0],
                from[1],
                from[2],
                from[3],
                from[4],
                from[5],
                from[6],
                from[7],
                to[0],
                to[1],
                to[2],
                to[3],
                to[4],
                to[5],
                to[6],
                to[7],
            ],
        }
    }

    #[inline(always)]
    pub const fn is_valid(&self) -> bool {
        self.words[0].to_ne_bytes()[0] >> 4 == 6
    }

    /// Returns DSCP and ECN.
    #[inline(always)]
    pub const fn traffic_class(&self) -> u8 {
        (u16::from_be(self.words[0]) >> 4) as u8
    }

    /// Returns the same header with other DSCP and ECN bits. No checksum covers them.
    #[inline(always)]
    #[must_use]
    pub const fn with_traffic_class(mut self, class: u8) -> Self {
        self.words[0] = (u16::from_be(self.words[0]) & 0xf00f | (class as u16) << 4).to_be();
        self
    }

    /// Returns the header of an answer as long as the packet: the addresses swapped, a hop limit as of a new packet.
    #[inline(always)]
    #[must_use]
    pub const fn answer(mut self) -> Self {
        let mut index = 4;
        while index < 12 {
            let word = self.words[index];
            self.words[index] = self.words[index + 8];
            self.words[index + 8] = word;
            index += 1;
        }
        self.words[3] = u16::from_ne_bytes([self.next(), HOP_LIMIT]);
        self
    }

    /// Returns the bytes behind this header; 0 in packets beyond 65535 bytes, which only GSO makes.
    #[inline(always)]
    pub const fn payload_length(&self) -> u16 {
        u16::from_be(self.words[2])
    }

    /// Returns the protocol or extension that follows.
    #[inline(always)]
    pub const fn next(&self) -> u8 {
        self.words[3].to_ne_bytes()[0]
    }

    #[inline(always)]
    pub const fn hop_limit(&self) -> u8 {
        self.words[3].to_ne_bytes()[1]
    }

    #[inline(always)]
    pub const fn source(&self) -> Address {
        let w = &self.words;
        bytes16([w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11]])
    }

    #[inline(always)]
    pub const fn destination(&self) -> Address {
        let w = &self.words;
        bytes16([w[12], w[13], w[14], w[15], w[16], w[17], w[18], w[19]])
    }

    /// Returns the sum of the pseudo header (RFC 8200 section 8.1) for an upper layer of `length` bytes.
    #[inline(always)]
    pub const fn pseudo_sum(&self, length: u16) -> u32 {
        let all = checksum::sum(self.words);
        let first = checksum::sum([self.words[0], self.words[1], self.words[2], self.words[3]]);
        all - first + checksum::sum([length.to_be(), (self.next() as u16).to_be()])
    }
}

/// Returns an address as eight raw words.
#[inline(always)]
pub const fn words8(address: &Address) -> [u16; 8] {
    let a = address;
    [
        u16::from_ne_bytes([a[0], a[1]]),
        u16::from_ne_bytes([a[2], a[3]]),
        u16::from_ne_bytes([a[4], a[5]]),
        u16::from_ne_bytes([a[6], a[7]]),
        u16::from_ne_bytes([a[8], a[9]]),
        u16::from_ne_bytes([a[10], a[11]]),
        u16::from_ne_bytes([a[12], a[13]]),
        u16::from_ne_bytes([a[14], a[15]]),
    ]
}

/// Returns eight raw words as an address.
#[inline(always)]
pub const fn bytes16(words: [u16; 8]) -> Address {
    let mut bytes = [0; 16];
    let mut index = 0;
    while index < 8 {
        let pair = words[index].to_ne_bytes();
        bytes[2 * index] = pair[0];
        bytes[2 * index + 1] = pair[1];
        index += 1;
    }
    bytes
}

/// Whether the address is valid on this link alone: fe80::/10.
#[inline(always)]
pub const fn is_link_local(address: &Address) -> bool {
    address[0] == 0xfe && address[1] & 0xc0 == 0x80
}

/// Whether the address is a mapped IPv4 one (`::ffff:0:0/96`). Tables key IPv4 by such addresses, and no packet may
/// have one.
#[inline(always)]
pub const fn is_mapped(address: &Address) -> bool {
    has_zeros(address, 10) && address[10] == 0xff && address[11] == 0xff
}

/// Whether one host of a network may have the address: not multicast, link-local, `::/96` (unspecified, loopback).
#[inline(always)]
pub const fn is_unicast(address: &Address) -> bool {
    address[0] != 0xff && !is_link_local(address) && !has_zeros(address, 12)
}

#[inline(always)]
const fn has_zeros(address: &Address, bytes: usize) -> bool {
    let mut all = 0;
    let mut index = 0;
    while index < bytes {
        all |= address[index];
        index += 1;
    }
    all == 0
}

const _: () = assert!(size_of::<Ipv6Header>() == LENGTH);

#[cfg(test)]
mod tests {
    use super::{ICMPV6, Ipv6Header, is_link_local, is_mapped, is_unicast};
    use std::net::Ipv6Addr;

    fn address(text: &str) -> [u8; 16] {
        text.parse::<Ipv6Addr>().unwrap().octets()
    }

    #[test]
    fn what_is_written_is_read() {
        let (from, to) = (address("fd00::1"), address("fd00:1:2:3:4:5:6:7"));
        let header = Ipv6Header::new(&from, &to, ICMPV6, 255, 300).with_traffic_class(0xb9);
        assert!(header.is_valid());
        assert_eq!((header.source(), header.destination()), (from, to));
        assert_eq!((header.next(), header.hop_limit()), (ICMPV6, 255));
        assert_eq!((header.payload_length(), header.traffic_class()), (300, 0xb9));
    }

    #[test]
    fn kinds_of_addresses() {
        for text in ["::", "::1", "ff02::1", "fe80::1", "febf::1", "::10.0.0.1"] {
            assert!(!is_unicast(&address(text)), "{text}");
        }
        for text in ["fd00::1", "2001:db8::", "fec0::1", "::1:0:0:1"] {
            assert!(is_unicast(&address(text)) && !is_mapped(&address(text)), "{text}");
        }
        assert!(is_mapped(&address("::ffff:10.0.0.1")) && !is_mapped(&address("::fffe:10.0.0.1")));
        assert!(is_link_local(&address("fe80::1")) && !is_link_local(&address("fe00::1")));
    }
}
