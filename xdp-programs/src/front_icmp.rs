//! ICMP at fronts: echo requests, and errors about answers that backends sent to clients.
//!
//! An error quotes an answer, whose source is the front. The client's packet of the same flow says which backend the
//! answer is from: the front chooses the droplet by it, and the backend's droplet finds the connection. The backend
//! gets the error about the answer as the backend sent it.
//!
//! Invariant: an error changes no table. It reaches a backend only by a connection that the backend has answered, which
//! the policies of the backend still let in. What is no error about such an answer is the host's at the front, and is
//! dropped at a backend's droplet.

use aya_ebpf::{
    bindings::{__sk_buff, BPF_F_PSEUDO_HDR, BPF_F_RECOMPUTE_CSUM},
    helpers::{bpf_l3_csum_replace, bpf_l4_csum_replace},
};
use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        flow,
        icmp::{self, IcmpHeader},
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
        ipv6::{self, Ipv6Header},
    },
    policy::AT_LAST,
    services::{ARRIVING, FRONTS, SEEN, ServiceKey, Signal},
    tables::{ConfigEntry, ENCAPSULATION_LENGTH, LOCAL_HAS_POLICY},
};

use crate::{
    deliver,
    encapsulate::encapsulate,
    frame::{Frame, Outcome, tc::TcFrame},
    front::{self, NOW, PLAIN_IP},
    inner, maps, policy,
    quoted::{difference, port},
    rewrite::{done, store, word},
    too_big,
    trace::Observed,
    transit::INNER_IP,
    work::Work,
};

/// Bytes of an ICMP header before the quote.
const ICMP: u32 = 8;
/// Bytes of the quoted packet behind its IP header that every error has (RFC 792).
const LEAST_QUOTE: u32 = 8;

/// Whether a packet shows an ICMP header of its family.
#[inline(always)]
pub fn is_icmp(packet: &IpPacket) -> bool {
    packet.shows_transport() && packet.protocol == icmp::protocol(packet.is_v6())
}

/// Takes an ICMP packet that is not in a tunnel. What says nothing to a front is the host's.
#[inline(never)]
pub fn take(frame: &mut TcFrame, config: &ConfigEntry, observed: &mut Observed) -> Outcome {
    let Some(work) = Work::get().filter(|_| observed.packet.is_from_outside()) else {
        return Ok((TcFrame::PASS, None));
    };
    if asks_for_echo(frame, &observed.packet) {
        return answer(frame, observed, work);
    }
    if maps::is_droplet_at(&observed.packet.source)
        || !read(frame, PLAIN_IP, observed)
        || !front::chooses(&observed.quoted, work, NOW)
    {
        return Ok((TcFrame::PASS, None));
    }
    observed.vni = work.home.vni;
    observed.stamp = front::STAMP;
    if !front::admits(&observed.quoted, observed.vni) {
        return Err(Counter::OutOfSourceRanges);
    }
    if work.home.droplet == config.droplet {
        if !front::is_outside_of(observed.vni, &observed.packet.source) {
            return Err(Counter::SourceMismatch);
        }
        find(config, observed, work)?;
        if observed.next == config.droplet {
            let_in(observed, work)?;
            return enter(frame, observed, work);
        }
    }
    send(frame, config, observed)
}

#[inline(always)]
fn asks_for_echo(frame: &TcFrame, packet: &IpPacket) -> bool {
    let kind = u16::from_ne_bytes([icmp::echo_request(packet.is_v6()), 0]);
    inner::transport::<_, [u16; 1]>(frame, packet, 0) == Some([kind])
}

/// Answers an echo request in place, if a port of the address has a backend.
#[inline(never)]
fn answer(frame: &mut TcFrame, observed: &mut Observed, work: &mut Work) -> Outcome {
    let packet = &observed.packet;
    work.service = ServiceKey {
        vni: FRONTS,
        address: packet.destination,
        port: 0,
        protocol: 0,
        former: 0,
    };
    let Some(own) = maps::service(&work.service).filter(|own| own.slots != 0) else {
        return Ok((TcFrame::PASS, None));
    };
    observed.vni = own.service;
    if !front::admits(packet, observed.vni) {
        return Err(Counter::OutOfSourceRanges);
    }
    let verdict = turn(frame, packet).and_then(|()| frame.reply());
    Ok(verdict.map_or((TcFrame::PASS, None), |verdict| {
        (verdict, Some(Counter::FrontPings))
    }))
}

/// Turns an echo request into its answer. Returns `None`, and has left the frame unchanged, if the request is cut off.
#[inline(never)]
fn turn(frame: &mut TcFrame, packet: &IpPacket) -> Option<()> {
    let header: EthernetHeader = frame.load(0)?;
    if packet.length < packet.header_length() + ICMP {
        return None;
    }
    let icmp: IcmpHeader = inner::transport(frame, packet, 0)?;
    let icmp = icmp.answer(packet.is_v6())?;
    if packet.is_v6() {
        let ip: Ipv6Header = frame.load(ethernet::LENGTH)?;
        frame.store(ethernet::LENGTH, &ip.answer())?;
        frame.store(ethernet::LENGTH + ipv6::LENGTH, &icmp)?;
    } else {
        let ip: Ipv4Header = frame.load(ethernet::LENGTH)?;
        frame.store(ethernet::LENGTH, &ip.answer())?;
        frame.store(ethernet::LENGTH + ipv4::LENGTH, &icmp)?;
    }
    let back = EthernetHeader {
        destination: header.source,
        source: header.destination,
        ethertype: header.ethertype,
    };
    frame.store(0, &back)
}

/// Reads the quote of an error whose IP header lies at `at`. [`Observed::quoted`] becomes the client's packet that the
/// quoted one would answer. Returns false if the packet is no error, or the error is not about the front's answer.
#[inline(never)]
fn read(frame: &TcFrame, at: u32, observed: &mut Observed) -> bool {
    let (packet, quoted) = (&observed.packet, &mut observed.quoted);
    let header = packet.header_length();
    let Some([first]) = frame.load_far::<[u16; 1]>(at + header) else {
        return false;
    };
    if !icmp::is_error(packet.is_v6(), first.to_ne_bytes()[0])
        || packet.length < 2 * header + ICMP + LEAST_QUOTE
    {
        return false;
    }
    let quote = at + header + ICMP;
    if inner::read(frame, front::ethertype(packet), 0, quote, quoted).is_err() || !quoted.has_ports() {
        return false;
    }
    quoted.turn();
    quoted.destination == packet.destination
}

/// Sends an error to the droplet of [`Work::home`]. None answers an error that does not fit.
#[inline(never)]
fn send(frame: &mut TcFrame, config: &ConfigEntry, observed: &mut Observed) -> Outcome {
    let Some((droplet, vni)) = Work::get().map(|work| (work.home.droplet, work.home.vni)) else {
        return Ok((TcFrame::PASS, None));
    };
    observed.next = droplet;
    let (packet, stamp) = (&observed.packet, observed.stamp);
    if too_big::exceeded(frame, config, packet, droplet).is_some() {
        return Err(Counter::TooBig);
    }
    let (class, hash) = (packet.traffic_class, flow::hash(packet));
    let sent = encapsulate(frame, config, droplet, vni, stamp, packet, class, hash)?;
    Ok(sent.map_or((TcFrame::PASS, None), |verdict| (verdict, Some(Counter::Fronted))))
}

/// Delivers a plain error to its backend.
#[inline(never)]
fn enter(frame: &mut TcFrame, observed: &Observed, work: &Work) -> Outcome {
    let local = maps::rows(&maps::key(observed.vni, work.to.destination)).local;
    translate(frame, PLAIN_IP, observed, work)?;
    let (verdict, _) = deliver::from_agent(frame, &local, front::ethertype(&observed.packet))?;
    Ok((verdict, Some(Counter::FrontErrors)))
}

/// Handles an ICMP packet that a front sent here.
#[inline(never)]
pub fn arrived(
    frame: &mut TcFrame,
    config: &ConfigEntry,
    outer: &Ipv4Header,
    observed: &mut Observed,
) -> Outcome {
    look_up(frame, config, observed)?;
    if observed.next != config.droplet {
        return front::pass_on(frame, config, outer, observed);
    }
    let_arrived_in(observed)?;
    unwrap(frame, outer, observed)
}

/// Does what [`find`] does, for an error that a front sent here.
#[inline(never)]
fn look_up(frame: &TcFrame, config: &ConfigEntry, observed: &mut Observed) -> Result<(), Counter> {
    let work = Work::get().ok_or(Counter::FrontErrorUnknown)?;
    let packet = &observed.packet;
    if !packet.is_from_outside()
        || maps::is_droplet_at(&packet.source)
        || !front::is_outside_of(observed.vni, &packet.source)
    {
        return Err(Counter::SourceMismatch);
    }
    if !read(frame, INNER_IP, observed) {
        return Err(Counter::FrontErrorUnknown);
    }
    find(config, observed, work)
}

#[inline(never)]
fn let_arrived_in(observed: &Observed) -> Result<(), Counter> {
    let_in(observed, Work::get().ok_or(Counter::FrontErrorUnknown)?)
}

/// Delivers an encapsulated error to its backend.
#[inline(never)]
fn unwrap(frame: &mut TcFrame, outer: &Ipv4Header, observed: &Observed) -> Outcome {
    let work = Work::get().ok_or(Counter::FrontErrorUnknown)?;
    let (vni, packet) = (observed.vni, &observed.packet);
    let local = maps::rows(&maps::key(vni, work.to.destination)).local;
    translate(frame, INNER_IP, observed, work)?;
    let length = ENCAPSULATION_LENGTH as u32;
    deliver::unwrap(frame, length, outer.traffic_class(), vni, &local, packet)?;
    Ok((frame.deliver(&local), Some(Counter::FrontErrors)))
}

/// Finds the connection of [`Observed::quoted`]: [`Work::to`] is the client's packet as the backend gets it.
/// [`Observed::next`] becomes the droplet that may know the connection, chosen as for a packet of it.
#[inline(never)]
fn find(config: &ConfigEntry, observed: &mut Observed, work: &mut Work) -> Result<(), Counter> {
    let (vni, by) = (observed.vni, observed.stamp.why());
    observed.next = config.droplet;
    if is_known(&observed.quoted, work, vni) {
        return Ok(());
    }
    // It opens nothing.
    work.signal = Signal::DATAGRAM;
    let Ok(why) = front::next(&observed.quoted, work, vni, by, config.droplet) else {
        return Err(Counter::FrontErrorUnknown);
    };
    if work.home.droplet == config.droplet || by >= AT_LAST {
        return Err(Counter::FrontErrorUnknown);
    }
    observed.next = work.home.droplet;
    observed.stamp = observed.stamp.with_why(why);
    Ok(())
}

/// Whether the packet is of a connection to an endpoint of this droplet, which has answered. The connection does not
/// become younger.
#[inline(never)]
fn is_known(quoted: &IpPacket, work: &mut Work, vni: u32) -> bool {
    work.set_key(vni, quoted, ARRIVING);
    let Some(entry) = maps::connection(&work.key) else {
        return false;
    };
    let Some(backend) = maps::other_side(entry, vni) else {
        return false;
    };
    front::set_leaving(work, &backend.address, [backend.port, backend.client_port]);
    let is_answered = maps::connection(&work.reverse).is_some_and(|back| back.state & SEEN != 0);
    if !is_answered || !front::is_endpoint_here(vni, backend.address) {
        return false;
    }
    work.begin(quoted);
    work.to.destination = backend.address;
    work.to.ports = [backend.client_port, backend.port];
    true
}

/// Lets an error in where policy lets the client of its connection in.
#[inline(always)]
fn let_in(observed: &Observed, work: &Work) -> Result<(), Counter> {
    let vni = observed.vni;
    let local = maps::rows(&maps::key(vni, work.to.destination)).local;
    if local.ifindex == 0 {
        return Err(Counter::NoEndpoint);
    }
    if local.flags & LOCAL_HAS_POLICY != 0 {
        policy::lets_in(vni, local.ifindex, observed.quoted.protocol, &work.to)?;
    }
    Ok(())
}

/// Gives an error, whose IP header lies at `at`, the backend's address as its destination, and its quote the answer's
/// address and ports as the backend sent it.
#[inline(never)]
fn translate(frame: &TcFrame, at: u32, observed: &Observed, work: &Work) -> Result<(), Counter> {
    if observed.packet.is_v6() {
        translate_v6(frame.skb(), at, observed, work)
    } else {
        translate_v4(frame.skb(), at, observed, work)
    }
}

/// Translates IPv4. The quoted header's checksum makes up for its address, so that ICMP's checksum changes with the
/// ports alone.
#[inline(always)]
fn translate_v4(skb: *mut __sk_buff, at: u32, observed: &Observed, work: &Work) -> Result<(), Counter> {
    const HEADER: u32 = ipv4::LENGTH as u32;
    let quote = at + HEADER + ICMP;
    let (old, new) = (word(&observed.packet.destination), word(&work.to.destination));
    let (from, to) = (u64::from(old), u64::from(new));
    // SAFETY: helpers on the program's own context, which check the offsets.
    done(unsafe { bpf_l3_csum_replace(skb, quote + 10, from, to, 4) })?;
    store(skb, quote + 12, &new, 0)?;
    ports(skb, at + HEADER + 2, quote + HEADER, observed, work)?;
    // SAFETY: as above.
    done(unsafe { bpf_l3_csum_replace(skb, at + 10, from, to, 4) })?;
    store(skb, at + 16, &new, 0)
}

/// Translates IPv6. ICMPv6's checksum covers all of the message, and the addresses of the packet itself.
#[inline(always)]
fn translate_v6(skb: *mut __sk_buff, at: u32, observed: &Observed, work: &Work) -> Result<(), Counter> {
    const HEADER: u32 = ipv6::LENGTH as u32;
    let (sum, quote) = (at + HEADER + 2, at + HEADER + ICMP);
    let new = &work.to.destination;
    let change = difference(&observed.packet.destination, new);
    // SAFETY: helper on the program's own context.
    done(unsafe { bpf_l4_csum_replace(skb, sum, 0, change, 0) })?;
    store(skb, quote + 8, new, 0)?;
    ports(skb, sum, quote + HEADER, observed, work)?;
    // SAFETY: as above.
    done(unsafe { bpf_l4_csum_replace(skb, sum, 0, change, u64::from(BPF_F_PSEUDO_HDR)) })?;
    store(skb, at + 24, new, u64::from(BPF_F_RECOMPUTE_CSUM))
}

/// Translates the quoted ports at `place`: source and destination of the answer.
#[inline(always)]
fn ports(skb: *mut __sk_buff, sum: u32, place: u32, observed: &Observed, work: &Work) -> Result<(), Counter> {
    let [client, front] = observed.quoted.ports;
    port(skb, sum, place, front, work.to.ports[1])?;
    port(skb, sum, place + 2, client, work.to.ports[0])
}
