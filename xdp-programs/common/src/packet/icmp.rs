//! ICMP messages that programs write: "too big", "port unreachable" and "prohibited" to a pod (RFC 792, RFC 1191, RFC
//! 4443), and messages of routers on the underlay about the tunnel's path.

use super::{
    Header, checksum,
    ipv4::{self, Ipv4Header},
    ipv6::{self, ICMPV6, Ipv6Header},
};
use crate::tables::{Address, HOST_SOURCE, HOST_SOURCE_V6};

/// Bytes of the packet that a message quotes. Long enough for an IPv4 header with options and the transport header;
/// only packets far longer are too big.
pub const QUOTE: usize = 128;
/// Raw type and code: fragmentation needed.
pub const FRAGMENTATION_NEEDED: u16 = u16::from_ne_bytes([3, 4]);
/// Raw type and code: packet too big.
const PACKET_TOO_BIG: u16 = u16::from_ne_bytes([2, 0]);
/// Raw type and code: port unreachable.
const UNREACHABLE_V4: u16 = u16::from_ne_bytes([3, 3]);
/// Raw type and code of ICMPv6: port unreachable.
const UNREACHABLE_V6: u16 = u16::from_ne_bytes([1, 4]);
/// Raw type and code: communication administratively prohibited.
const PROHIBITED_V4: u16 = u16::from_ne_bytes([3, 13]);
/// Raw type and code of ICMPv6: the same.
const PROHIBITED_V6: u16 = u16::from_ne_bytes([1, 1]);
/// Bytes that "port unreachable" and "prohibited" quote: the IP header and 8 bytes, which every packet with ports has.
pub const LEAST_QUOTE_V4: usize = ipv4::LENGTH + 8;
/// The same for IPv6.
pub const LEAST_QUOTE_V6: usize = ipv6::LENGTH + 8;
/// The least MTU of an IPv6 link (RFC 8200 section 5).
const LEAST_V6: u16 = 1280;

/// Returns the number of ICMP of a family.
#[inline(always)]
pub const fn protocol(is_v6: bool) -> u8 {
    if is_v6 { ICMPV6 } else { ipv4::ICMP }
}

/// Whether a message's type is an error's: the message quotes the packet that it is about.
#[inline(always)]
pub const fn is_error(is_v6: bool, kind: u8) -> bool {
    if is_v6 {
        kind < 128
    } else {
        matches!(kind, 3 | 11 | 12)
    }
}

/// Returns the type of an echo request.
#[inline(always)]
pub const fn echo_request(is_v6: bool) -> u8 {
    if is_v6 { 128 } else { 8 }
}

/// Returns the type of an answer to it.
#[inline(always)]
pub const fn echo_reply(is_v6: bool) -> u8 {
    if is_v6 { 129 } else { 0 }
}

/// The IP and ICMP headers before the quote, IPv4.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorV4 {
    pub ip: Ipv4Header,
    pub icmp: IcmpHeader,
}

/// The IP and ICMP headers before the quote, IPv6.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorV6 {
    pub ip: Ipv6Header,
    pub icmp: IcmpHeader,
}

/// Type and code, checksum, and a word that means the MTU here (IPv4: its lower half). Raw.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IcmpHeader {
    pub kind: u16,
    pub checksum: u16,
    pub rest: [u16; 2],
}

// SAFETY: repr(C), u16 only.
unsafe impl Header for IcmpHeader {}
// SAFETY: repr(C), u16 only.
unsafe impl Header for ErrorV4 {}
// SAFETY: repr(C), u16 only.
unsafe impl Header for ErrorV6 {}

impl ErrorV4 {
    /// Returns "too big"; `quote` is the sum of the quoted words.
    #[inline(always)]
    pub const fn too_big(from: [u8; 4], to: [u8; 4], mtu: u16, quote: u32) -> Self {
        Self::new(from, to, FRAGMENTATION_NEEDED, mtu, QUOTE, quote)
    }

    /// Returns "port unreachable" to a pod, with a quote of [`LEAST_QUOTE_V4`] bytes.
    #[inline(always)]
    pub const fn port_unreachable(pod: [u8; 4], quote: u32) -> Self {
        Self::new(HOST_SOURCE, pod, UNREACHABLE_V4, 0, LEAST_QUOTE_V4, quote)
    }

    /// Returns "administratively prohibited" from one endpoint to another, with a quote of [`LEAST_QUOTE_V4`] bytes.
    #[inline(always)]
    pub const fn prohibited(from: [u8; 4], to: [u8; 4], quote: u32) -> Self {
        Self::new(from, to, PROHIBITED_V4, 0, LEAST_QUOTE_V4, quote)
    }

    #[inline(always)]
    const fn new(from: [u8; 4], to: [u8; 4], kind: u16, mtu: u16, quoted: usize, quote: u32) -> Self {
        let length = (size_of::<Self>() + quoted) as u16;
        let ip = Ipv4Header::new(from, to, ipv4::ICMP, 0, length);
        Self {
            ip,
            icmp: IcmpHeader::new(kind, mtu, quote),
        }
    }
}

impl ErrorV6 {
    /// Returns "too big"; the MTU is never less than IPv6's least MTU.
    #[inline(always)]
    pub const fn too_big(from: &Address, to: &Address, mtu: u16, quote: u32) -> Self {
        let mtu = if mtu < LEAST_V6 { LEAST_V6 } else { mtu };
        Self::new(from, to, PACKET_TOO_BIG, mtu, QUOTE, quote)
    }

    /// Returns "port unreachable", with a quote of [`LEAST_QUOTE_V6`] bytes.
    #[inline(always)]
    pub const fn port_unreachable(pod: &Address, quote: u32) -> Self {
        Self::new(&HOST_SOURCE_V6, pod, UNREACHABLE_V6, 0, LEAST_QUOTE_V6, quote)
    }

    /// Returns "administratively prohibited" from one endpoint to another, with a quote of [`LEAST_QUOTE_V6`] bytes.
    #[inline(always)]
    pub const fn prohibited(from: &Address, to: &Address, quote: u32) -> Self {
        Self::new(from, to, PROHIBITED_V6, 0, LEAST_QUOTE_V6, quote)
    }

    #[inline(always)]
    const fn new(from: &Address, to: &Address, kind: u16, mtu: u16, quoted: usize, quote: u32) -> Self {
        let length = (size_of::<IcmpHeader>() + quoted) as u16;
        let ip = Ipv6Header::new(from, to, ICMPV6, 64, length);
        Self {
            icmp: IcmpHeader::new(kind, mtu, ip.pseudo_sum(length) + quote),
            ip,
        }
    }
}

impl IcmpHeader {
    #[inline(always)]
    const fn new(kind: u16, mtu: u16, sum: u32) -> Self {
        let mtu = mtu.to_be();
        Self {
            kind,
            checksum: !checksum::fold(sum + kind as u32 + mtu as u32),
            rest: [0, mtu],
        }
    }

    /// Returns the header of the answer to an echo request, the checksum updated from its old value (a wrong one stays
    /// wrong). `None` for any other message.
    #[inline(always)]
    pub const fn answer(mut self, is_v6: bool) -> Option<Self> {
        if self.kind != u16::from_ne_bytes([echo_request(is_v6), 0]) {
            return None;
        }
        let kind = u16::from_ne_bytes([echo_reply(is_v6), 0]);
        self.checksum = checksum::replace(self.checksum, self.kind, kind);
        self.kind = kind;
        Some(self)
    }

    /// Returns the MTU of the next hop in a "fragmentation needed"; routers before RFC 1191 send 0.
    #[inline(always)]
    pub const fn next_hop_mtu(&self) -> u16 {
        u16::from_be(self.rest[1])
    }
}

const _: () = {
    assert!(size_of::<IcmpHeader>() == 8);
    assert!(size_of::<ErrorV4>() == 28);
    assert!(size_of::<ErrorV6>() == 48);
};

#[cfg(test)]
mod tests {
    use super::{ErrorV4, ErrorV6, IcmpHeader, QUOTE};
    use crate::packet::{checksum::fold, ipv4::Ipv4Header, ipv6::Ipv6Header};

    fn words<T: Copy>(header: &T) -> Vec<u16> {
        let bytes: &[u8] =
            // SAFETY: headers are plain u16.
            unsafe { std::slice::from_raw_parts(std::ptr::from_ref(header).cast(), size_of::<T>()) };
        bytes
            .chunks(2)
            .map(|pair| u16::from_ne_bytes([pair[0], pair[1]]))
            .collect()
    }

    #[test]
    fn an_answer_is_as_right_as_its_question() {
        for (is_v6, asks, answers) in [(false, 8, 0), (true, 128, 129)] {
            for wrong in [0, 0x0101] {
                let mut asked = IcmpHeader {
                    kind: u16::from_ne_bytes([asks, 0]),
                    checksum: 0,
                    rest: [0x1234, 7],
                };
                let sum = |header: &IcmpHeader| -> u32 { words(header).into_iter().map(u32::from).sum() };
                asked.checksum = !fold(sum(&asked)) ^ wrong;
                let answer = asked.answer(is_v6).unwrap();
                assert_eq!(answer.kind.to_ne_bytes(), [answers, 0]);
                assert_eq!(answer.rest, asked.rest);
                assert_eq!(fold(sum(&answer)) == 0xffff, wrong == 0);
                assert_eq!(answer.answer(is_v6), None);
                asked.kind |= u16::from_ne_bytes([0, 1]);
                assert_eq!(asked.answer(is_v6), None, "a code that no request has");
            }
        }
    }

    #[test]
    fn an_answer_goes_back_as_a_new_packet() {
        let (from, to) = ([10, 0, 0, 1], [203, 0, 113, 80]);
        let mut asked = Ipv4Header::new(from, to, 1, 0, 84);
        asked.words[4] = u16::from_ne_bytes([3, 1]);
        asked.words[5] = asked.checksum();
        let answer = asked.answer();
        assert_eq!((answer.source(), answer.destination()), (to, from));
        assert_eq!((answer.ttl(), answer.words[5]), (64, answer.checksum()));
        asked.words[5] ^= 0x0101;
        assert_ne!(asked.answer().words[5], answer.checksum());

        let (from, to) = ([0xfd; 16], [0xfc; 16]);
        let answer = Ipv6Header::new(&from, &to, 58, 3, 8).answer();
        assert_eq!(answer, Ipv6Header::new(&to, &from, 58, 64, 8));
    }

    #[test]
    fn checksums_are_right() {
        let quote: Vec<u16> = (0..QUOTE as u16 / 2)
            .map(|n| n.wrapping_mul(40503) ^ 0x1234)
            .collect();
        let sum = quote.iter().map(|word| u32::from(*word)).sum();
        let v4 = ErrorV4::too_big([169, 254, 64, 1], [10, 0, 0, 1], 1400, sum);
        assert_eq!(v4.ip.words[5], v4.ip.checksum());
        assert_eq!((v4.ip.total_length(), v4.icmp.next_hop_mtu()), (156, 1400));
        let all: u32 = words(&v4.icmp)
            .iter()
            .chain(&quote)
            .map(|word| u32::from(*word))
            .sum();
        assert_eq!(fold(all), 0xffff);

        let v6 = ErrorV6::too_big(&[0xfe; 16], &[0xfd; 16], 900, sum);
        assert_eq!((v6.ip.payload_length(), v6.icmp.next_hop_mtu()), (136, 1280));
        let all: u32 = words(&v6.icmp)
            .iter()
            .chain(&quote)
            .map(|word| u32::from(*word))
            .sum();
        assert_eq!(fold(all + v6.ip.pseudo_sum(136)), 0xffff);
    }
}
