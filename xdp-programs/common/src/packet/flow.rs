//! The hash that keeps packets of one flow on one way: addresses, protocol and (unless fragmented) ports.

use super::ip::IpPacket;

/// Returns the hash of a packet's flow.
#[inline(always)]
pub const fn hash(packet: &IpPacket) -> u32 {
    hash_of(packet, true)
}

/// Returns the hash of a packet's flow, or without the source port the hash of a client and the service that it asks
/// for.
#[inline(always)]
pub const fn hash_of(packet: &IpPacket, with_source_port: bool) -> u32 {
    let mut hash = packet.protocol as u32;
    if packet.is_v6() {
        hash = half(half(hash, &packet.source, 0), &packet.source, 8);
        hash = half(half(hash, &packet.destination, 0), &packet.destination, 8);
    } else {
        hash = mix(hash, word(&packet.source, 12));
        hash = mix(hash, word(&packet.destination, 12));
    }
    let [from, to] = packet.ports;
    let from = if with_source_port { from } else { 0 };
    finish(mix(
        hash,
        (u16::from_be(from) as u32) << 16 | u16::from_be(to) as u32,
    ))
}

/// Mixes eight bytes of an address into the hash.
#[inline(always)]
const fn half(hash: u32, address: &[u8; 16], at: usize) -> u32 {
    mix(mix(hash, word(address, at)), word(address, at + 4))
}

#[inline(always)]
const fn word(address: &[u8; 16], at: usize) -> u32 {
    u32::from_be_bytes([address[at], address[at + 1], address[at + 2], address[at + 3]])
}

/// Does one round of Murmur3 (public domain, Austin Appleby).
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

/// Returns the hash after Murmur3's finalizer: every input bit reaches every output bit.
#[inline(always)]
pub const fn finish(mut hash: u32) -> u32 {
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ hash >> 16
}

/// Returns the UDP source port of the outer packet, host order, in the ephemeral range 49152-65535.
#[inline(always)]
pub const fn source_port(hash: u32) -> u16 {
    0xc000 | (hash & 0x3fff) as u16
}

#[cfg(test)]
mod tests {
    use super::{hash, source_port};
    use crate::packet::{ip::IpPacket, ipv4::Ipv4Header, ipv6::Ipv6Header};
    use std::collections::HashSet;

    fn v4(protocol: u8, fragment: u16) -> IpPacket {
        let mut header = Ipv4Header { words: [0; 10] };
        header.words[0] = u16::from_ne_bytes([0x45, 0]);
        header.words[1] = 40_u16.to_be();
        header.words[3] = fragment.to_be();
        header.words[4] = u16::from_ne_bytes([64, protocol]);
        IpPacket::from_v4(&header).unwrap()
    }

    #[test]
    fn no_fragment_shows_ports() {
        assert!(v4(6, 0).has_ports() && v4(17, 0x4000).has_ports());
        assert!(
            !v4(17, 0x2000).has_ports(),
            "the first fragment must go the way of the others"
        );
        assert!(!v4(17, 100).has_ports() && !v4(1, 0).has_ports());
    }

    #[test]
    fn ports_spread_over_the_range() {
        let v6 = IpPacket::from_v6(&Ipv6Header::new(&[0xfd; 16], &[0xfd; 16], 6, 64, 20)).unwrap();
        for packet in [v4(6, 0), v6] {
            let ports: HashSet<u16> = (0..4096_u16)
                .map(|port| {
                    let mut packet = packet;
                    packet.ports = [port.to_be(), 80_u16.to_be()];
                    source_port(hash(&packet))
                })
                .collect();
            assert!(
                ports.len() > 3000 && ports.iter().all(|port| *port >= 49152),
                "{}",
                ports.len()
            );
        }
    }

    #[test]
    fn every_byte_of_an_address_counts() {
        let mut seen = HashSet::new();
        for byte in 0..32 {
            let (mut from, mut to) = ([0xfd; 16], [0xfd; 16]);
            if byte < 16 {
                from[byte] = 1;
            } else {
                to[byte - 16] = 1;
            }
            let packet = IpPacket::from_v6(&Ipv6Header::new(&from, &to, 6, 64, 20)).unwrap();
            assert!(seen.insert(hash(&packet)), "byte {byte}");
        }
    }
}
