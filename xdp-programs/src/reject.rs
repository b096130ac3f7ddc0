//! Tells senders that policy denies their packets, in VPCs that want it: by a TCP reset, or ICMP "administratively
//! prohibited", in the name of the endpoint that the packet was for.
//!
//! A sender on this droplet gets the answer at once. For one elsewhere, transit gives it to the agent of the endpoint,
//! as if the endpoint had sent it: so it takes the ways of all packets, also back through a service.
//!
//! Invariant: no answer answers an answer, and policy lets an answer in nowhere but where it lets in replies.

use aya_ebpf::helpers::bpf_redirect;
use thuban_common::{
    counters::Counter,
    host_stack::MARK_REJECTION,
    packet::{
        ethernet,
        icmp::{ErrorV4, ErrorV6, LEAST_QUOTE_V4, LEAST_QUOTE_V6},
        ip::IpPacket,
        ipv4,
    },
    tables::{ATTACHMENT_HOST, ATTACHMENT_REJECTS, AttachmentEntry, GATEWAY_MAC, LOCAL_REJECTS},
};

use crate::{
    deliver, denials,
    frame::{Frame, Outcome, Verdict, tc::TcFrame},
    inner, maps, refuse,
    too_big::{self, Macs},
    trace::Observed,
};

/// BPF_F_INGRESS of linux/bpf.h.
const INGRESS: u64 = 1;

/// Answers a packet that was denied on its sender's own droplet.
#[inline(never)]
pub fn to_pod<F: Frame>(
    frame: &mut F,
    attachment: &AttachmentEntry,
    packet: &IpPacket,
    denied: Counter,
) -> Outcome {
    if attachment.flags & ATTACHMENT_REJECTS == 0 || !may_answer(denied) {
        return Err(denied);
    }
    write(frame, &Macs::to_pod(attachment), packet, false).ok_or(denied)?;
    let verdict = frame.reply().ok_or(denied)?;
    Ok((verdict, Some(denied)))
}

/// Whether a packet that was just denied may be answered. What a rule denied is noted, and what can't be read is not.
#[inline(always)]
pub fn may_answer(denied: Counter) -> bool {
    matches!(denied, Counter::PolicyIngress | Counter::PolicyEgress) && denials::may_be_answered()
}

/// Turns a denied packet of the wire into its answer, and gives that to the agent of the endpoint. `length`: of the
/// outer headers. The frame is dropped if there is no answer.
#[inline(never)]
pub fn by_agent(
    frame: &mut TcFrame,
    length: u32,
    outer_class: u8,
    is_checksum_left: bool,
    observed: &Observed,
) -> Verdict {
    let (vni, packet) = (observed.vni, &observed.packet);
    let local = &maps::rows(&maps::key(vni, packet.destination)).local;
    if local.flags & LOCAL_REJECTS == 0
        || deliver::unwrap(frame, length, outer_class, vni, local, packet) != Ok(true)
    {
        return TcFrame::DROP;
    }
    let macs = Macs {
        to: GATEWAY_MAC,
        from: local.mac,
    };
    if write(frame, &macs, packet, is_checksum_left).is_none() {
        return TcFrame::DROP;
    }
    frame.mark(MARK_REJECTION);
    // SAFETY: helper without pointers.
    unsafe { bpf_redirect(local.ifindex, INGRESS) as Verdict }
}

/// Whether a frame is an answer of [`by_agent`]. What is left to the NIC of it is its own checksum, or one in its
/// quote.
#[inline(always)]
pub fn is_rejection<F: Frame>(frame: &mut F, attachment: &AttachmentEntry) -> bool {
    // A process of the node may set marks.
    attachment.flags & (ATTACHMENT_REJECTS | ATTACHMENT_HOST) == ATTACHMENT_REJECTS
        && frame.tc().is_some_and(|frame| {
            // SAFETY: a field of the program's own context.
            unsafe { (*frame.skb()).mark == MARK_REJECTION }
        })
}

/// Does the same, and takes the mark away.
#[inline(always)]
pub fn take_mark<F: Frame>(frame: &mut F, attachment: &AttachmentEntry) -> bool {
    if !is_rejection(frame, attachment) {
        return false;
    }
    if let Some(frame) = frame.tc() {
        frame.mark(0);
    }
    true
}

/// Whether a packet may be the first of its connection. What belongs to an open one is denied without a word: it may be
/// an answer of which FLOWS has lost what vouches for it, and a reset would end what the next packet heals.
#[inline(always)]
fn may_open<F: Frame>(frame: &F, packet: &IpPacket) -> bool {
    !matches!(packet.protocol, ipv4::TCP | ipv4::SCTP)
        || inner::signal(frame, packet).is_ok_and(|signal| signal.opens)
}

/// Turns a plain frame into its answer. Errors, what belongs to an open connection, and what shows no ports get none.
#[inline(always)]
fn write<F: Frame>(frame: &mut F, macs: &Macs, packet: &IpPacket, is_left: bool) -> Option<()> {
    if !packet.shows_transport() || too_big::is_icmp_error(frame, packet) || !may_open(frame, packet) {
        return None;
    }
    let ([.., a, b, c, d], [.., e, f, g, h]) = (packet.destination, packet.source);
    if packet.protocol == ipv4::TCP {
        refuse::reset(frame, macs, packet, is_left)
    } else if packet.is_v6() {
        too_big::write::<F, _, LEAST_QUOTE_V6>(frame, macs, ethernet::IPV6, |sum| {
            ErrorV6::prohibited(&packet.destination, &packet.source, sum)
        })
    } else {
        too_big::write::<F, _, LEAST_QUOTE_V4>(frame, macs, ethernet::IPV4, |sum| {
            ErrorV4::prohibited([a, b, c, d], [e, f, g, h], sum)
        })
    }
}
