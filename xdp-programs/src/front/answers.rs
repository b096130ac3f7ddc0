//! Answers of backends to clients outside.

use thuban_common::{
    counters::Counter,
    packet::{ip::IpPacket, ipv4},
    services::{CONFIRMED, LEAVING, Signal},
    tables::{AttachmentEntry, ConfigEntry, GENEVE_PORT},
};

use super::{PLAIN_IP, ethertype};
use crate::{
    connections,
    frame::{Frame, Outcome, tc::TcFrame},
    inner, maps, meter,
    rewrite::rewrite,
    work::Work,
};

/// Whether an endpoint's packet is an answer to a client outside. [`Work::to`] has then what it becomes. What opens a
/// connection is no answer.
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
    let front = maps::other_side(entry, vni)?;
    connections::touch(entry, &signal, packet.protocol);
    work.begin(packet);
    work.to.source = front.address;
    work.to.ports = [front.port, front.client_port];
    Some(())
}

/// Sends such an answer to the client, from the front's address.
#[inline(never)]
pub fn answer(
    frame: &mut TcFrame,
    attachment: &AttachmentEntry,
    config: &ConfigEntry,
    packet: &IpPacket,
) -> Outcome {
    // Droplets would not believe it, but nobody may send to that port of theirs.
    if packet.protocol == ipv4::UDP && packet.ports[1] == GENEVE_PORT.to_be() {
        return Err(Counter::GeneveForbidden);
    }
    let work = Work::get().ok_or(Counter::FrontUnknown)?;
    meter::admit_to_leave(frame, attachment, ethertype(packet), 0)?;
    rewrite(frame, PLAIN_IP, packet, &work.to)?;
    Ok((frame.leave(config), Some(Counter::FrontAnswered)))
}
