//! The IP packet of an endpoint, as agent and transit read it.

use thuban_common::{
    counters::Counter,
    packet::{
        Header, ethernet,
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
        ipv6, tcp,
    },
    services::Signal,
    tables::Address,
};

use crate::frame::Frame;

/// Reads the packet whose IP header lies at `offset + far` into `packet`; `far` is 0 unless the headers before it have
/// options. The reading is done in separate functions and piece by piece, to save stack.
#[inline(always)]
pub fn read<F: Frame>(
    frame: &F,
    ethertype: u16,
    offset: usize,
    far: u32,
    packet: &mut IpPacket,
) -> Result<(), Counter> {
    match ethertype {
        ethernet::IPV4 => read_v4(frame, offset, far, packet),
        ethernet::IPV6 => read_v6(frame, offset, far, packet),
        _ => Err(Counter::NotIpv4),
    }
}

#[inline(never)]
fn read_v4<F: Frame>(frame: &F, offset: usize, far: u32, packet: &mut IpPacket) -> Result<(), Counter> {
    let header: Ipv4Header = at(frame, offset, far).ok_or(Counter::Truncated)?;
    packet.read_v4(&header)?;
    if packet.has_ports() {
        packet.ports = at(frame, offset + ipv4::LENGTH, far).ok_or(Counter::Truncated)?;
        packet.tcp_flags = tcp_flags(frame, packet.protocol, offset + ipv4::LENGTH, far);
    }
    Ok(())
}

#[inline(never)]
fn read_v6<F: Frame>(frame: &F, offset: usize, far: u32, packet: &mut IpPacket) -> Result<(), Counter> {
    if !read_address(frame, offset + 8, far, &mut packet.source)
        || !read_address(frame, offset + 24, far, &mut packet.destination)
    {
        return Err(Counter::Truncated);
    }
    packet.read_v6(at(frame, offset, far).ok_or(Counter::Truncated)?)?;
    if packet.has_ports() {
        packet.ports = at(frame, offset + ipv6::LENGTH, far).ok_or(Counter::Truncated)?;
        packet.tcp_flags = tcp_flags(frame, packet.protocol, offset + ipv6::LENGTH, far);
    }
    Ok(())
}

/// Returns the flags of a TCP header at `offset + far`, 0 if there is none. Only what is told of flows depends on them,
/// so a frame that ends before them is no error.
#[inline(always)]
fn tcp_flags<F: Frame>(frame: &F, protocol: u8, offset: usize, far: u32) -> u8 {
    if protocol != ipv4::TCP {
        return 0;
    }
    at::<F, [u16; 1]>(frame, offset + tcp::FLAGS_OFFSET, far).map_or(0, |[word]| word.to_ne_bytes()[1])
}

#[inline(never)]
fn read_address<F: Frame>(frame: &F, offset: usize, far: u32, to: &mut Address) -> bool {
    let words: Option<[u16; 8]> = at(frame, offset, far);
    words.is_some_and(|words| {
        *to = ipv6::bytes16(words);
        true
    })
}

/// Returns the header at `offset + far`: directly where the offset is constant.
#[inline(always)]
pub fn at<F: Frame, H: Header>(frame: &F, offset: usize, far: u32) -> Option<H> {
    if far == 0 {
        frame.load(offset)
    } else {
        frame.load_far(offset as u32 + far)
    }
}

/// Returns the header behind the packet's fixed IP header and `further` bytes, in a frame that isn't encapsulated.
#[inline(always)]
pub fn transport<F: Frame, H: Header>(frame: &F, packet: &IpPacket, further: usize) -> Option<H> {
    if packet.is_v6() {
        frame.load(ethernet::LENGTH + ipv6::LENGTH + further)
    } else {
        frame.load(ethernet::LENGTH + ipv4::LENGTH + further)
    }
}

/// Returns the meaning of the transport header for its connection.
#[inline(always)]
pub fn signal<F: Frame>(frame: &F, packet: &IpPacket) -> Result<Signal, Counter> {
    if packet.protocol == ipv4::UDP {
        return Ok(Signal::DATAGRAM);
    }
    let [word] = transport(frame, packet, Signal::OFFSET).ok_or(Counter::Truncated)?;
    Ok(Signal::read(packet.protocol, word))
}
