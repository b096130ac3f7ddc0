//! Probes between droplets: a control frame of Geneve (RFC 8926 section 3.4, the O bit) without an inner frame. By it
//! one droplet's transit asks another droplet's transit whether it passes packets on.
//!
//! transitd sends a [`WANTED`] to its own transit, in the name of the droplet that is to be asked. Transit turns it
//! into a [`QUESTION`], and a question into an [`ANSWER`]. Nothing turns an answer, and each turn lowers the TTL.

use super::{
    Header,
    ethernet::{self, EthernetHeader},
    geneve::{GeneveHeader, OuterHeaders},
};
use crate::tables::{DropletAddress, ENCAPSULATION_LENGTH};

/// Raw protocol type: IEEE 802's first ethertype for local experiments.
const PROTOCOL: u16 = 0x88b5_u16.to_be();
/// Raw first word: version 0, no options, the O bit.
const CONTROL: u16 = u16::from_ne_bytes([0, 0x80]);
/// Traffic class CS6, network control: a full queue on the way must not look like a dead droplet.
const TRAFFIC_CLASS: u8 = 0xc0;

/// [`ProbeHeader::kind`]: to this droplet's own transit, which sends the question.
pub const WANTED: u16 = 1_u16.to_be();
/// [`ProbeHeader::kind`]: to be answered.
pub const QUESTION: u16 = 2_u16.to_be();
/// [`ProbeHeader::kind`]: never answered.
pub const ANSWER: u16 = 3_u16.to_be();

/// The header behind the Geneve header (raw words).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeHeader {
    pub kind: u16,
    pub padding: u16,
    /// The [`crate::tables::ProbeEntry::secret`] as it lies in memory. It shows which question an answer is to.
    pub secret: [u16; 4],
}

/// A whole frame.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeFrame {
    pub ethernet: EthernetHeader,
    pub outer: OuterHeaders,
    pub probe: ProbeHeader,
}

// SAFETY: repr(C), u16 only.
unsafe impl Header for ProbeHeader {}

impl ProbeHeader {
    #[inline(always)]
    pub const fn new(kind: u16, secret: u64) -> Self {
        let bytes = secret.to_ne_bytes();
        Self {
            kind,
            padding: 0,
            secret: [
                u16::from_ne_bytes([bytes[0], bytes[1]]),
                u16::from_ne_bytes([bytes[2], bytes[3]]),
                u16::from_ne_bytes([bytes[4], bytes[5]]),
                u16::from_ne_bytes([bytes[6], bytes[7]]),
            ],
        }
    }
}

impl GeneveHeader {
    /// Whether this is the header of a probe. [`GeneveHeader::check`] refuses it.
    #[inline(always)]
    pub const fn is_probe(&self) -> bool {
        self.first == CONTROL && self.protocol == PROTOCOL && self.vni[0] == 0 && self.vni[1] == 0
    }
}

impl ProbeFrame {
    /// Returns a frame that looks as if it had come from the droplet `to` that is to be asked.
    pub const fn wanted(here: DropletAddress, to: DropletAddress, secret: u64, source_port: u16) -> Self {
        let mut outer = OuterHeaders::new(
            to,
            here,
            0,
            size_of::<ProbeHeader>() as u32,
            TRAFFIC_CLASS,
            source_port,
        );
        outer.geneve.first = CONTROL;
        outer.geneve.protocol = PROTOCOL;
        Self {
            ethernet: EthernetHeader::new([0; 6], [0; 6], ethernet::IPV4),
            outer,
            probe: ProbeHeader::new(WANTED, secret),
        }
    }

    pub const fn bytes(&self) -> &[u8; size_of::<Self>()] {
        // SAFETY: repr(C) of u16 words without padding (asserted below); bytes need no alignment.
        unsafe { &*(&raw const *self).cast() }
    }
}

const _: () = {
    assert!(size_of::<ProbeHeader>() == 12);
    assert!(size_of::<ProbeFrame>() == ENCAPSULATION_LENGTH + 12);
    // Nothing is to be padded on the wire.
    assert!(size_of::<ProbeFrame>() >= 60);
};

#[cfg(test)]
mod tests {
    use super::{ANSWER, ProbeFrame, QUESTION, WANTED};
    use crate::counters::Counter;
    use crate::packet::geneve::OuterHeaders;

    #[test]
    fn a_probe_is_a_valid_packet_that_is_no_frame_of_a_vpc() {
        let frame = ProbeFrame::wanted([10, 0, 0, 1], [10, 0, 0, 2], 7, 50_000);
        assert!(frame.outer.ip.is_valid() && frame.outer.udp.is_geneve());
        assert_eq!(frame.outer.ip.words[5], frame.outer.ip.checksum());
        assert_eq!(frame.outer.ip.total_length(), 48);
        assert!(frame.outer.geneve.is_probe());
        assert_eq!(frame.outer.geneve.check(), Err(Counter::BadHeader));
        let bytes = frame.bytes();
        assert_eq!(bytes.len(), 62);
        assert_eq!(bytes[42..52], [0, 0x80, 0x88, 0xb5, 0, 0, 0, 0, 0, 1]);
        assert_eq!(bytes[54..], 7_u64.to_ne_bytes());
        assert_eq!([WANTED, QUESTION, ANSWER].map(u16::from_be), [1, 2, 3]);
    }

    #[test]
    fn no_other_geneve_header_is_taken_for_a_probe() {
        let frame = ProbeFrame::wanted([10, 0, 0, 1], [10, 0, 0, 2], 7, 50_000);
        for bit in 0..64 {
            let mut geneve = frame.outer.geneve;
            let mut words = [geneve.first, geneve.protocol, geneve.vni[0], geneve.vni[1]];
            words[bit / 16] ^= 1 << (bit % 16);
            [geneve.first, geneve.protocol, geneve.vni[0], geneve.vni[1]] = words;
            assert!(!geneve.is_probe(), "bit {bit}");
        }
        let plain = OuterHeaders::new([0; 4], [0; 4], 0, 100, 0, 0).geneve;
        assert!(!plain.is_probe());
    }
}
