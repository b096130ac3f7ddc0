//! ICMP errors about packets to services. They quote a packet that went to a backend. The client gets the quote as it
//! sent the packet, so that it knows whose error it is.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::{bpf_csum_diff, bpf_l3_csum_replace, bpf_l4_csum_replace},
};
use thuban_common::{
    counters::Counter,
    packet::{
        ethernet, icmp,
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
        ipv6,
    },
    services::REVERSE,
    tables::Address,
};

use crate::{
    frame::{Frame, tc::TcFrame},
    inner::transport,
    maps,
    rewrite::{done, store, word},
    work::Work,
};

/// Bytes of an ICMP header before the quote.
const ICMP: usize = 8;
/// Bytes of Ethernet, IPv6, ICMP, IPv6 once more, ports.
const HEADERS: u32 = (ethernet::LENGTH + 2 * ipv6::LENGTH + ICMP + 4) as u32;

/// Whether a packet may be an ICMP error, by its protocol.
#[inline(always)]
pub fn is_error(packet: &IpPacket) -> bool {
    packet.shows_transport() && packet.protocol == icmp::protocol(packet.is_v6())
}

/// Gives an error its service's address back if it quotes a packet to a backend: in the quote, and as the error's own
/// source if the backend itself sent it.
#[inline(never)]
pub fn restore(frame: &mut TcFrame, vni: u32, packet: &IpPacket, work: &mut Work) -> Result<(), Counter> {
    frame.make_linear(HEADERS);
    if !read(frame, vni, packet, work) {
        return Ok(());
    }
    let Some(service) = maps::connection(&work.key).and_then(|entry| maps::other_side(entry, vni)) else {
        return Ok(());
    };
    work.to.source = work.key.source;
    work.to.destination = service.address;
    work.to.ports = [service.client_port, service.port];
    if packet.is_v6() {
        write_v6(frame.skb(), packet, work)
    } else {
        write_v4(frame.skb(), packet, work)
    }
}

/// Sets the key by which answers to the quoted packet are found. Returns false if the quote is of no packet that could
/// have gone to a backend.
#[inline(always)]
fn read(frame: &TcFrame, vni: u32, packet: &IpPacket, work: &mut Work) -> bool {
    let Some(kind) = transport::<_, [u16; 1]>(frame, packet, 0) else {
        return false;
    };
    let kind = kind[0].to_ne_bytes()[0];
    if !icmp::is_error(packet.is_v6(), kind) {
        return false;
    }
    let ports = if packet.is_v6() {
        let (Some(next), Some(from), Some(to)) = (
            transport::<_, [u16; 1]>(frame, packet, ICMP + 6),
            transport::<_, [u16; 8]>(frame, packet, ICMP + 8),
            transport::<_, [u16; 8]>(frame, packet, ICMP + 24),
        ) else {
            return false;
        };
        work.key.source = ipv6::bytes16(to);
        work.key.destination = ipv6::bytes16(from);
        work.key.protocol = next[0].to_ne_bytes()[0];
        transport::<_, [u16; 2]>(frame, packet, ICMP + ipv6::LENGTH)
    } else {
        let Some(header) = transport::<_, Ipv4Header>(frame, packet, ICMP) else {
            return false;
        };
        if header.has_options() || header.is_later_fragment() {
            return false;
        }
        work.key.source = ipv4::mapped(header.destination());
        work.key.destination = ipv4::mapped(header.source());
        work.key.protocol = header.protocol();
        transport::<_, [u16; 2]>(frame, packet, ICMP + ipv4::LENGTH)
    };
    let Some([from, to]) = ports else {
        return false;
    };
    work.key.vni = vni;
    work.key.ports = [to, from];
    work.key.direction = REVERSE;
    work.key.padding = 0;
    // An error about somebody else's packet says nothing to this client.
    work.key.destination == packet.destination
        && matches!(work.key.protocol, ipv4::TCP | ipv4::UDP | ipv4::SCTP)
}

/// Rewrites IPv4. The quoted header's checksum makes up for its address, so that ICMP's checksum changes with the port
/// alone.
#[inline(always)]
fn write_v4(skb: *mut __sk_buff, packet: &IpPacket, work: &Work) -> Result<(), Counter> {
    const SUM: u32 = (ethernet::LENGTH + ipv4::LENGTH) as u32 + 2;
    const QUOTE: u32 = (ethernet::LENGTH + ipv4::LENGTH + ICMP) as u32;
    let (old, new) = (word(&work.to.source), word(&work.to.destination));
    let (from, to) = (u64::from(old), u64::from(new));
    // SAFETY: helpers on the program's own context, which check the offsets.
    done(unsafe { bpf_l3_csum_replace(skb, QUOTE + 10, from, to, 4) })?;
    store(skb, QUOTE + 16, &new, 0)?;
    ports(skb, SUM, QUOTE + ipv4::LENGTH as u32, work)?;
    if packet.source != work.to.source {
        return Ok(());
    }
    // SAFETY: as above.
    done(unsafe { bpf_l3_csum_replace(skb, ethernet::LENGTH as u32 + 10, from, to, 4) })?;
    store(skb, ethernet::LENGTH as u32 + 12, &new, 0)
}

/// Rewrites IPv6. ICMPv6's checksum covers all of the message, and the addresses of the packet itself.
#[inline(always)]
fn write_v6(skb: *mut __sk_buff, packet: &IpPacket, work: &Work) -> Result<(), Counter> {
    const SUM: u32 = (ethernet::LENGTH + ipv6::LENGTH) as u32 + 2;
    const QUOTE: u32 = (ethernet::LENGTH + ipv6::LENGTH + ICMP) as u32;
    let change = difference(&work.to.source, &work.to.destination);
    // SAFETY: helper on the program's own context.
    done(unsafe { bpf_l4_csum_replace(skb, SUM, 0, change, 0) })?;
    store(skb, QUOTE + 24, &work.to.destination, 0)?;
    ports(skb, SUM, QUOTE + ipv6::LENGTH as u32, work)?;
    if packet.source != work.to.source {
        return Ok(());
    }
    // SAFETY: as above.
    done(unsafe { bpf_l4_csum_replace(skb, SUM, 0, change, u64::from(BPF_F_PSEUDO_HDR)) })?;
    store(
        skb,
        ethernet::LENGTH as u32 + 8,
        &work.to.destination,
        u64::from(BPF_F_RECOMPUTE_CSUM),
    )
}

/// Rewrites the quoted ports: source and destination of the client's packet.
#[inline(always)]
fn ports(skb: *mut __sk_buff, sum: u32, place: u32, work: &Work) -> Result<(), Counter> {
    port(skb, sum, place, work.key.ports[1], work.to.ports[0])?;
    port(skb, sum, place + 2, work.key.ports[0], work.to.ports[1])
}

/// Rewrites a quoted port at `place`. The message's checksum is at `sum`.
#[inline(always)]
pub fn port(skb: *mut __sk_buff, sum: u32, place: u32, old: u16, new: u16) -> Result<(), Counter> {
    if old == new {
        return Ok(());
    }
    // SAFETY: helper on the program's own context.
    done(unsafe { bpf_l4_csum_replace(skb, sum, u64::from(old), u64::from(new), 2) })?;
    store(skb, place, &new, 0)
}

/// Returns the change of a checksum by an address.
#[inline(always)]
pub fn difference(old: &Address, new: &Address) -> u64 {
    let (from, to) = (old.as_ptr().cast_mut().cast(), new.as_ptr().cast_mut().cast());
    // SAFETY: 16 bytes each, which the helper only reads.
    unsafe { bpf_csum_diff(from, 16, to, 16, 0) as u64 }
}
