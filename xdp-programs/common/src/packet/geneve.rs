//! Geneve (RFC 8926) inside UDP inside IPv4: the headers that we write, and those that we accept.

use super::{Header, ethernet::EthernetHeader, ipv4::Ipv4Header};
use crate::{
    counters::Counter,
    tables::{DropletAddress, ENCAPSULATION_LENGTH, GENEVE_PORT},
};

/// Bytes of the outer IPv4 packet before the inner frame, without options.
pub const OUTER_IP_LENGTH: usize = ENCAPSULATION_LENGTH - 14;
/// Raw protocol type of an inner Ethernet frame.
const ETHERNET_FRAMES: u16 = 0x6558_u16.to_be();

/// UDP (raw words: source, destination, length, checksum).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UdpHeader {
    pub source: u16,
    pub destination: u16,
    pub length: u16,
    pub checksum: u16,
}

/// Geneve base header: `first` has version, option length, flags; `vni` the VNI in its upper 24 bits (raw words).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeneveHeader {
    pub first: u16,
    pub protocol: u16,
    pub vni: [u16; 2],
}

/// Option header (RFC 8926 section 3.5): class, type, length, raw.
pub type OptionHeader = [u16; 2];

/// Everything before the inner frame but the outer Ethernet.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OuterHeaders {
    pub ip: Ipv4Header,
    pub udp: UdpHeader,
    pub geneve: GeneveHeader,
}

// SAFETY: repr(C), u16 only.
unsafe impl Header for UdpHeader {}
// SAFETY: repr(C), u16 only.
unsafe impl Header for GeneveHeader {}
// SAFETY: repr(C), u16 only.
unsafe impl Header for OuterHeaders {}

impl UdpHeader {
    /// Whether the packet is addressed to the port of Geneve.
    #[inline(always)]
    pub const fn is_geneve(&self) -> bool {
        self.destination == GENEVE_PORT.to_be()
    }
}

impl GeneveHeader {
    #[inline(always)]
    pub const fn vni(&self) -> u32 {
        (u16::from_be(self.vni[0]) as u32) << 8 | (u16::from_be(self.vni[1]) >> 8) as u32
    }

    /// Returns the bytes of options: 0 to 252.
    #[inline(always)]
    pub const fn options_length(&self) -> u32 {
        (self.first.to_ne_bytes()[0] & 0x3f) as u32 * 4
    }

    /// Checks the header: version 0, no control packet, Ethernet inside, no critical option announced.
    #[inline(always)]
    pub const fn check(&self) -> Result<(), Counter> {
        let [first, flags] = self.first.to_ne_bytes();
        if first >> 6 != 0 || flags & 0x80 != 0 || self.protocol != ETHERNET_FRAMES {
            return Err(Counter::BadHeader);
        }
        if flags & 0x40 != 0 {
            return Err(Counter::CriticalOption);
        }
        Ok(())
    }
}

/// Walks options that take `length` bytes; `load` gives the header at an offset into them. We know no critical option,
/// so any is an error.
#[inline(always)]
pub fn check_options(length: u32, mut load: impl FnMut(u32) -> Option<OptionHeader>) -> Result<(), Counter> {
    let mut offset = 0;
    // Each option takes at least 4 of at most 252 bytes.
    for _ in 0..63 {
        if offset >= length {
            break;
        }
        let header = load(offset).ok_or(Counter::Truncated)?;
        let [kind, words] = header[1].to_ne_bytes();
        if kind & 0x80 != 0 {
            return Err(Counter::CriticalOption);
        }
        offset += 4 + u32::from(words & 0x1f) * 4;
    }
    if offset == length {
        Ok(())
    } else {
        Err(Counter::BadHeader)
    }
}

impl OuterHeaders {
    /// Returns headers around an inner frame of `inner_length` bytes (Ethernet included). They have don't-fragment;
    /// DSCP and ECN are the inner ones (RFC 6040). A length over 65535 is a GSO frame's, whose lengths are rewritten
    /// when it is segmented.
    #[inline(always)]
    pub const fn new(
        source: DropletAddress,
        destination: DropletAddress,
        vni: u32,
        inner_length: u32,
        traffic_class: u8,
        source_port: u16,
    ) -> Self {
        let total = inner_length.wrapping_add(OUTER_IP_LENGTH as u32) as u16;
        let ip = Ipv4Header::new(source, destination, super::ipv4::UDP, traffic_class, total).whole();
        Self {
            ip,
            udp: UdpHeader {
                source: source_port.to_be(),
                destination: GENEVE_PORT.to_be(),
                length: total.wrapping_sub(20).to_be(),
                checksum: 0,
            },
            geneve: GeneveHeader {
                first: 0,
                protocol: ETHERNET_FRAMES,
                vni: [((vni >> 8) as u16).to_be(), ((vni as u16) << 8).to_be()],
            },
        }
    }
}

const _: () = {
    assert!(size_of::<UdpHeader>() == 8);
    assert!(size_of::<GeneveHeader>() == 8);
    assert!(size_of::<OuterHeaders>() == OUTER_IP_LENGTH);
    assert!(size_of::<EthernetHeader>() + size_of::<OuterHeaders>() == ENCAPSULATION_LENGTH);
};

#[cfg(test)]
mod tests {
    use super::{GeneveHeader, OuterHeaders, check_options};
    use crate::{counters::Counter, testing::Random};

    fn walk(options: &[u8]) -> Result<(), Counter> {
        check_options(options.len() as u32, |offset| {
            let bytes = options.get(offset as usize..offset as usize + 4)?;
            Some([
                u16::from_ne_bytes([bytes[0], bytes[1]]),
                u16::from_ne_bytes([bytes[2], bytes[3]]),
            ])
        })
    }

    #[test]
    fn what_is_written_is_accepted_and_says_the_same() {
        let mut random = Random::from_clock();
        for _ in 0..1000 {
            let vni = random.u32() & 0xff_ffff;
            let headers = OuterHeaders::new([10, 0, 0, 1], [10, 0, 0, 2], vni, 114, 0xbb, 50000);
            assert_eq!(headers.geneve.vni(), vni);
            assert_eq!(headers.geneve.check(), Ok(()));
            assert_eq!(headers.geneve.options_length(), 0);
            assert_eq!(headers.ip.total_length(), 150);
            assert_eq!(headers.ip.traffic_class(), 0xbb);
            assert_eq!(headers.ip.words[5], headers.ip.checksum());
            assert!(headers.ip.is_valid() && !headers.ip.is_fragment() && headers.udp.is_geneve());
        }
    }

    #[test]
    fn versions_flags_and_protocols_are_checked() {
        let good = OuterHeaders::new([0; 4], [0; 4], 1, 0, 0, 0).geneve;
        let first = |bytes: [u8; 2]| GeneveHeader {
            first: u16::from_ne_bytes(bytes),
            ..good
        };
        assert_eq!(first([0x40, 0]).check(), Err(Counter::BadHeader));
        assert_eq!(first([0, 0x80]).check(), Err(Counter::BadHeader));
        assert_eq!(first([0, 0x40]).check(), Err(Counter::CriticalOption));
        assert_eq!(
            GeneveHeader {
                protocol: 0x0800_u16.to_be(),
                ..good
            }
            .check(),
            Err(Counter::BadHeader)
        );
        assert_eq!(first([0x3f, 0]).options_length(), 252);
    }

    #[test]
    fn options_are_walked() {
        assert_eq!(walk(&[]), Ok(()));
        assert_eq!(walk(&[1, 2, 3, 0]), Ok(()));
        assert_eq!(walk(&[1, 2, 3, 1, 9, 9, 9, 9, 1, 2, 3, 0]), Ok(()));
        assert_eq!(walk(&[1, 2, 0x83, 0]), Err(Counter::CriticalOption));
        assert_eq!(walk(&[1, 2, 3, 1]), Err(Counter::BadHeader));
        assert_eq!(walk(&[0; 252]), Ok(()));
        assert_eq!(
            check_options(8, |offset| (offset == 0).then_some([0, 0])),
            Err(Counter::Truncated)
        );
    }

    #[test]
    fn random_options_never_panic() {
        let mut random = Random::from_clock();
        for _ in 0..20_000 {
            let mut bytes = [0_u8; 252];
            for byte in &mut bytes {
                *byte = random.u32() as u8;
            }
            let _ = walk(&bytes[..random.below(64) * 4]);
        }
    }
}
