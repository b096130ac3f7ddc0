//! The hash that keeps packets of one flow on one way: addresses, protocol and (unless fragmented) ports.

use super::ipv4::{Ipv4Header, SCTP, TCP, UDP};

/// Whether the 4 bytes behind the header are ports that all packets of the flow carry.
#[inline(always)]
pub const fn has_ports(header: &Ipv4Header) -> bool {
    !header.is_fragment() && !header.has_options() && matches!(header.protocol(), TCP | UDP | SCTP)
}

/// Hash of a flow; `ports` raw, zero where [`has_ports`] says no.
#[inline(always)]
pub const fn hash(header: &Ipv4Header, ports: [u16; 2]) -> u32 {
    let mut hash = mix(header.protocol() as u32, pair(header.words[6], header.words[7]));
    hash = mix(hash, pair(header.words[8], header.words[9]));
    finish(mix(hash, pair(ports[0], ports[1])))
}

#[inline(always)]
const fn pair(high: u16, low: u16) -> u32 {
    (u16::from_be(high) as u32) << 16 | u16::from_be(low) as u32
}

/// One round of Murmur3 (public domain, Austin Appleby).
#[inline(always)]
const fn mix(hash: u32, word: u32) -> u32 {
    let word = word
        .wrapping_mul(0xcc9e_2d51)
        .rotate_left(15)
        .wrapping_mul(0x1b87_3593);
    (hash ^ word)
        .rotate_left(13)
        .wrapping_mul(5)
        .wrapping_add(0xe654_6b64)
}

/// Murmur3's finalizer: every input bit reaches every output bit.
#[inline(always)]
pub const fn finish(mut hash: u32) -> u32 {
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

/// UDP source port of the outer packet, host order, in the ephemeral range 49152-65535.
#[inline(always)]
pub const fn source_port(hash: u32) -> u16 {
    0xc000 | (hash & 0x3fff) as u16
}

#[cfg(test)]
mod tests {
    use super::{has_ports, hash, source_port};
    use crate::packet::ipv4::Ipv4Header;
    use std::collections::HashSet;

    fn header(protocol: u8, fragment: u16) -> Ipv4Header {
        let mut header = Ipv4Header { words: [0; 10] };
        header.words[0] = u16::from_ne_bytes([0x45, 0]);
        header.words[3] = fragment.to_be();
        header.words[4] = u16::from_ne_bytes([64, protocol]);
        header
    }

    #[test]
    fn no_fragment_shows_ports() {
        assert!(has_ports(&header(6, 0)) && has_ports(&header(17, 0x4000)));
        assert!(
            !has_ports(&header(17, 0x2000)),
            "the first fragment must go the way of the others"
        );
        assert!(!has_ports(&header(17, 100)) && !has_ports(&header(1, 0)));
    }

    #[test]
    fn ports_spread_over_the_range() {
        let ports: HashSet<u16> = (0..4096)
            .map(|port: u16| source_port(hash(&header(6, 0), [port.to_be(), 80_u16.to_be()])))
            .collect();
        assert!(
            ports.len() > 3000 && ports.iter().all(|port| *port >= 49152),
            "{}",
            ports.len()
        );
    }
}
