//! Sends a pod's packets to the host's stack: replies to the host itself or to the client for which it asked, and
//! packets out of the VPC if it has a way out.

use thuban_common::{
    counters::Counter,
    host_stack::{DENIED, MARK_DENIED, MARK_EGRESS, MARK_EGRESS_HOST, MARK_FORBIDDEN, REJECTED, mark_of},
    packet::{bytes4, ethernet, geneve::UdpHeader, ip::IpPacket, ipv4, ipv6},
    source::{Transport, is_reply},
    tables::{
        ATTACHMENT_HOST, ATTACHMENT_REJECTS, AttachmentEntry, SUBNET_PRIVATE, VPC_EGRESS, VPC_HOST_ACCESS,
    },
};

use crate::{
    frame::{Frame, Outcome, tc::TcFrame},
    inner::transport,
    maps,
    policy::{self, Out},
};

/// Bytes of a TCP header without options.
const LEAST_TCP: u32 = 20;
/// Bytes of an ICMP header before the quote.
const ICMP: usize = 8;

/// Passes packets to the host's own address towards pods: answers to kubelet's probes. What else an endpoint with an
/// egress set sends there, the stack passes if it is an answer: the address is no node's, and no rule can name it.
#[inline(always)]
pub fn reply<F: Frame>(frame: &mut F, attachment: &AttachmentEntry, packet: &IpPacket) -> Outcome {
    let has_access = flags(attachment) & VPC_HOST_ACCESS != 0;
    if has_access && (attachment.egress_set == 0 || !F::IS_LAST) {
        return pass(frame, packet);
    }
    let is_answer = is_answer(frame, packet);
    if !has_access && !is_answer? {
        return Err(Counter::HostForbidden);
    }
    let outcome = pass(frame, packet)?;
    if is_answer != Ok(true) {
        mark(frame, MARK_DENIED | rejected(attachment));
    }
    Ok(outcome)
}

/// Marks a packet of the frame's interface, at tc.
#[inline(always)]
fn mark<F: Frame>(frame: &mut F, kind: u32) {
    let mark = mark_of(frame.interface(), kind);
    if let Some(frame) = frame.tc() {
        frame.mark(mark);
    }
}

/// The bit of the mark by which an endpoint hears what is denied.
#[inline(always)]
const fn rejected(attachment: &AttachmentEntry) -> u32 {
    if attachment.flags & ATTACHMENT_REJECTS != 0 {
        REJECTED
    } else {
        0
    }
}

/// Passes packets to the host's other address towards pods, which nobody has: conntrack knows which of them answer the
/// host, and translates those alone. Fragments are whole before it looks.
#[inline(always)]
pub fn reply_tracked<F: Frame>(frame: &F, packet: &IpPacket) -> Outcome {
    let is_judged = match packet.protocol {
        ipv4::UDP | ipv4::SCTP => true,
        ipv4::TCP => false,
        // IPv6 hides the protocol of fragments. conntrack would take an error for that of whoever sent what it quotes.
        _ => packet.is_v6() && packet.is_fragment() || is_answer(frame, packet)? && quotes_own(frame, packet),
    };
    if !is_judged {
        return Err(Counter::HostForbidden);
    }
    pass(frame, packet)
}

/// Whether a packet quotes one that was sent to its own sender, as an ICMP error does.
#[inline(never)]
fn quotes_own<F: Frame>(frame: &F, packet: &IpPacket) -> bool {
    let quote = ethernet::LENGTH + ICMP;
    if packet.is_v6() {
        let destination = frame.load_far::<[u16; 8]>((quote + 2 * ipv6::LENGTH - 16) as u32);
        destination.is_some_and(|words| ipv6::bytes16(words) == packet.source)
    } else {
        let destination = frame.load_far::<[u16; 2]>((quote + 2 * ipv4::LENGTH - 4) as u32);
        destination.is_some_and(|words| ipv4::mapped(bytes4(words)) == packet.source)
    }
}

/// Passes packets to an address outside the VPC, or to one that the node serves for it.
#[inline(always)]
pub fn leave<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    packet: &IpPacket,
    is_served: bool,
) -> Outcome {
    let flags = flags(attachment);
    if !is_served {
        let is_closed = flags & VPC_HOST_ACCESS == 0
            && (flags & VPC_EGRESS == 0 || maps::is_droplet_at(&packet.destination));
        if is_closed || is_private(attachment, packet) {
            return Err(Counter::OutsideVpc);
        }
    }
    let outcome = pass(frame, packet)?;
    let mut kind = 0;
    if is_served || flags & VPC_EGRESS != 0 {
        kind = if flags & VPC_HOST_ACCESS == 0 {
            MARK_EGRESS
        } else {
            MARK_EGRESS_HOST
        };
    }
    let out = if attachment.egress_set != 0 && F::IS_LAST {
        policy::lets_out(frame, attachment, packet)
    } else {
        Out::Passes
    };
    if out != Out::Passes {
        // The stack knows which packets are answers, and which are for the node itself.
        if out == Out::Denied && flags & VPC_HOST_ACCESS != 0 {
            kind = MARK_FORBIDDEN;
        } else {
            kind |= if kind == 0 { MARK_DENIED } else { DENIED };
        }
        kind |= rejected(attachment);
    }
    if kind != 0 {
        mark(frame, kind);
    }
    Ok(outcome)
}

/// Whether the packet's sender is in a private network, or in one whose row isn't here: nobody gets out unless a row
/// says so. Only packets to outside pay for this look-up.
#[inline(always)]
fn is_private(attachment: &AttachmentEntry, packet: &IpPacket) -> bool {
    maps::subnet(attachment.vni, packet.source)
        .is_none_or(|subnet| subnet.network != attachment.network || subnet.flags & SUBNET_PRIVATE != 0)
}

/// Returns the mark of a packet that the node sends by its own endpoint. The mark says for which pod. Returns 0 for
/// packets of any other endpoint.
#[inline(always)]
pub fn mark_of_sent_on(frame: &TcFrame, attachment: &AttachmentEntry) -> u32 {
    if attachment.flags & ATTACHMENT_HOST == 0 {
        return 0;
    }
    // SAFETY: a field of the program's own context.
    unsafe { (*frame.skb()).mark }
}

#[inline(always)]
fn flags(attachment: &AttachmentEntry) -> u32 {
    maps::vpc(attachment.vni).map_or(0, |vpc| vpc.flags)
}

/// Whether a packet can only be an answer. Answers to probes need no options and no fragments, whose later parts could
/// not be judged.
#[inline(always)]
fn is_answer<F: Frame>(frame: &F, packet: &IpPacket) -> Result<bool, Counter> {
    if !packet.shows_transport() {
        return Ok(false);
    }
    let first: [u16; 1] = transport(frame, packet, 0).ok_or(Counter::Truncated)?;
    let mut tcp_flags = 0;
    if packet.protocol == ipv4::TCP {
        if packet.length < packet.header_length() + LEAST_TCP {
            return Ok(false);
        }
        let word: [u16; 1] = transport(frame, packet, 12).ok_or(Counter::Truncated)?;
        tcp_flags = word[0].to_ne_bytes()[1];
    }
    let transport = Transport {
        is_v6: packet.is_v6(),
        icmp_type: first[0].to_ne_bytes()[0],
        tcp_flags,
    };
    Ok(is_reply(packet.protocol, transport))
}

/// Passes a packet to the stack unless it is Geneve: nobody else may send to droplets in the host's name. Droplets
/// accept Geneve by IPv4 alone.
#[inline(always)]
fn pass<F: Frame>(frame: &F, packet: &IpPacket) -> Outcome {
    if packet.protocol == ipv4::UDP && !packet.is_v6() && is_geneve(frame, packet)? {
        return Err(Counter::GeneveForbidden);
    }
    Ok((F::PASS, F::IS_LAST.then_some(Counter::ToHost)))
}

/// Whether the packet is for the port of Geneve. Options hide the port, but are too rare to look further. The first of
/// several fragments shows the port.
#[inline(always)]
fn is_geneve<F: Frame>(frame: &F, packet: &IpPacket) -> Result<bool, Counter> {
    if packet.has_options() || packet.is_later_fragment() {
        return Ok(packet.has_options());
    }
    let udp: Option<UdpHeader> = transport(frame, packet, 0);
    if packet.is_fragment() {
        return Ok(udp.is_none_or(|udp| udp.is_geneve()));
    }
    Ok(udp.ok_or(Counter::Truncated)?.is_geneve())
}
