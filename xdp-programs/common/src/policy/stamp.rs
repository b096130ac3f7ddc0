//! The stamp: what a packet between droplets says of its sender.

use super::UNKNOWN_CLASS;
use crate::{packet::ethernet::EthernetHeader, tables::DropletAddress};

/// What a packet between droplets says of its sender. It is in the inner Ethernet header, whose addresses nobody
/// needs: the receiver writes the pod's own.
///
/// | bytes | inner destination | inner source |
/// |---|---|---|
/// | 0, low half | 6: a stamp | 2, and flags: 4 [`STAMP_REPLY`], 8 [`STAMP_GUARDED`] |
/// | 0, high half | reserved | flags: 1 [`STAMP_FRONT`]; else reserved |
/// | 1 to 3 | egress set, network order; 0: none | class, network order; 0: unknown |
/// | 4, 5 | reserved | reserved |
///
/// With [`STAMP_FRONT`] class and egress set say other things, see [`Stamp::of_front`].
///
/// The reserved 39 bits are sent as 0 and not read. Both addresses are unicast and locally administered. All packets of
/// a flow have one stamp, or the kernel would not aggregate them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    pub class: u32,
    pub egress_set: u32,
    pub flags: u16,
}

/// [`Stamp::flags`]: the sender's droplet knows the packet as an answer.
pub const STAMP_REPLY: u16 = 4;
/// [`Stamp::flags`]: the sender has an ingress set, so it takes answers only if the other side vouches for them.
pub const STAMP_GUARDED: u16 = 8;

/// [`Stamp::flags`]: a client outside sent the packet to a front. It has the front's address, and the droplet that gets
/// it chooses the backend.
pub const STAMP_FRONT: u16 = 0x10;

/// [`Stamp::why`]: the front's table says so.
pub const BY_TABLE: u32 = 0;
/// [`Stamp::why`]: a droplet that does not know the connection says so, by the table before the last change.
pub const BY_FORMER: u32 = 1;
/// [`Stamp::why`]: a droplet says so that another one asked in vain. The packet goes no further.
pub const AT_LAST: u32 = 2;
/// [`Stamp::why`]: the packet is a backend's answer, which the front is to send to the client.
pub const ANSWER: u32 = 3;

const STAMPED: u16 = 6;
const OF_SENDER: u16 = 2;
const HALF: u16 = 0xf;

impl Stamp {
    /// Returns the stamp of a packet by a front. `why` is in the low 16 bits of the class. `front` is the droplet that
    /// wants the answers, zeros if nobody wants them: its first byte is the high byte of the class, the others are the
    /// egress set. So the answers find that droplet, however many droplets pass the packet on.
    #[inline(always)]
    pub const fn of_front(why: u32, front: DropletAddress) -> Self {
        let [first, a, b, c] = front;
        Self {
            class: (first as u32) << 16 | why,
            egress_set: u32::from_be_bytes([0, a, b, c]),
            flags: STAMP_FRONT,
        }
    }

    /// Returns why a droplet gets a packet of a front: [`BY_TABLE`] and the constants behind it.
    #[inline(always)]
    pub const fn why(self) -> u32 {
        self.class & 0xffff
    }

    /// Returns the same stamp of a front's packet with another reason.
    #[inline(always)]
    #[must_use]
    pub const fn with_why(self, why: u32) -> Self {
        Self {
            class: self.class & !0xffff | why,
            ..self
        }
    }

    /// Returns the droplet that wants the answers to a front's packet, see [`Self::of_front`].
    #[inline(always)]
    pub const fn front(self) -> DropletAddress {
        let [_, a, b, c] = self.egress_set.to_be_bytes();
        [(self.class >> 16) as u8, a, b, c]
    }

    /// Returns the inner Ethernet header that bears the stamp.
    #[inline(always)]
    pub const fn header(self, ethertype: u16) -> EthernetHeader {
        EthernetHeader {
            destination: words(STAMPED, self.egress_set),
            source: words(OF_SENDER | self.flags, self.class),
            ethertype,
        }
    }

    /// Reads the stamp of an inner Ethernet header. A header without one says nothing of its sender.
    #[inline(always)]
    pub const fn read(header: &EthernetHeader) -> Self {
        let first = u16::from_be(header.destination[0]) >> 8;
        if first & HALF != STAMPED {
            return Self {
                class: UNKNOWN_CLASS,
                egress_set: 0,
                flags: 0,
            };
        }
        let flags = u16::from_be(header.source[0]) >> 8;
        Self {
            class: id(&header.source),
            egress_set: id(&header.destination),
            flags: flags & (STAMP_REPLY | STAMP_GUARDED | STAMP_FRONT),
        }
    }
}

#[inline(always)]
const fn words(first: u16, id: u32) -> [u16; 3] {
    [
        (first << 8 | (id >> 16) as u16 & 0xff).to_be(),
        (id as u16).to_be(),
        0,
    ]
}

#[inline(always)]
const fn id(words: &[u16; 3]) -> u32 {
    ((u16::from_be(words[0]) & 0xff) as u32) << 16 | u16::from_be(words[1]) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{packet::ethernet, policy::MAX_ID, tables::GATEWAY_MAC, testing::Random};

    fn bytes(words: [u16; 3]) -> [u8; 6] {
        words.map(u16::to_ne_bytes).concat().try_into().unwrap()
    }

    #[test]
    fn a_stamp_has_these_bytes() {
        let stamp = Stamp {
            class: 0x0a_0b0c,
            egress_set: 0x01_0203,
            flags: STAMP_GUARDED,
        };
        let header = stamp.header(ethernet::IPV6);
        assert_eq!(bytes(header.destination), [0x06, 1, 2, 3, 0, 0]);
        assert_eq!(bytes(header.source), [0x0a, 0x0a, 0x0b, 0x0c, 0, 0]);
        assert_eq!(header.ethertype, ethernet::IPV6);
        assert_eq!(Stamp::read(&header), stamp);
    }

    #[test]
    fn stamps_are_read_back_whatever_the_reserved_bits_say() {
        let mut random = Random::from_clock();
        for _ in 0..100_000 {
            let stamp = Stamp {
                class: random.u32() & MAX_ID,
                egress_set: random.u32() & MAX_ID,
                flags: (random.u32() as u16) & (STAMP_REPLY | STAMP_GUARDED | STAMP_FRONT),
            };
            let mut header = stamp.header(ethernet::IPV4);
            for address in [&mut header.destination, &mut header.source] {
                let first = bytes(*address)[0];
                assert_eq!(first & 3, 2, "unicast, locally administered");
                address[0] |= (0xe000_u16 & random.u32() as u16).to_be();
                address[2] = random.u32() as u16;
            }
            assert_eq!(Stamp::read(&header), stamp, "seed {}", random.seed());
        }
    }

    #[test]
    fn a_fronts_stamp_names_the_droplet_that_wants_the_answers() {
        let mut random = Random::from_clock();
        for _ in 0..10_000 {
            let front = random.u32().to_ne_bytes();
            let stamp = Stamp::of_front(BY_TABLE, front).with_why(AT_LAST);
            let read = Stamp::read(&stamp.header(ethernet::IPV6));
            assert_eq!(read, stamp, "seed {}", random.seed());
            let said = (read.why(), read.front(), read.flags);
            assert_eq!(said, (AT_LAST, front, STAMP_FRONT), "seed {}", random.seed());
        }
        let plain = Stamp::of_front(BY_FORMER, [0; 4]);
        assert_eq!(
            (plain.class, plain.egress_set),
            (BY_FORMER, 0),
            "as without any droplet"
        );
    }

    #[test]
    fn the_addresses_of_a_pod_are_no_stamp() {
        for destination in [
            GATEWAY_MAC,
            [0xff; 6],
            [0; 6],
            [2, 0, 10, 0, 1, 5],
            [0x04, 0, 0, 0, 0, 1],
        ] {
            let header = EthernetHeader::new(destination, [0x0e, 0, 10, 0, 1, 5], ethernet::IPV4);
            assert_eq!(Stamp::read(&header), Stamp::default(), "{destination:x?}");
        }
    }
}
