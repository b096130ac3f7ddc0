//! Fronts: addresses of load balancers, outside of all VPCs, whose packets any droplet takes at its NIC (ADR 39).
//!
//! A front leaves a client's packet as it is and sends it to the droplet of a backend. That droplet chooses the same
//! backend by the same table, translates the packet, and remembers the connection. The backend's answer leaves the node
//! there, from the front's address. Fronts remember nothing, so a flow may pass from one to another.
//!
//! Invariant: a packet reaches an endpoint only by rows of the endpoint's own droplet, which name both the front and
//! the VPC. An answer leaves only if a packet of its connection was let in. A packet that shows no ports, or that no
//! front serves, is left to the node's stack. So is ICMP, except what [`crate::front_icmp`] takes.

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        flow,
        ip::IpPacket,
        ipv4::{self, Ipv4Header},
        ipv6,
    },
    policy::{STAMP_FRONT, Stamp},
    services::{
        ARRIVING, BackendKey, CONFIRMED, ConnectionEntry, FINISHED, FRONTS, LEAVING, RESET, SEEN, ServiceKey,
        Signal, has_connections, has_ended,
    },
    tables::{
        Address, AttachmentEntry, ConfigEntry, DropletAddress, ENCAPSULATION_LENGTH, GENEVE_PORT,
        LOCAL_HAS_POLICY, SUBNET_CLOSED,
    },
};

use crate::{
    bounce,
    connections::{self, MAKING, Made, lead_on},
    deliver,
    encapsulate::encapsulate,
    frame::{Frame, Outcome, tc::TcFrame},
    front_icmp, gates, inner,
    maps::{self, CONNECTIONS},
    meter, policy,
    rewrite::rewrite,
    service,
    shares::{give_share_of_vpc, has_share_of_fronts, take_share_of_vpc},
    too_big,
    trace::Observed,
    transit::INNER_IP,
    work::{Work, now},
};

/// Bytes of Ethernet, IPv6 and the part that is read of the transport header.
const HEADERS: u32 = (ethernet::LENGTH + ipv6::LENGTH + 20) as u32;
/// Where the IP header of a plain frame begins.
pub const PLAIN_IP: u32 = ethernet::LENGTH as u32;
/// The most ports that a client is given towards a backend.
const ATTEMPTS: u32 = 4;

/// What a front says of its packet: the class says why the droplet gets it.
pub const STAMP: Stamp = Stamp {
    class: BY_TABLE,
    egress_set: 0,
    flags: STAMP_FRONT,
};
/// The front's table says so.
const BY_TABLE: u32 = 0;
/// A droplet that does not know the connection says so, by the table before the last change.
const BY_FORMER: u32 = 1;
/// A droplet says so that another one asked in vain. The packet goes no further.
pub const AT_LAST: u32 = 2;

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
    observed.stamp = STAMP;
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

/// [`ServiceKey::former`] of the table that new connections use, and of the one before it.
pub const NOW: u32 = 0;
const BEFORE: u32 = 1;

/// Chooses the backend of a packet to a front: [`Work::backend`], [`Work::home`] and the packet's new destination.
/// Returns 0 if there is none. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn front_choose(packet: *const IpPacket, work: *mut Work, table: u32) -> u32 {
    // SAFETY: the caller's promise.
    if let (Some(packet), Some(work)) = unsafe { (packet.as_ref(), work.as_mut()) } {
        return choose(packet, work, table as u8).is_some().into();
    }
    0
}

#[inline(always)]
fn choose(packet: &IpPacket, work: &mut Work, table: u8) -> Option<()> {
    work.service = ServiceKey {
        vni: FRONTS,
        address: packet.destination,
        port: packet.ports[1],
        protocol: packet.protocol,
        former: table,
    };
    let service = maps::service(&work.service).filter(|service| service.slots != 0)?;
    let slot = service::first_slot(packet, service, true);
    work.backend = BackendKey {
        service: service.service,
        index: maps::slot(service.table, slot)?,
    };
    let backend = maps::backend(work.backend.service, work.backend.index)?;
    work.begin(packet);
    work.to.destination = backend.address;
    work.to.ports[1] = backend.port;
    (maps::read_home(&work.backend, &mut work.home) && work.home.is_for(packet)).then_some(())
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

/// Handles a packet that a front sent here.
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

/// Checks a client's packet, and finds its connection.
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

/// Chooses the backend of a packet of no connection that this droplet knows.
#[inline(never)]
fn begin(config: &ConfigEntry, observed: &mut Observed, work: &mut Work) -> Result<(), Counter> {
    let (vni, by, packet) = (observed.vni, observed.stamp.class, &observed.packet);
    let class = next(packet, work, vni, by, config.droplet)?;
    observed.next = work.home.droplet;
    if observed.next == config.droplet {
        work.is_known = may_begin(packet, work) && goes_on(work, vni);
        return Ok(());
    }
    if by >= AT_LAST {
        return Err(Counter::WouldReturn);
    }
    observed.stamp.class = class;
    Ok(())
}

/// Chooses the backend of such a packet: [`Work::home`] says where it is. `by`: why this droplet, `here`, has the
/// packet. Returns why the other one gets it.
#[inline(always)]
pub fn next(
    packet: &IpPacket,
    work: &mut Work,
    vni: u32,
    by: u32,
    here: DropletAddress,
) -> Result<u32, Counter> {
    // What goes on may have begun before the table's last change. Then the droplet of the former backend knows it.
    if !may_begin(packet, work) && by == BY_TABLE {
        chosen(packet, work, vni, NOW);
        work.other.destination = work.to.destination;
        work.other.ports[1] = work.to.ports[1];
        if chosen(packet, work, vni, BEFORE) && is_former(work, here) {
            return Ok(BY_FORMER);
        }
    }
    if chosen(packet, work, vni, NOW) {
        Ok(AT_LAST)
    } else {
        Err(Counter::FrontUnknown)
    }
}

/// Whether the droplet of the chosen backend, of the table before the last change, is to be asked: not if the backend
/// only moved, nor if this droplet would have to ask itself.
#[inline(always)]
fn is_former(work: &Work, here: DropletAddress) -> bool {
    let is_same = work.other.destination == work.to.destination && work.other.ports[1] == work.to.ports[1];
    !is_same && work.home.droplet != here
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

/// Whether the packet's front has a backend in the VPC by a table. [`Work`] has it then.
#[inline(always)]
fn chosen(packet: &IpPacket, work: &mut Work, vni: u32, table: u32) -> bool {
    chooses(packet, work, table) && work.home.vni == vni
}

/// Whether the packet's front has a backend by a table. [`Work`] has it then.
#[inline(always)]
pub fn chooses(packet: &IpPacket, work: &mut Work, table: u32) -> bool {
    // SAFETY: the caller's only reference to either, and the call ends before one is used again.
    unsafe { front_choose(packet, work, table) != 0 }
}

/// Whether a packet may begin a connection. Such a packet goes where the table says.
#[inline(always)]
fn may_begin(packet: &IpPacket, work: &Work) -> bool {
    work.signal.opens || !has_connections(packet.protocol)
}

/// Whether the packet is of a connection to an endpoint that is still here. Then [`Work::to`] has the endpoint.
#[inline(never)]
fn connection(work: &mut Work, vni: u32) -> bool {
    let Some(entry) = maps::connection(&work.key) else {
        return false;
    };
    let Some(backend) = maps::other_side(entry, vni) else {
        return false;
    };
    if !is_endpoint_here(vni, backend.address) {
        return false;
    }
    work.to.destination = backend.address;
    work.to.ports = [backend.client_port, backend.port];
    touch(entry, work);
    true
}

#[inline(always)]
pub fn is_endpoint_here(vni: u32, address: Address) -> bool {
    maps::rows(&maps::key(vni, address)).is_here()
}

/// Notes a client's packet. One that comes after a reset shows that somebody else sent the reset.
#[inline(always)]
fn touch(entry: &mut ConnectionEntry, work: &Work) {
    if work.signal.state & RESET == 0 {
        entry.state &= !RESET;
    }
    connections::touch(entry, &work.signal, work.key.protocol);
}

/// Whether a packet that may begin a connection is of one to the chosen backend that neither side has ended, or of any
/// one that lives: whoever claims to be the client ends nothing. A client that begins anew is reset by the old backend.
/// Any other connection is forgotten.
#[inline(always)]
fn goes_on(work: &mut Work, vni: u32) -> bool {
    let Some(entry) = maps::connection(&work.key) else {
        return false;
    };
    let Some(backend) = maps::other_side(entry, vni) else {
        return false;
    };
    set_leaving(work, &backend.address, [backend.port, backend.client_port]);
    let back = maps::connection(&work.reverse).map_or(0, |back| back.state);
    let is_same = work.to.destination == backend.address && work.to.ports[1] == backend.port;
    let goes_on = if is_same {
        (entry.state | back) & (FINISHED | RESET) == 0
    } else {
        let is_answered = entry.state & CONFIRMED != 0 && back & SEEN != 0;
        is_answered && !has_ended(entry.state & !RESET, back) && is_endpoint_here(vni, backend.address)
    };
    if goes_on {
        work.to.destination = backend.address;
        work.to.ports = [backend.client_port, backend.port];
        touch(entry, work);
        return true;
    }
    // A missing entry is as good: then who removed it gave its share back.
    let _ = CONNECTIONS.remove(&work.reverse);
    if CONNECTIONS.remove(&work.key).is_ok() {
        give_share_of_vpc(work, vni);
    }
    false
}

/// Sets the key by which answers of a backend are found. `ports`: the backend's, and the client's as the backend sees
/// it.
#[inline(always)]
pub fn set_leaving(work: &mut Work, backend: &Address, ports: [u16; 2]) {
    work.reverse = work.key;
    work.reverse.destination = work.key.source;
    work.reverse.source = *backend;
    work.reverse.ports = ports;
    work.reverse.direction = LEAVING;
}

/// Remembers a connection to [`Work::to`]. It counts in the share of the VPC alone: clients may claim any address. The
/// client gets another port towards the backend if its own is taken there, by a connection to another front.
#[inline(never)]
fn make(packet: &IpPacket, work: &mut Work, vni: u32) -> Result<(), Counter> {
    if !has_share_of_fronts(work, vni) {
        return Err(Counter::FrontNoRoom);
    }
    work.entry = ConnectionEntry::back(packet, vni, work.backend.service, vni, now());
    let mut made = lead_back(work, vni);
    for attempt in 1..ATTEMPTS {
        // SCTP's ports are in a checksum that only the ends can compute.
        if !matches!(made, Made::Collision) || packet.protocol == ipv4::SCTP {
            break;
        }
        work.to.ports[0] = service::next_port(packet, attempt);
        made = lead_back(work, vni);
    }
    match made {
        Made::Connection => {}
        Made::Collision => return Err(Counter::ServiceCollision),
        Made::NoRoom => return Err(Counter::FrontNoRoom),
    }
    if !lead_on(work, work.backend.index) {
        return Err(Counter::FrontNoRoom);
    }
    take_share_of_vpc(work, vni);
    Ok(())
}

/// Writes [`Work::entry`], by which answers of [`Work::to`] are found, unless another connection has it.
#[inline(never)]
fn lead_back(work: &mut Work, vni: u32) -> Made {
    let (backend, ports) = (work.to.destination, [work.to.ports[1], work.to.ports[0]]);
    set_leaving(work, &backend, ports);
    if CONNECTIONS
        .insert(&work.reverse, &work.entry, u64::from(BPF_NOEXIST))
        .is_ok()
    {
        return Made::Connection;
    }
    let Some(old) = maps::connection(&work.reverse) else {
        return Made::NoRoom;
    };
    let (address, ports) = (work.entry.address, [work.entry.client_port, work.entry.port]);
    let is_same = old.address == address && [old.client_port, old.port] == ports;
    if !is_same && !is_over(work, old, vni) {
        return Made::Collision;
    }
    match CONNECTIONS.insert(&work.reverse, &work.entry, u64::from(BPF_ANY)) {
        Ok(()) => Made::Connection,
        Err(_) => Made::NoRoom,
    }
}

/// Whether the connection of an entry that leads back is over: the client uses its port for another front with this
/// backend. If so, its other entry is removed.
#[inline(always)]
fn is_over(work: &mut Work, back: &ConnectionEntry, vni: u32) -> bool {
    work.other = work.key;
    work.other.destination = back.address;
    work.other.ports = [back.client_port, back.port];
    // An entry that leads elsewhere by now doesn't belong to this one.
    let Some(there) = maps::connection(&work.other).filter(|there| {
        there.address == work.reverse.source && [there.port, there.client_port] == work.reverse.ports
    }) else {
        // Another CPU may be about to write it.
        return now().wrapping_sub(back.time) >= MAKING;
    };
    // A backend that was reset says so itself, and whoever claims to be the client resets nothing.
    let is_over = has_ended(there.state & !RESET, back.state);
    if is_over && CONNECTIONS.remove(&work.other).is_ok() {
        give_share_of_vpc(work, vni);
    }
    is_over
}

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
