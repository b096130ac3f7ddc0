//! The pure part of choosing a backend, and of choosing the port that a client gets towards it.

use super::ServiceEntry;
use crate::packet::{flow, ip::IpPacket};

/// Returns the slot of a packet to a service. The slot depends on the flow, or on the client if clients keep their
/// backends. `keeps`: whether this one does; not if its time with a backend is over, and it is to get any of them.
/// Every droplet chooses the same.
#[inline(always)]
pub const fn slot(packet: &IpPacket, entry: &ServiceEntry, keeps: bool) -> u32 {
    let hash = flow::hash_of(packet, entry.affinity == 0 || !keeps);
    // The hash is mixed once more, because the flow's hash also picks bouncers.
    ((flow::finish(hash ^ 0x5e72_71ce) as u64 * entry.slots as u64) >> 32) as u32
}

/// The first of the ports that clients get towards a backend in place of their own. Linux's sockets get lower ports
/// (32768 to 60999), unless they ask for others or a node is configured otherwise.
const OTHER_PORTS: u16 = 61_000;

/// Returns a port, network order, for a packet to a service whose backend sees another connection by the client's own
/// port.
#[inline(always)]
pub const fn other_port(packet: &IpPacket, attempt: u32) -> u16 {
    let hash = flow::finish(flow::hash(packet) ^ attempt.wrapping_mul(0x9e37_79b9));
    let count = (u16::MAX - OTHER_PORTS) as u64 + 1;
    (OTHER_PORTS + ((hash as u64 * count) >> 32) as u16).to_be()
}

#[cfg(test)]
mod tests {
    use super::{ServiceEntry, other_port, slot};
    use crate::{
        packet::{ip::IpPacket, ipv6::Ipv6Header},
        testing::Random,
    };

    #[test]
    fn other_ports_are_those_that_sockets_do_not_get() {
        let mut random = Random::from_clock();
        for _ in 0..10_000 {
            let header = Ipv6Header::new(&[0xfd; 16], &[0xfc; 16], 6, 64, 20);
            let mut packet = IpPacket::from_v6(&header).unwrap();
            packet.ports = [random.u32() as u16, random.u32() as u16];
            let ports: [u16; 3] = core::array::from_fn(|n| u16::from_be(other_port(&packet, n as u32 + 1)));
            assert!(ports.iter().all(|port| *port >= 61_000), "{ports:?}");
            assert!(ports[0] != ports[1] || ports[1] != ports[2], "{ports:?}");
        }
    }

    #[test]
    fn slots_are_within_the_table_spread_and_follow_affinity() {
        let mut random = Random::from_clock();
        let entry = |slots, affinity| ServiceEntry {
            service: 1,
            table: 1,
            slots,
            affinity,
            used: 0,
            flags: 0,
        };
        let mut hits = [0_u32; 251];
        for _ in 0..25_100 {
            let header = Ipv6Header::new(&[0xfd; 16], &[0xfc; 16], 6, 64, 20);
            let mut packet = IpPacket::from_v6(&header).unwrap();
            packet.ports = [random.u32() as u16, 80];
            hits[slot(&packet, &entry(251, 0), true) as usize] += 1;
            let kept = slot(&packet, &entry(251, 60), true);
            packet.ports[0] ^= 1;
            assert_eq!(
                kept,
                slot(&packet, &entry(251, 60), true),
                "a client's port decides nothing"
            );
        }
        assert!(hits.iter().all(|hits| (40..200).contains(hits)), "{hits:?}");
    }
}
