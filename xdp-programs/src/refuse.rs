//! Refuses packets to a service that nobody serves: the client hears so at once, by a TCP reset or ICMP "port
//! unreachable".

use thuban_common::{
    counters::Counter,
    packet::{
        checksum, ethernet,
        icmp::{ErrorV4, ErrorV6, LEAST_QUOTE_V4, LEAST_QUOTE_V6},
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
        ipv6::{self, Ipv6Header},
        tcp::TcpHeader,
    },
    tables::AttachmentEntry,
};

use crate::{
    frame::{Frame, Outcome},
    inner::transport,
    too_big::{self, Macs},
};

/// Turns the frame into an answer to the pod. Nothing answers a reset.
#[inline(never)]
pub fn answer<F: Frame>(frame: &mut F, attachment: &AttachmentEntry, packet: &IpPacket) -> Outcome {
    let [.., a, b, c, d] = packet.source;
    let macs = Macs::to_pod(attachment);
    let is_written = if packet.protocol == ipv4::TCP {
        reset(frame, &macs, packet, false)
    } else if packet.is_v6() {
        too_big::write::<F, _, LEAST_QUOTE_V6>(frame, &macs, ethernet::IPV6, |sum| {
            ErrorV6::port_unreachable(&packet.source, sum)
        })
    } else {
        too_big::write::<F, _, LEAST_QUOTE_V4>(frame, &macs, ethernet::IPV4, |sum| {
            ErrorV4::port_unreachable([a, b, c, d], sum)
        })
    };
    is_written.ok_or(Counter::NoBackend)?;
    let verdict = frame.reply().ok_or(Counter::NoBackend)?;
    Ok((verdict, Some(Counter::ServiceRefused)))
}

/// Turns a TCP segment into the reset that answers it. `is_left`: the checksum is the NIC's to write. A pod doesn't ask
/// for one that was left to its own end.
#[inline(always)]
pub fn reset<F: Frame>(frame: &mut F, macs: &Macs, packet: &IpPacket, is_left: bool) -> Option<()> {
    let refused: TcpHeader = transport(frame, packet, 0)?;
    let reset = refused.reset(packet.length - packet.header_length())?;
    let finished = |sum| {
        if is_left {
            reset.with_checksum_left(sum)
        } else {
            reset.with_checksum(sum)
        }
    };
    if packet.is_v6() {
        let ip = Ipv6Header::new(
            &packet.destination,
            &packet.source,
            ipv4::TCP,
            64,
            TcpHeader::LENGTH as u16,
        );
        let sum = ip.pseudo_sum(TcpHeader::LENGTH as u16);
        frame.cut((ethernet::LENGTH + ipv6::LENGTH + TcpHeader::LENGTH) as u32)?;
        frame.store(0, &macs.header(ethernet::IPV6))?;
        frame.store(ethernet::LENGTH, &ip)?;
        frame.store(ethernet::LENGTH + ipv6::LENGTH, &finished(sum))
    } else {
        let ([.., a, b, c, d], [.., e, f, g, h]) = (packet.destination, packet.source);
        let length = (ipv4::LENGTH + TcpHeader::LENGTH) as u16;
        let ip = Ipv4Header::new([a, b, c, d], [e, f, g, h], ipv4::TCP, 0, length);
        let words = ip.words;
        let sum = checksum::sum([words[6], words[7], words[8], words[9]])
            + checksum::sum([u16::from(ipv4::TCP).to_be(), (TcpHeader::LENGTH as u16).to_be()]);
        frame.cut((ethernet::LENGTH + ipv4::LENGTH + TcpHeader::LENGTH) as u32)?;
        frame.store(0, &macs.header(ethernet::IPV4))?;
        frame.store(ethernet::LENGTH, &ip)?;
        frame.store(ethernet::LENGTH + ipv4::LENGTH, &finished(sum))
    }
}
