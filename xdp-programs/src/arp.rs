//! ARP at the agent: every address but the pod's own is at the gateway's MAC. Answers in place.

use thuban_common::{
    counters::Counter,
    packet::{
        arp::ArpPacket,
        ethernet::{self, EthernetHeader},
    },
    tables::{AttachmentEntry, GATEWAY_MAC},
};

use crate::frame::{Frame, Outcome};

#[inline(always)]
pub fn answer<F: Frame>(frame: &mut F, attachment: &AttachmentEntry) -> Outcome {
    if !F::IS_LAST {
        return Ok((F::PASS, None));
    }
    let [.., a, b, c, d] = attachment.address;
    let request: ArpPacket = frame.load(ethernet::LENGTH).ok_or(Counter::Truncated)?;
    let reply = request.answer(attachment.mac, [a, b, c, d])?;
    let header = EthernetHeader::new(attachment.mac, GATEWAY_MAC, ethernet::ARP);
    frame.store(0, &header).ok_or(Counter::Truncated)?;
    frame.store(ethernet::LENGTH, &reply).ok_or(Counter::Truncated)?;
    match frame.reply() {
        Some(verdict) => Ok((verdict, Some(Counter::ArpReplies))),
        None => Ok((F::PASS, None)),
    }
}
