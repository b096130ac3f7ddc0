//! Reads the flow of the packet that is judged: its addresses, its ports or what stands for them, and what it says of
//! its connection.

use thuban_common::{
    counters::Counter,
    packet::{ethernet, icmp, ip::IpPacket, ipv4},
    policy::point,
    services::{SEEN, Signal},
};

use super::Case;
use crate::{
    fragments::{self, Judged},
    frame::{Frame, tc::TcFrame},
    inner,
};

/// Bytes of an ICMP header before the quote.
const ICMP: u32 = 8;

/// Where the ports of a packet are to be found.
pub(super) enum Shown {
    Here,
    /// In an earlier fragment.
    Earlier,
}

/// Sets the packet's flow, its [`point`] and signal.
#[inline(never)]
pub(super) fn describe<F: Frame>(
    frame: &mut F,
    packet: &IpPacket,
    offset: u32,
    case: &mut Case,
) -> Result<Shown, Counter> {
    if packet.has_options() {
        return Err(Counter::PolicyUnreadable);
    }
    case.is_error = false;
    case.signal = Signal::DATAGRAM;
    case.key.source = packet.source;
    case.key.destination = packet.destination;
    case.key.ports = packet.ports;
    case.key.protocol = packet.protocol;
    if packet.is_fragment() {
        let tc = frame.tc().ok_or(Counter::PolicyUnreadable)?;
        return fragment(tc, packet, offset, case);
    }
    transport_of(frame, packet, offset + packet.header_length(), case)?;
    case.point = point(case.key.protocol, u16::from_be(case.key.ports[1]));
    Ok(Shown::Here)
}

/// Does what [`describe`] does, for a fragment.
#[inline(never)]
fn fragment(frame: &TcFrame, packet: &IpPacket, offset: u32, case: &mut Case) -> Result<Shown, Counter> {
    match fragments::judged(frame, case.key.vni, packet, offset).ok_or(Counter::PolicyUnreadable)? {
        Judged::Later => Ok(Shown::Earlier),
        Judged::Whole(datagram) => {
            case.key.ports = datagram.ports;
            case.key.protocol = datagram.protocol;
            case.point = point(datagram.protocol, u16::from_be(datagram.ports[1]));
            Ok(Shown::Here)
        }
    }
}

/// Reads what the transport header at `offset` says beside ports.
#[inline(never)]
fn transport_of<F: Frame>(frame: &F, packet: &IpPacket, offset: u32, case: &mut Case) -> Result<(), Counter> {
    match packet.protocol {
        ipv4::TCP | ipv4::SCTP => {
            let at = offset + Signal::OFFSET as u32;
            let [word] = frame.load_far(at).ok_or(Counter::Truncated)?;
            case.signal = Signal::read(packet.protocol, word);
        }
        protocol if protocol == icmp::protocol(packet.is_v6()) => {
            let word: [u16; 1] = frame.load_far(offset).ok_or(Counter::Truncated)?;
            if icmp::is_error(packet.is_v6(), word[0].to_ne_bytes()[0])
                && quoted(frame, packet, offset + ICMP, case)
            {
                case.is_error = true;
                case.signal.state = SEEN;
            } else {
                case.key.ports = echo(frame, packet.is_v6(), protocol, offset);
            }
        }
        _ => {}
    }
    Ok(())
}

/// Sets the flow of the answers to a quoted packet, which its receiver quotes to its sender. Returns false if the quote
/// is no such packet, or does not show whose it is.
#[inline(never)]
fn quoted<F: Frame>(frame: &F, packet: &IpPacket, offset: u32, case: &mut Case) -> bool {
    let quote = &mut case.quote;
    let ethertype = if packet.is_v6() {
        ethernet::IPV6
    } else {
        ethernet::IPV4
    };
    if inner::read(frame, ethertype, 0, offset, quote).is_err()
        || !quote.shows_transport()
        || quote.source != packet.destination
        || quote.destination != packet.source
    {
        return false;
    }
    let [first, second] = if quote.has_ports() {
        quote.ports
    } else {
        let offset = offset + packet.header_length();
        echo(frame, packet.is_v6(), quote.protocol, offset)
    };
    case.key.protocol = quote.protocol;
    case.key.ports = [second, first];
    true
}

/// Returns what stands for ports in the header at `offset` of a protocol without ports. An echo request has its
/// identifier for the first one, an answer to it for the second one. Others have none.
#[inline(never)]
fn echo<F: Frame>(frame: &F, is_v6: bool, protocol: u8, offset: u32) -> [u16; 2] {
    if protocol != icmp::protocol(is_v6) {
        return [0; 2];
    }
    let Some([first, _, identifier]) = frame.load_far::<[u16; 3]>(offset) else {
        return [0; 2];
    };
    let kind = first.to_ne_bytes()[0];
    if kind == icmp::echo_request(is_v6) {
        [identifier, 0]
    } else if kind == icmp::echo_reply(is_v6) {
        [0, identifier]
    } else {
        [0; 2]
    }
}
