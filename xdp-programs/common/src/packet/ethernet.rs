//! Ethernet II.

use super::{Header, words3};

/// Bytes of the header.
pub const LENGTH: usize = 14;
/// Raw ethertype of IPv4.
pub const IPV4: u16 = 0x0800_u16.to_be();
/// Raw ethertype of ARP.
pub const ARP: u16 = 0x0806_u16.to_be();
/// Raw ethertype of IPv6.
pub const IPV6: u16 = 0x86dd_u16.to_be();

/// Destination, source, ethertype: raw words.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EthernetHeader {
    pub destination: [u16; 3],
    pub source: [u16; 3],
    pub ethertype: u16,
}

// SAFETY: repr(C), seven u16.
unsafe impl Header for EthernetHeader {}

impl EthernetHeader {
    #[inline(always)]
    pub const fn new(destination: [u8; 6], source: [u8; 6], ethertype: u16) -> Self {
        Self {
            destination: words3(destination),
            source: words3(source),
            ethertype,
        }
    }
}

const _: () = assert!(size_of::<EthernetHeader>() == LENGTH);
