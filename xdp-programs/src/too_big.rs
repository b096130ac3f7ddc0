//! Packets that don't fit: the path's MTU, and the ICMP error that tells it to the pod (RFC 1191, RFC 8201).
//!
//! Invariant: nothing is fragmented. Outer packets carry don't-fragment. Pods are told of a packet that doesn't fit
//! even if it may be fragmented: their stack then fragments it.

use aya_ebpf::helpers::bpf_ktime_get_ns;
use thuban_common::{
    counters::Counter,
    packet::{
        Header, bytes6,
        ethernet::{self, EthernetHeader},
        geneve,
        icmp::{ErrorV4, ErrorV6, QUOTE},
        ip::IpPacket,
        ipv4, ipv6,
    },
    tables::{
        Address, AttachmentEntry, ConfigEntry, DropletAddress, GATEWAY_MAC, HOST_SOURCE, HOST_SOURCE_V6,
        LEAST_PATH_MTU, PATH_MTU_LIFE,
    },
};

use crate::{
    frame::{Frame, Outcome},
    inner::transport,
    maps::PATH_MTUS,
    path_mtu,
};

/// Bytes that a tunnel adds to an inner IP packet within the outer one.
const OVERHEAD: u32 = geneve::OUTER_IP_LENGTH as u32 + ethernet::LENGTH as u32;

/// Returns the MTU of the way to a droplet as the pod sees it, if the packet (each segment, of a GSO frame) is larger.
#[inline(always)]
pub fn exceeded<F: Frame>(
    frame: &F,
    config: &ConfigEntry,
    packet: &IpPacket,
    droplet: DropletAddress,
) -> Option<u32> {
    let size = match frame.segment_size() {
        0 => frame.length() - ethernet::LENGTH as u32,
        payload => payload + headers(frame, packet),
    };
    let outer = size + OVERHEAD;
    if outer <= LEAST_PATH_MTU {
        return None;
    }
    let mtu = path_mtu(droplet).map_or(config.mtu, |mtu| mtu.min(config.mtu));
    (outer > mtu).then_some(mtu - OVERHEAD)
}

/// Returns the bytes of each segment's IP and transport header.
#[inline(always)]
fn headers<F: Frame>(frame: &F, packet: &IpPacket) -> u32 {
    let mut further = 8;
    if packet.protocol == ipv4::TCP {
        let offset: Option<[u16; 1]> = transport(frame, packet, 12);
        further = offset.map_or(20, |word| u32::from(word[0].to_ne_bytes()[0] >> 4) * 4);
    }
    packet.header_length() + further
}

#[inline(always)]
fn path_mtu(droplet: DropletAddress) -> Option<u32> {
    if !path_mtu::is_any_learnt() {
        return None;
    }
    // SAFETY: words of a value that stays allocated (preallocated LRU).
    let entry = unsafe { PATH_MTUS.get(&droplet) }?;
    // SAFETY: helper without arguments.
    let now = unsafe { bpf_ktime_get_ns() };
    (now.wrapping_sub(entry.time) < PATH_MTU_LIFE).then_some(entry.mtu)
}

/// Turns the frame into an ICMP error to the pod.
#[inline(always)]
pub fn answer<F: Frame>(frame: &mut F, attachment: &AttachmentEntry, packet: &IpPacket, mtu: u32) -> Outcome {
    answer_to::<F, false>(frame, &Macs::to_pod(attachment), packet, mtu)
}

/// Turns the frame into an ICMP error to whoever on the underlay sent it, from the address that it was for.
#[inline(always)]
pub fn answer_outside<F: Frame>(frame: &mut F, packet: &IpPacket, mtu: u32) -> Outcome {
    let header: EthernetHeader = frame.load(0).ok_or(Counter::Truncated)?;
    let macs = Macs {
        to: bytes6(header.source),
        from: bytes6(header.destination),
    };
    answer_to::<F, true>(frame, &macs, packet, mtu)
}

/// Turns the frame into an ICMP error. No error answers a later fragment or another error (RFC 1122 section 3.2.2, RFC
/// 4443 section 2.4).
#[inline(never)]
fn answer_to<F: Frame, const OUTSIDE: bool>(
    frame: &mut F,
    macs: &Macs,
    packet: &IpPacket,
    mtu: u32,
) -> Outcome {
    if !F::IS_LAST {
        return Ok((F::PASS, None));
    }
    if packet.is_later_fragment() && !packet.is_v6() || is_icmp_error(frame, packet) {
        return Err(Counter::TooBig);
    }
    let mtu = mtu as u16;
    let is_written = if packet.is_v6() {
        let from = if OUTSIDE {
            &packet.destination
        } else {
            &HOST_SOURCE_V6
        };
        write::<F, _, QUOTE>(frame, macs, ethernet::IPV6, |sum| {
            ErrorV6::too_big(from, &packet.source, mtu, sum)
        })
    } else {
        let from = if OUTSIDE {
            v4(&packet.destination)
        } else {
            HOST_SOURCE
        };
        write::<F, _, QUOTE>(frame, macs, ethernet::IPV4, |sum| {
            ErrorV4::too_big(from, v4(&packet.source), mtu, sum)
        })
    };
    is_written.ok_or(Counter::TooBig)?;
    let verdict = frame.reply().ok_or(Counter::TooBig)?;
    Ok((verdict, Some(Counter::TooBigAnswered)))
}

#[inline(always)]
const fn v4(address: &Address) -> [u8; 4] {
    let [.., a, b, c, d] = *address;
    [a, b, c, d]
}

/// The addresses of an answer's Ethernet header.
pub struct Macs {
    pub to: [u8; 6],
    pub from: [u8; 6],
}

impl Macs {
    /// Returns those of an answer that the agent gives to its own pod.
    #[inline(always)]
    pub const fn to_pod(attachment: &AttachmentEntry) -> Self {
        Self {
            to: attachment.mac,
            from: GATEWAY_MAC,
        }
    }

    #[inline(always)]
    pub const fn header(&self, ethertype: u16) -> EthernetHeader {
        EthernetHeader::new(self.to, self.from, ethertype)
    }
}

/// Puts the header that `header` makes of the quote's sum before a quote of `N` bytes.
#[inline(always)]
pub fn write<F: Frame, H: Header, const N: usize>(
    frame: &mut F,
    macs: &Macs,
    ethertype: u16,
    header: impl FnOnce(u32) -> H,
) -> Option<()> {
    frame.quote((ethernet::LENGTH + N) as u32, size_of::<H>() as u32)?;
    let sum = frame.sum::<N>(ethernet::LENGTH + size_of::<H>())?;
    frame.store(ethernet::LENGTH, &header(sum))?;
    frame.store(0, &macs.header(ethertype))
}

#[inline(always)]
pub fn is_icmp_error<F: Frame>(frame: &F, packet: &IpPacket) -> bool {
    if !packet.shows_transport() {
        return false;
    }
    let kind = transport(frame, packet, 0).map_or(0, |first: [u16; 1]| first[0].to_ne_bytes()[0]);
    match packet.protocol {
        ipv4::ICMP => !matches!(kind, 0 | 8),
        ipv6::ICMPV6 => kind < 128,
        _ => false,
    }
}
