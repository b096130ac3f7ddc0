//! What a frame leaves to the NIC: a checksum that is still to be written, where the kernel's `sk_buff` says it.
//!
//! A pod with a packet socket chooses that place (`PACKET_VNET_HDR`), and the kernel or the NIC writes two bytes there
//! after all programs have looked at the frame. So the place must be one that nothing was judged by.

use crate::packet::{
    ethernet, icmp,
    ip::IpPacket,
    ipv4::{self, SCTP, TCP, UDP},
    ipv6,
};

/// Where fields of `struct sk_buff` are. The kernel's BTF says it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SkbLayout {
    /// Where the part begins that has these fields, in bytes from the structure's begin. The part has [`SPAN`] bytes,
    /// so that one read is enough.
    pub part: u32,
    /// The byte with `ip_summed`, from the part's begin like all that follow.
    pub ip_summed: u32,
    /// The first bit of `ip_summed` in its byte; it has two.
    pub ip_summed_bit: u32,
    /// `csum_start`, 16 bits: where the sum begins. `csum_offset`, as long, is behind it: the place from there.
    pub csum_start: u32,
    /// `mac_header`, 16 bits: where the frame begins. It counts from the same byte as `csum_start`.
    pub mac_header: u32,
}

impl SkbLayout {
    /// Nobody has set the layout, so that no place of a checksum is known: agents let no frame pass.
    pub const UNKNOWN: Self = Self {
        part: 0,
        ip_summed: 0,
        ip_summed_bit: 0,
        csum_start: 0,
        mac_header: 0,
    };
}

/// The bytes that are read of `struct sk_buff`.
pub const SPAN: usize = 80;
/// `ip_summed`: the checksum is still to be written (CHECKSUM_PARTIAL of linux/skbuff.h).
pub const CHECKSUM_PARTIAL: u8 = 3;

/// Whether a checksum of the packet may be written at this place of its frame: it is the packet's own, or behind the
/// headers. Packets that hide where their transport header begins have none to be written.
#[inline(always)]
pub const fn may_be_written(packet: &IpPacket, place: u32) -> bool {
    if packet.has_options() || packet.is_fragment() {
        return false;
    }
    let header = if packet.is_v6() {
        ipv6::LENGTH
    } else {
        ipv4::LENGTH
    };
    let Some(at) = place.checked_sub((ethernet::LENGTH + header) as u32) else {
        return false;
    };
    match packet.protocol {
        TCP => at == 16,
        // A tunnel of the pod's own has a checksum of the packet within.
        UDP => at == 6 || at >= 8,
        SCTP => at == 8,
        // Its checksum is written by who sends it. What it quotes is judged.
        protocol => protocol != icmp::protocol(false) && protocol != icmp::protocol(true),
    }
}

#[cfg(feature = "user")]
// SAFETY: repr(C) of five integers of one size.
#[allow(unsafe_code)]
unsafe impl aya::Pod for SkbLayout {}

#[cfg(test)]
mod tests {
    use super::may_be_written;
    use crate::packet::ip::IpPacket;

    /// Returns the places, behind the IP header, that a packet's checksum may have, of the first 30.
    fn places(packet: &IpPacket, header: u32) -> Vec<u32> {
        let all = 0..14 + header + 30;
        let places = all.filter(|place| may_be_written(packet, *place));
        places.map(|place| place - 14 - header).collect()
    }

    #[test]
    fn a_checksum_is_written_into_its_field_or_behind_headers() {
        let behind = |from: u32| from..30;
        for (protocol, expected) in [
            (6, vec![16]),
            (17, std::iter::once(6).chain(behind(8)).collect()),
            (132, vec![8]),
            (1, vec![]),
            (58, vec![]),
            (47, behind(0).collect()),
        ] {
            let mut packet = IpPacket::default();
            packet.protocol = protocol;
            assert_eq!(places(&packet, 20), expected, "{protocol}");
        }
    }
}
