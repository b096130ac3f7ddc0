//! Answers of backends to clients outside, at the backend's agent and at the front that sends them on.

use thuban_common::{
    counters::Counter,
    packet::{
        flow,
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
    },
    policy::{ANSWER, Stamp},
    services::{CONFIRMED, LEAVING, NO_INDEX, Signal},
    tables::{AttachmentEntry, ConfigEntry, ENCAPSULATION_LENGTH, EndpointEntry, GENEVE_PORT, NO_DROPLET},
};

use super::{NOW, PLAIN_IP, chooses, ethertype, is_clients, is_outside_of};
use crate::{
    connections, deliver,
    encapsulate::encapsulate,
    frame::{Frame, Outcome, tc::TcFrame},
    inner, maps, meter,
    rewrite::rewrite,
    too_big,
    trace::Observed,
    work::Work,
};

/// Whether an endpoint's packet is an answer to a client outside. [`Work::to`] has then what it becomes, and
/// [`Work::answers_by`] the droplet by which it leaves. What opens a connection is no answer.
#[inline(always)]
pub fn is_answer<F: Frame>(frame: &F, attachment: &AttachmentEntry, packet: &IpPacket) -> bool {
    let (Some(work), true) = (Work::get(), packet.has_ports()) else {
        return false;
    };
    let word: Option<[u16; 1]> = inner::transport(frame, packet, Signal::OFFSET);
    let [word] = word.unwrap_or_default();
    // SAFETY: this function's only reference to either, and the call ends before one is used again.
    unsafe { front_answers(packet, work, attachment.vni, word.into()) != 0 }
}

/// Does what [`is_answer`] does. `word`: the two bytes of the transport header at [`Signal::OFFSET`]. A global
/// function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn front_answers(packet: *const IpPacket, work: *mut Work, vni: u32, word: u32) -> u32 {
    // SAFETY: the caller's promise.
    if let (Some(packet), Some(work)) = unsafe { (packet.as_ref(), work.as_mut()) } {
        return answers(packet, work, vni, word as u16).is_some().into();
    }
    0
}

#[inline(always)]
fn answers(packet: &IpPacket, work: &mut Work, vni: u32, word: u16) -> Option<()> {
    let mut signal = Signal::read(packet.protocol, word);
    if signal.opens {
        return None;
    }
    if signal.confirms {
        signal.state |= CONFIRMED;
    }
    work.set_key(vni, packet, LEAVING);
    let entry = maps::connection(&work.key)?;
    // Read before `other_side` finds that the entry is still of this VPC: another one's index may be anything.
    work.answers_by = entry.index;
    let front = maps::other_side(entry, vni)?;
    connections::touch(entry, &signal, packet.protocol);
    work.begin(packet);
    work.to.source = front.address;
    work.to.ports = [front.port, front.client_port];
    Some(())
}

/// Sends such an answer to the client, from the front's address: by the droplet that asked for it, or else from here.
#[inline(always)]
pub fn answer(
    frame: &mut TcFrame,
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    observed: &mut Observed,
) -> Outcome {
    let packet = &observed.packet;
    // Droplets would not believe it, but nobody may send to that port of theirs.
    if packet.protocol == ipv4::UDP && packet.ports[1] == GENEVE_PORT.to_be() {
        return Err(Counter::GeneveForbidden);
    }
    let answers_by = Work::get().map_or(NO_INDEX, |work| work.answers_by);
    let front = answers_by.to_ne_bytes();
    // A droplet that has gone sends nothing. The client's next packet names another one.
    if answers_by == NO_INDEX || front == config.droplet || !maps::is_droplet(front) {
        return leave(frame, attachment, config, packet);
    }
    observed.next = front;
    // The check comes before anything is written: the error quotes the packet as the pod sent it.
    match excess(frame, config, observed) {
        0 => send(frame, attachment, config, observed),
        mtu => too_big::answer(frame, attachment, &observed.packet, mtu),
    }
}

#[inline(never)]
fn leave(
    frame: &mut TcFrame,
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    packet: &IpPacket,
) -> Outcome {
    let work = Work::get().ok_or(Counter::FrontUnknown)?;
    meter::admit_to_leave(frame, attachment, ethertype(packet), 0)?;
    rewrite(frame, PLAIN_IP, packet, &work.to)?;
    Ok((frame.leave(config), Some(Counter::FrontAnswered)))
}

/// Returns the MTU of the way to [`Observed::next`] if the packet is larger, else 0.
#[inline(never)]
fn excess(frame: &TcFrame, config: &ConfigEntry, observed: &Observed) -> u32 {
    too_big::exceeded(frame, config, &observed.packet, observed.next).unwrap_or(0)
}

/// Sends an answer through the tunnel to the front that is to send it to the client.
#[inline(never)]
fn send(
    frame: &mut TcFrame,
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    observed: &Observed,
) -> Outcome {
    let work = Work::get().ok_or(Counter::FrontUnknown)?;
    let packet = &observed.packet;
    meter::admit_to_leave(frame, attachment, ethertype(packet), ENCAPSULATION_LENGTH as u32)?;
    rewrite(frame, PLAIN_IP, packet, &work.to)?;
    let sent = encapsulate(
        frame,
        config,
        observed.next,
        attachment.vni,
        Stamp::of_front(ANSWER, NO_DROPLET),
        packet,
        attachment.outer_class(packet.traffic_class),
        flow::hash(packet),
    )?;
    Ok(sent.map_or((TcFrame::PASS, None), |verdict| {
        (verdict, Some(Counter::FrontAnswered))
    }))
}

/// Handles an answer that a backend's droplet sent here. It leaves as an answer of this droplet's own backends does: by
/// the uplink, past the node's stack.
#[inline(never)]
pub fn arrived(
    frame: &mut TcFrame,
    config: &ConfigEntry,
    outer: &Ipv4Header,
    observed: &mut Observed,
) -> Outcome {
    if !is_of_front(observed) {
        return Err(Counter::FrontAnswerUnknown);
    }
    // The kernel writes the MACs.
    let nobody = const { EndpointEntry::new(0) }.local;
    let length = ENCAPSULATION_LENGTH as u32;
    let (vni, packet) = (observed.vni, &observed.packet);
    deliver::unwrap(frame, length, outer.traffic_class(), vni, &nobody, packet)?;
    Ok((frame.leave(config), Some(Counter::FrontReturned)))
}

/// Whether a packet is an answer of a front that wants answers for its backends in this VPC, to a client whose packets
/// the front takes. The client's packet of the same flow tells, as for an ICMP error.
#[inline(never)]
fn is_of_front(observed: &mut Observed) -> bool {
    let (vni, request) = (observed.vni, &mut observed.quoted);
    *request = observed.packet;
    request.turn();
    let Some(work) = Work::get() else {
        return false;
    };
    is_clients(request)
        && is_outside_of(vni, &request.source)
        && chooses(request, work, NOW)
        && work.is_tunnel
        && work.home.vni == vni
}
