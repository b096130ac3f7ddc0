//! Neighbour discovery at the agent: as with ARP, every address but the pod's own is at the gateway's MAC. Answers in
//! place.

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        ipv6::{is_link_local, is_mapped},
        nd::{NEIGHBOUR_SOLICITATION, NeighbourPacket, refusal},
    },
    tables::{AttachmentEntry, GATEWAY_MAC},
};

use crate::{
    agent::is_own,
    frame::{Frame, Outcome},
    trace::Observed,
};

/// Answers an ICMPv6 packet of discovery, of the given type.
#[inline(never)]
pub fn answer<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    observed: &Observed,
    kind: u8,
) -> Outcome {
    if kind != NEIGHBOUR_SOLICITATION {
        return Err(refusal(kind));
    }
    if !F::IS_LAST {
        return Ok((F::PASS, None));
    }
    frame.make_linear((ethernet::LENGTH + size_of::<NeighbourPacket>()) as u32);
    let request: NeighbourPacket = frame.load(ethernet::LENGTH).ok_or(Counter::Ipv6Discovery)?;
    let target = request.solicited().ok_or(Counter::Ipv6Discovery)?;
    let source = observed.packet.source;
    if !is_link_local(&source) && !is_own(frame, attachment, &source) {
        return Err(Counter::SpoofedSource);
    }
    // Nobody has such an address, and a mapped one would find an IPv4 endpoint's row.
    let is_nobodys = target[0] == 0xff || is_mapped(&target);
    if is_nobodys || is_own(frame, attachment, &target) {
        return Err(Counter::Ipv6Discovery);
    }
    let header = EthernetHeader::new(attachment.mac, GATEWAY_MAC, ethernet::IPV6);
    frame.store(0, &header).ok_or(Counter::Truncated)?;
    frame
        .store(ethernet::LENGTH, &request.answer(&target))
        .ok_or(Counter::Truncated)?;
    match frame.reply() {
        Some(verdict) => Ok((verdict, Some(Counter::NeighbourReplies))),
        None => Ok((F::PASS, None)),
    }
}
