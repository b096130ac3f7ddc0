//! Neighbour discovery (RFC 4861) as the agent serves it: a solicitation of any address is answered with the gateway's
//! MAC, and no other discovery message leaves a pod.

use super::{
    Header, checksum,
    ipv6::{self, ICMPV6, Ipv6Header, bytes16, words8},
    words3,
};
use crate::{
    counters::Counter,
    tables::{Address, GATEWAY_MAC},
};

pub const ROUTER_SOLICITATION: u8 = 133;
pub const ROUTER_ADVERTISEMENT: u8 = 134;
pub const NEIGHBOUR_SOLICITATION: u8 = 135;
pub const REDIRECT: u8 = 137;
/// The hop limit of neighbour messages, which must not have crossed a router (RFC 4861 section 7.1.1).
pub const HOP_LIMIT: u8 = 255;
/// Raw option header: target link-layer address, 8 bytes.
const TARGET_MAC: u16 = u16::from_ne_bytes([2, 1]);
/// Raw flags: from a router, solicited, overrides.
const FLAGS: u16 = 0xe000_u16.to_be();

/// IPv6 header and a neighbour solicitation or advertisement with one option of a MAC. Raw words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeighbourPacket {
    pub ip: Ipv6Header,
    pub kind: u16,
    pub checksum: u16,
    pub flags: [u16; 2],
    pub target: [u16; 8],
    pub option: u16,
    pub mac: [u16; 3],
}

// SAFETY: repr(C), u16 only.
unsafe impl Header for NeighbourPacket {}

/// Bytes behind the IPv6 header.
const LENGTH: u16 = 32;

impl NeighbourPacket {
    /// Returns the address that is looked for, if this is a valid solicitation of a host that has an address and gives
    /// its MAC. Returns `None` for probes of duplicate address detection too: they must find the address free.
    #[inline(always)]
    pub fn solicited(&self) -> Option<Address> {
        let [kind, code] = self.kind.to_ne_bytes();
        let from_nobody = self.ip.source() == [0; 16];
        if kind != NEIGHBOUR_SOLICITATION
            || code != 0
            || self.ip.hop_limit() != HOP_LIMIT
            || self.ip.payload_length() < LENGTH
            || from_nobody
        {
            return None;
        }
        Some(bytes16(self.target))
    }

    /// Returns the advertisement that answers this solicitation: the target is at the gateway's MAC.
    #[inline(always)]
    #[must_use]
    pub fn answer(&self, target: &Address) -> Self {
        let ip = Ipv6Header::new(target, &self.ip.source(), ICMPV6, HOP_LIMIT, LENGTH);
        let mut answer = Self {
            ip,
            kind: u16::from_ne_bytes([136, 0]),
            checksum: 0,
            flags: [FLAGS, 0],
            target: words8(target),
            option: TARGET_MAC,
            mac: words3(GATEWAY_MAC),
        };
        let sum = checksum::sum([answer.kind, FLAGS, TARGET_MAC])
            + checksum::sum(answer.target)
            + checksum::sum(answer.mac);
        answer.checksum = !checksum::fold(ip.pseudo_sum(LENGTH) + sum);
        answer
    }
}

/// Returns why a discovery message of a pod is dropped: messages of routers are forbidden, all others are expected
/// noise.
#[inline(always)]
pub const fn refusal(kind: u8) -> Counter {
    match kind {
        ROUTER_ADVERTISEMENT | REDIRECT => Counter::RouterForbidden,
        _ => Counter::Ipv6Discovery,
    }
}

/// Whether an ICMPv6 type is neighbour discovery, which never leaves its link.
#[inline(always)]
pub const fn is_discovery(kind: u8) -> bool {
    kind >= ROUTER_SOLICITATION && kind <= REDIRECT
}

const _: () = assert!(size_of::<NeighbourPacket>() == ipv6::LENGTH + LENGTH as usize);

#[cfg(test)]
mod tests {
    use super::NeighbourPacket;
    use crate::packet::{
        checksum::fold,
        ipv6::{ICMPV6, Ipv6Header, words8},
    };

    const POD: [u8; 16] = [0xfd; 16];
    const TARGET: [u8; 16] = [0xfc; 16];

    fn solicitation(source: &[u8; 16]) -> NeighbourPacket {
        NeighbourPacket {
            ip: Ipv6Header::new(source, &[0xff; 16], ICMPV6, 255, 32),
            kind: u16::from_ne_bytes([135, 0]),
            checksum: 0,
            flags: [0; 2],
            target: words8(&TARGET),
            option: u16::from_ne_bytes([1, 1]),
            mac: [0; 3],
        }
    }

    #[test]
    fn answers_have_the_right_checksum_and_go_to_who_asked() {
        let request = solicitation(&POD);
        assert_eq!(request.solicited(), Some(TARGET));
        let answer = request.answer(&TARGET);
        assert_eq!((answer.ip.source(), answer.ip.destination()), (TARGET, POD));
        let mut sum = answer.ip.pseudo_sum(32)
            + u32::from(answer.kind)
            + u32::from(answer.checksum)
            + u32::from(answer.option);
        for word in answer.flags.iter().chain(&answer.target).chain(&answer.mac) {
            sum += u32::from(*word);
        }
        assert_eq!(fold(sum), 0xffff);
    }

    #[test]
    fn probes_routed_and_short_ones_are_not_answered() {
        assert_eq!(solicitation(&[0; 16]).solicited(), None);
        let routed = NeighbourPacket {
            ip: Ipv6Header::new(&POD, &TARGET, ICMPV6, 254, 32),
            ..solicitation(&POD)
        };
        assert_eq!(routed.solicited(), None);
        let short = NeighbourPacket {
            ip: Ipv6Header::new(&POD, &TARGET, ICMPV6, 255, 24),
            ..solicitation(&POD)
        };
        assert_eq!(short.solicited(), None);
        let advertisement = NeighbourPacket {
            kind: u16::from_ne_bytes([136, 0]),
            ..solicitation(&POD)
        };
        assert_eq!(advertisement.solicited(), None);
    }
}
