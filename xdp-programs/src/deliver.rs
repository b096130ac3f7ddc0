//! Delivery to an endpoint of this droplet. The delivering side writes the MACs: the pod's, from the gateway's.

use thuban_common::{
    counters::Counter,
    packet::{
        ecn,
        ethernet::{self, EthernetHeader},
        ip::IpPacket,
        ipv4::Ipv4Header,
        ipv6::Ipv6Header,
    },
    tables::{ATTACHMENT_HOST, ATTACHMENT_SHAPED, GATEWAY_MAC, LocalEntry, TransitMetadata},
};

use crate::{
    frame::{Frame, Outcome, tc::TcFrame},
    maps, service,
    trace::Observed,
};

/// Bytes of Ethernet, IPv6 and the part that is read of the transport header.
const HEADERS: u32 = 14 + 40 + 20;

/// Delivers a plain frame of another endpoint of this droplet.
#[inline(always)]
pub fn from_agent<F: Frame>(frame: &mut F, local: &LocalEntry, ethertype: u16) -> Outcome {
    let header = EthernetHeader::new(local.mac, GATEWAY_MAC, ethertype);
    frame.store(0, &header).ok_or(Counter::Truncated)?;
    Ok((frame.deliver(local), Some(Counter::DeliveredLocal)))
}

/// Delivers an encapsulated frame: removes `length` bytes of outer headers, and copies their congestion mark inside.
#[inline(always)]
pub fn from_wire<F: Frame>(
    frame: &mut F,
    length: u32,
    outer_class: u8,
    vni: u32,
    local: &LocalEntry,
    packet: &IpPacket,
) -> Outcome {
    if !unwrap(frame, length, outer_class, vni, local, packet)? {
        return Ok((F::PASS, None));
    }
    if F::IS_LAST {
        service::restore(frame, local.ifindex, vni, packet)?;
        Ok((frame.deliver(local), Some(Counter::Delivered)))
    } else {
        Ok((F::PASS, Some(Counter::DecapsulatedXdp)))
    }
}

/// Removes the outer headers and writes the inner MACs. Returns false when this hook can't, and has left the frame
/// unchanged.
#[inline(always)]
pub fn unwrap<F: Frame>(
    frame: &mut F,
    length: u32,
    outer_class: u8,
    vni: u32,
    local: &LocalEntry,
    packet: &IpPacket,
) -> Result<bool, Counter> {
    let class = ecn::decapsulate(outer_class, packet.traffic_class).ok_or(Counter::CongestionUnknown)?;
    if !frame.decapsulate(length, packet.is_v6(), vni, local)? {
        return Ok(false);
    }
    let ethertype = if packet.is_v6() {
        ethernet::IPV6
    } else {
        ethernet::IPV4
    };
    let header = EthernetHeader::new(local.mac, GATEWAY_MAC, ethertype);
    frame.store(0, &header).ok_or(Counter::Truncated)?;
    if class != packet.traffic_class {
        mark(frame, packet, class).ok_or(Counter::Truncated)?;
    }
    Ok(true)
}

#[inline(always)]
fn mark<F: Frame>(frame: &mut F, packet: &IpPacket, class: u8) -> Option<()> {
    if packet.is_v6() {
        let header: Ipv6Header = frame.load(ethernet::LENGTH)?;
        frame.store(ethernet::LENGTH, &header.with_traffic_class(class))
    } else {
        let header: Ipv4Header = frame.load(ethernet::LENGTH)?;
        frame.store(ethernet::LENGTH, &header.with_traffic_class(class))
    }
}

/// Delivers a frame that XDP transit checked and decapsulated. The target is looked up again: it may have gone
/// meanwhile.
#[inline(always)]
pub fn decapsulated(frame: &mut TcFrame, metadata: TransitMetadata, observed: &mut Observed) -> Outcome {
    let flags = maps::attachment_flags(metadata.ifindex, metadata.vni).ok_or(Counter::NoAttachment)?;
    observed.vni = metadata.vni;
    frame.distrust_checksum();
    if service::is_used(metadata.ifindex) || observed.is_traced() || observed.tells(false) {
        frame.make_linear(HEADERS);
        observed.read(frame);
        service::restore(frame, metadata.ifindex, metadata.vni, &observed.packet)?;
    }
    let verdict = if flags & (ATTACHMENT_HOST | ATTACHMENT_SHAPED) == 0 {
        frame.to_peer(metadata.ifindex)
    } else {
        frame.out_by(metadata.ifindex)
    };
    Ok((verdict, Some(Counter::Delivered)))
}
