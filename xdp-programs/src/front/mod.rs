//! Fronts: addresses of load balancers, outside of all VPCs, whose packets any droplet takes at its NIC (ADR 39).
//!
//! A front leaves a client's packet as it is and sends it to the droplet of a backend. That droplet chooses the same
//! backend by the same table, translates the packet, and remembers the connection. The backend's answer leaves the node
//! there, from the front's address. Fronts remember nothing, so a flow may pass from one to another.
//!
//! A front of mode Tunnel names itself in the packet's stamp, because the underlay may drop answers of nodes that don't
//! announce the address (ADR 48). The backend's droplet remembers the front of the connection's latest packet, and its
//! agent sends answers there, through the tunnel. That front sends them to the client.
//!
//! Invariant: a packet reaches an endpoint only by rows of the endpoint's own droplet, which name both the front and
//! the VPC. An answer leaves only if a packet of its connection was let in. A front sends another droplet's answer only
//! by its own rows, to a client that it would take packets of. A packet that shows no ports, or that no front serves,
//! is left to the node's stack. So is ICMP, except what [`crate::front_icmp`] takes.

mod answers;
mod choice;
mod connection;

use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        flow,
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
        ipv6,
    },
    policy::{ANSWER, BY_TABLE, Stamp},
    services::{ARRIVING, CONFIRMED, NO_INDEX, RESET, Signal, TUNNELLED},
    tables::{Address, ConfigEntry, ENCAPSULATION_LENGTH, LOCAL_HAS_POLICY, NO_DROPLET, SUBNET_CLOSED},
};

pub use answers::{answer, is_answer};
pub use choice::{NOW, chooses, next};
use choice::{begin, may_begin};
use connection::{connection, make};
pub use connection::{is_endpoint_here, set_leaving};

use crate::{
    bounce, deliver,
    encapsulate::encapsulate,
    frame::{Frame, Outcome, tc::TcFrame},
    front_icmp, gates, inner, maps, policy,
    rewrite::rewrite,
    too_big,
    trace::Observed,
    transit::INNER_IP,
    work::Work,
};

/// Bytes of Ethernet, IPv6 and the part that is read of the transport header.
const HEADERS: u32 = (ethernet::LENGTH + ipv6::LENGTH + 20) as u32;
/// Where the IP header of a plain frame begins.
pub const PLAIN_IP: u32 = ethernet::LENGTH as u32;

/// What a front says of a packet whose answers it does not want.
pub const STAMP: Stamp = Stamp::of_front(BY_TABLE, NO_DROPLET);

/// Takes a packet that is not Geneve, if it is for a front; else it is the host's.
#[inline(always)]
pub fn take<F: Frame>(frame: &mut F, config: &ConfigEntry, observed: &mut Observed) -> Outcome {
    if !maps::has_fronts() || !is_readable(frame, observed) {
        return Ok((F::PASS, None));
    }
    if front_icmp::is_icmp(&observed.packet) {
        return match frame.tc() {
            Some(tc) => front_icmp::take(tc, config, observed),
            None => Ok((F::PASS, None)),
        };
    }
    if !is_fronts(&observed.packet) {
        return Ok((F::PASS, None));
    }
    let Some(work) = Work::get() else {
        return Ok((F::PASS, None));
    };
    observed.vni = work.home.vni;
    observed.stamp = if work.is_tunnel {
        Stamp::of_front(BY_TABLE, config.droplet)
    } else {
        STAMP
    };
    if !admits(&observed.packet, observed.vni) {
        return Err(Counter::OutOfSourceRanges);
    }
    if work.home.droplet == config.droplet {
        let Some(tc) = frame.tc() else {
            return Ok((F::PASS, None));
        };
        find_plain(tc, config, observed)?;
        if observed.next == config.droplet {
            return deliver_here(tc, observed);
        }
    }
    send(frame, config, observed)
}

/// Whether the packet's client may send to the front.
#[inline(never)]
pub fn admits(packet: &IpPacket, vni: u32) -> bool {
    maps::admits(vni, packet.destination, packet.source)
}

/// Whether a frame is for this node and has an IP packet, which is read then.
#[inline(never)]
fn is_readable<F: Frame>(frame: &mut F, observed: &mut Observed) -> bool {
    frame.make_linear(HEADERS);
    let Some(header) = frame.load::<EthernetHeader>(0) else {
        return false;
    };
    if frame.is_vlan_tagged() || !frame.is_for_node() {
        return false;
    }
    inner::read(frame, header.ethertype, ethernet::LENGTH, 0, &mut observed.packet).is_ok()
}

/// Whether a packet is for a front with a backend, which [`Work::home`] has then.
#[inline(never)]
fn is_fronts(packet: &IpPacket) -> bool {
    is_clients(packet) && Work::get().is_some_and(|work| chooses(packet, work, NOW))
}

/// Whether a packet is one of a client outside. Nodes ask by their own stack.
#[inline(always)]
fn is_clients(packet: &IpPacket) -> bool {
    packet.has_ports() && packet.is_from_outside() && !maps::is_droplet_at(&packet.source)
}

/// Sends a packet to the droplet of its backend.
#[inline(never)]
fn send<F: Frame>(frame: &mut F, config: &ConfigEntry, observed: &mut Observed) -> Outcome {
    let Some((droplet, vni)) = Work::get().map(|work| (work.home.droplet, work.home.vni)) else {
        return Ok((F::PASS, None));
    };
    observed.next = droplet;
    let packet = &observed.packet;
    if let Some(mtu) = too_big::exceeded(frame, config, packet, droplet) {
        return if may_be_fragmented(frame, packet) {
            // The node's stack does that.
            Ok((F::PASS, None))
        } else {
            too_big::answer_outside(frame, packet, mtu)
        };
    }
    let (stamp, class, hash) = (observed.stamp, packet.traffic_class, flow::hash(packet));
    let sent = encapsulate(frame, config, droplet, vni, stamp, packet, class, hash)?;
    Ok(sent.map_or((F::PASS, None), |verdict| (verdict, Some(Counter::Fronted))))
}

/// Whether routers may fragment a datagram.
#[inline(always)]
fn may_be_fragmented<F: Frame>(frame: &F, packet: &IpPacket) -> bool {
    const DONT: u16 = 0x4000;
    let word: Option<[u16; 1]> = frame.load(ethernet::LENGTH + 6);
    packet.protocol == ipv4::UDP
        && !packet.is_v6()
        && word.is_some_and(|[word]| u16::from_be(word) & DONT == 0)
}

/// Does what [`find`] does, for a packet that this droplet took as a front.
#[inline(never)]
fn find_plain(frame: &TcFrame, config: &ConfigEntry, observed: &mut Observed) -> Result<(), Counter> {
    let work = Work::get().ok_or(Counter::FrontUnknown)?;
    find(frame, config, PLAIN_IP, observed, work)
}

/// Delivers a packet that this droplet took as a front and has the backend of.
#[inline(never)]
fn deliver_here(frame: &mut TcFrame, observed: &Observed) -> Outcome {
    let work = Work::get().ok_or(Counter::FrontUnknown)?;
    let_in(observed, work)?;
    enter(frame, observed, work)
}

/// Delivers a plain packet to its backend.
#[inline(never)]
fn enter(frame: &mut TcFrame, observed: &Observed, work: &Work) -> Outcome {
    let packet = &observed.packet;
    let local = maps::rows(&maps::key(observed.vni, work.to.destination)).local;
    rewrite(frame, PLAIN_IP, packet, &work.to)?;
    let (verdict, _) = deliver::from_agent(frame, &local, ethertype(packet))?;
    Ok((verdict, Some(Counter::FrontDelivered)))
}

/// Handles a packet that a front sent here, or an answer to one that this droplet sent as a front.
#[inline(always)]
pub fn arrive<F: Frame>(
    frame: &mut F,
    config: &ConfigEntry,
    outer: &Ipv4Header,
    options: u32,
    observed: &mut Observed,
) -> Outcome {
    if options != 0 {
        // No droplet of ours sends such a packet.
        return Err(Counter::BadHeader);
    }
    match frame.tc() {
        Some(tc) if observed.stamp.why() == ANSWER => answers::arrived(tc, config, outer, observed),
        Some(tc) if front_icmp::is_icmp(&observed.packet) => front_icmp::arrived(tc, config, outer, observed),
        Some(tc) => arrived(tc, config, outer, observed),
        None => Ok((F::PASS, None)),
    }
}

#[inline(never)]
fn arrived(
    frame: &mut TcFrame,
    config: &ConfigEntry,
    outer: &Ipv4Header,
    observed: &mut Observed,
) -> Outcome {
    let work = Work::get().ok_or(Counter::FrontUnknown)?;
    find(frame, config, INNER_IP, observed, work)?;
    if observed.next != config.droplet {
        return pass_on(frame, config, outer, observed);
    }
    let_in(observed, work)?;
    unwrap(frame, outer, observed, work)
}

/// Sends a packet of a front on to another droplet.
#[inline(never)]
pub fn pass_on(
    frame: &mut TcFrame,
    config: &ConfigEntry,
    outer: &Ipv4Header,
    observed: &Observed,
) -> Outcome {
    let header = observed.stamp.header(ethertype(&observed.packet));
    frame
        .store(ENCAPSULATION_LENGTH, &header)
        .ok_or(Counter::Truncated)?;
    let sent = bounce::hop(frame, config, outer, observed.next)?;
    Ok(sent.map_or((TcFrame::PASS, None), |verdict| {
        (verdict, Some(Counter::Forwarded))
    }))
}

/// Delivers an encapsulated packet to its backend.
#[inline(never)]
fn unwrap(frame: &mut TcFrame, outer: &Ipv4Header, observed: &Observed, work: &Work) -> Outcome {
    let (vni, packet) = (observed.vni, &observed.packet);
    let local = maps::rows(&maps::key(vni, work.to.destination)).local;
    rewrite(frame, INNER_IP, packet, &work.to)?;
    let length = ENCAPSULATION_LENGTH as u32;
    deliver::unwrap(frame, length, outer.traffic_class(), vni, &local, packet)?;
    Ok((frame.deliver(&local), Some(Counter::FrontDelivered)))
}

/// Finds the backend of a client's packet, [`Work::to`]. [`Observed::next`] becomes the droplet that the packet is for.
#[inline(always)]
fn find(
    frame: &TcFrame,
    config: &ConfigEntry,
    offset: u32,
    observed: &mut Observed,
    work: &mut Work,
) -> Result<(), Counter> {
    look_up(frame, offset, observed, work)?;
    if !work.is_known {
        return begin(config, observed, work);
    }
    observed.next = config.droplet;
    Ok(())
}

/// Checks a client's packet, and finds its connection. [`Work::answers_by`] has the droplet that wants the answers.
#[inline(never)]
fn look_up(frame: &TcFrame, offset: u32, observed: &Observed, work: &mut Work) -> Result<(), Counter> {
    let (vni, packet) = (observed.vni, &observed.packet);
    // The backend's answer to an address of the VPC would belong to the VPC.
    if !is_clients(packet) || !is_outside_of(vni, &packet.source) {
        return Err(Counter::SourceMismatch);
    }
    work.signal = signal(frame, packet, offset)?;
    if work.signal.confirms {
        work.signal.state |= CONFIRMED;
    }
    work.answers_by = NO_INDEX;
    let front = observed.stamp.front();
    if front != NO_DROPLET {
        work.answers_by = u32::from_ne_bytes(front);
        work.signal.state |= TUNNELLED;
    }
    work.set_key(vni, packet, ARRIVING);
    work.begin(packet);
    work.is_known = !may_begin(packet, work) && connection(work, vni);
    Ok(())
}

/// Whether no network of the VPC has an address.
#[inline(never)]
pub fn is_outside_of(vni: u32, address: &Address) -> bool {
    maps::subnet(vni, *address).is_none_or(|subnet| subnet.flags & SUBNET_CLOSED != 0)
}

/// Lets a packet to [`Work::to`] in, by policy, and remembers its connection.
#[inline(never)]
fn let_in(observed: &Observed, work: &mut Work) -> Result<(), Counter> {
    let (vni, packet) = (observed.vni, &observed.packet);
    let local = maps::rows(&maps::key(vni, work.to.destination)).local;
    if local.ifindex == 0 {
        return Err(Counter::NoEndpoint);
    }
    if local.flags & LOCAL_HAS_POLICY != 0 {
        policy::lets_in(vni, local.ifindex, packet.protocol, &work.to)?;
    }
    // No packet follows a reset.
    if !work.is_known && work.signal.state & RESET == 0 {
        make(packet, work, vni)?;
    }
    gates::open_for_fronts(local.ifindex);
    Ok(())
}

#[inline(always)]
pub const fn ethertype(packet: &IpPacket) -> u16 {
    if packet.is_v6() {
        ethernet::IPV6
    } else {
        ethernet::IPV4
    }
}

/// Returns the meaning of the transport header of a packet whose IP header lies at `offset`.
#[inline(always)]
fn signal(frame: &TcFrame, packet: &IpPacket, offset: u32) -> Result<Signal, Counter> {
    if packet.protocol == ipv4::UDP {
        return Ok(Signal::DATAGRAM);
    }
    let word: [u16; 1] = frame
        .load_far(offset + packet.header_length() + Signal::OFFSET as u32)
        .ok_or(Counter::Truncated)?;
    Ok(Signal::read(packet.protocol, word[0]))
}
