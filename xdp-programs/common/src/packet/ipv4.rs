//! IPv4 (RFC 791).

use super::{Header, bytes4, checksum, ipv6::ICMPV6, words2};
use crate::tables::Address;

/// Bytes of the header without options.
pub const LENGTH: usize = 20;
/// The TTL of packets that are written here.
pub const TTL: u8 = 64;
pub const ICMP: u8 = 1;
pub const TCP: u8 = 6;
pub const UDP: u8 = 17;
pub const SCTP: u8 = 132;

/// Returns the name of a protocol in the words of the verbs that print packets.
pub const fn protocol_word(number: u8) -> Option<&'static str> {
    Some(match number {
        ICMP => "icmp",
        TCP => "tcp",
        UDP => "udp",
        ICMPV6 => "icmpv6",
        SCTP => "sctp",
        _ => return None,
    })
}

/// The first 20 bytes as raw words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ipv4Header {
    pub words: [u16; 10],
}

// SAFETY: repr(C), ten u16.
unsafe impl Header for Ipv4Header {}

impl Ipv4Header {
    /// Returns a header without options and with its checksum; `length` counts it.
    #[inline(always)]
    pub const fn new(source: [u8; 4], destination: [u8; 4], protocol: u8, class: u8, length: u16) -> Self {
        let (from, to) = (words2(source), words2(destination));
        let mut header = Self {
            words: [
                u16::from_ne_bytes([0x45, class]),
                length.to_be(),
                0,
                0,
                u16::from_ne_bytes([TTL, protocol]),
                0,
                from[0],
                from[1],
                to[0],
                to[1],
            ],
        };
        header.words[5] = header.checksum();
        header
    }

    /// Returns the same header with don't-fragment.
    #[inline(always)]
    #[must_use]
    pub const fn whole(mut self) -> Self {
        self.replace(3, self.words[3] | 0x4000_u16.to_be());
        self
    }

    /// Whether the header has version 4 and a header length of at least 20 bytes that fits in the packet.
    #[inline(always)]
    pub const fn is_valid(&self) -> bool {
        let first = self.words[0].to_ne_bytes()[0];
        let length = self.header_length();
        first >> 4 == 4 && length >= LENGTH && self.total_length() as usize >= length
    }

    /// Returns the bytes of the header with its options, by its own length: 0 to 60.
    #[inline(always)]
    pub const fn header_length(&self) -> usize {
        (self.words[0].to_ne_bytes()[0] & 15) as usize * 4
    }

    #[inline(always)]
    pub const fn has_options(&self) -> bool {
        self.words[0].to_ne_bytes()[0] & 15 != 5
    }

    /// Returns the bytes of header and payload.
    #[inline(always)]
    pub const fn total_length(&self) -> u16 {
        u16::from_be(self.words[1])
    }

    /// Returns DSCP and ECN.
    #[inline(always)]
    pub const fn traffic_class(&self) -> u8 {
        self.words[0].to_ne_bytes()[1]
    }

    /// Whether the packet is a fragment, the first included.
    #[inline(always)]
    pub const fn is_fragment(&self) -> bool {
        self.words[3] & 0x3fff_u16.to_be() != 0
    }

    /// Whether the packet is a fragment that doesn't begin with the transport header.
    #[inline(always)]
    pub const fn is_later_fragment(&self) -> bool {
        self.words[3] & 0x1fff_u16.to_be() != 0
    }

    #[inline(always)]
    pub const fn ttl(&self) -> u8 {
        self.words[4].to_ne_bytes()[0]
    }

    #[inline(always)]
    pub const fn protocol(&self) -> u8 {
        self.words[4].to_ne_bytes()[1]
    }

    #[inline(always)]
    pub const fn source(&self) -> [u8; 4] {
        bytes4([self.words[6], self.words[7]])
    }

    #[inline(always)]
    pub const fn destination(&self) -> [u8; 4] {
        bytes4([self.words[8], self.words[9]])
    }

    /// Returns the same header with other DSCP and ECN bits, the checksum updated.
    #[inline(always)]
    #[must_use]
    pub const fn with_traffic_class(mut self, class: u8) -> Self {
        let [first, _] = self.words[0].to_ne_bytes();
        self.replace(0, u16::from_ne_bytes([first, class]));
        self
    }

    /// Returns the header of one more hop: new addresses, TTL less one, checksum updated from its old value (a wrong
    /// one stays wrong). `None` when the TTL is used up.
    #[inline(always)]
    pub fn hop(mut self, source: [u8; 4], destination: [u8; 4]) -> Option<Self> {
        let [ttl, protocol] = self.words[4].to_ne_bytes();
        if ttl <= 1 {
            return None;
        }
        let (source, destination) = (words2(source), words2(destination));
        self.replace(4, u16::from_ne_bytes([ttl - 1, protocol]));
        self.replace(6, source[0]);
        self.replace(7, source[1]);
        self.replace(8, destination[0]);
        self.replace(9, destination[1]);
        Some(self)
    }

    /// Returns the header of an answer as long as the packet: the addresses swapped, a TTL as of a new packet, the
    /// checksum updated from its old value (a wrong one stays wrong).
    #[inline(always)]
    #[must_use]
    pub const fn answer(mut self) -> Self {
        let [_, _, _, _, _, _, a, b, c, d] = self.words;
        // The sum is the same in any order.
        self.words[6] = c;
        self.words[7] = d;
        self.words[8] = a;
        self.words[9] = b;
        self.replace(4, u16::from_ne_bytes([TTL, self.protocol()]));
        self
    }

    #[inline(always)]
    const fn replace(&mut self, index: usize, new: u16) {
        self.words[5] = checksum::replace(self.words[5], self.words[index], new);
        self.words[index] = new;
    }

    /// Returns the header checksum over the words as they are, with the checksum field taken as zero.
    #[inline(always)]
    pub const fn checksum(&self) -> u16 {
        let w = &self.words;
        let sum = w[0] as u32
            + w[1] as u32
            + w[2] as u32
            + w[3] as u32
            + w[4] as u32
            + w[6] as u32
            + w[7] as u32
            + w[8] as u32
            + w[9] as u32;
        !checksum::fold(sum)
    }
}

/// Whether one host may have an address with this first byte: not multicast, reserved or broadcast (224.0.0.0 and
/// above), not 0.x, not loopback (which some hosts route).
#[inline(always)]
pub const fn is_unicast(first: u8) -> bool {
    first != 0 && first != 127 && first < 224
}

/// Returns an IPv4 address as tables key it: `::ffff:a.b.c.d`.
#[inline(always)]
pub const fn mapped(address: [u8; 4]) -> Address {
    // The address is built as one number, so that no program fills bytes in a loop.
    (0xffff_u128 << 32 | u32::from_be_bytes(address) as u128).to_be_bytes()
}

const _: () = assert!(size_of::<Ipv4Header>() == LENGTH);

#[cfg(test)]
mod tests {
    use super::Ipv4Header;
    use crate::testing::Random;

    fn header(random: &mut Random) -> Ipv4Header {
        let mut header = Ipv4Header { words: [0; 10] };
        header
            .words
            .iter_mut()
            .for_each(|word| *word = random.u32() as u16);
        header.words[0] = u16::from_ne_bytes([0x45, 0]);
        header.words[5] = header.checksum();
        header
    }

    #[test]
    fn a_hop_keeps_the_checksum_right_and_lowers_the_ttl() {
        let mut random = Random::from_clock();
        for _ in 0..20_000 {
            let before = header(&mut random);
            let (source, destination) = (random.u32().to_ne_bytes(), random.u32().to_ne_bytes());
            let Some(after) = before.hop(source, destination) else {
                assert!(before.ttl() <= 1);
                continue;
            };
            assert_eq!(after.ttl(), before.ttl() - 1);
            assert_eq!((after.source(), after.destination()), (source, destination));
            assert_eq!(after.words[5], after.checksum(), "seed {}", random.seed());
        }
    }

    #[test]
    fn another_traffic_class_keeps_the_checksum_right() {
        let mut random = Random::from_clock();
        for _ in 0..1000 {
            let after = header(&mut random).with_traffic_class(random.u32() as u8);
            assert_eq!(after.words[5], after.checksum(), "seed {}", random.seed());
        }
    }

    #[test]
    fn a_wrong_checksum_stays_wrong() {
        let mut random = Random::from_clock();
        let mut before = header(&mut random);
        before.words[4] = u16::from_ne_bytes([64, 17]);
        before.words[5] = before.checksum() ^ 0x0101;
        let after = before.hop([10, 0, 0, 1], [10, 0, 0, 2]).unwrap();
        assert_ne!(after.words[5], after.checksum());
    }

    #[test]
    fn lengths_and_versions_are_checked() {
        let mut header = Ipv4Header { words: [0; 10] };
        header.words[1] = 20_u16.to_be();
        for (first, valid) in [(0x45, true), (0x44, false), (0x65, false), (0x46, false)] {
            header.words[0] = u16::from_ne_bytes([first, 0]);
            assert_eq!(header.is_valid(), valid, "{first:x}");
        }
    }
}
