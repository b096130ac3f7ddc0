//! Services: a client's packet to a service's address goes on to a backend, and the backend's answer comes from the
//! service's address again. Both happen at the client: at its agent and its veth.
//!
//! Invariant: a connection keeps its backend, no matter what happens to the service; with UDP only while the service
//! has the backend. Only a packet that no entry of CONNECTIONS knows gets a new choice, and every droplet chooses the
//! same.

use aya_ebpf::bindings::BPF_ANY;
use thuban_common::{
    counters::Counter,
    packet::{ethernet, ip::IpPacket, ipv4},
    services::{
        AffinityEntry, AffinityKey, BackendEntry, FORWARD, HAIRPIN, NO_INDEX, RESET, SERVICE_LOCAL,
        ServiceEntry, ServiceKey, other_port, slot,
    },
};

use crate::{
    connections::{self, Made},
    count::count,
    fragments,
    frame::{Frame, tc::TcFrame},
    gates,
    inner::signal,
    maps::{self, AFFINITY},
    pending, quoted,
    rewrite::rewrite,
    work::{Choice, Work, now},
};

/// The client's ports, or with SCTP slots, that are tried until the backend's answers wouldn't be another
/// connection's.
const ATTEMPTS: u32 = 4;

/// Finds the backend of a packet to an address of services.
#[inline(always)]
pub fn to_backend(frame: &TcFrame, vni: u32, packet: &IpPacket, work: &mut Work) -> Result<Choice, Counter> {
    let Some(whole) = fragments::whole(frame, vni, work.mark, packet, ethernet::LENGTH as u32)? else {
        return fragments::follow(work);
    };
    let choice = match lookup_connection(frame, vni, whole, work)? {
        // `lookup_connection` doesn't call this itself: together they are too deep for the stack.
        Choice::New => {
            // SAFETY: this function's only reference to either, and the call ends before one is used again.
            unsafe { service_choose(whole, work) };
            work.choice?
        }
        choice => choice,
    };
    if packet.is_fragment() && !matches!(choice, Choice::Refused) {
        fragments::remember(matches!(choice, Choice::Backend), work);
    }
    Ok(choice)
}

/// Decides by connections and rows.
#[inline(never)]
fn lookup_connection(
    frame: &TcFrame,
    vni: u32,
    packet: &IpPacket,
    work: &mut Work,
) -> Result<Choice, Counter> {
    if !packet.has_ports() {
        return Err(Counter::ServiceUnreadable);
    }
    work.signal = signal(frame, packet)?;
    work.begin(packet);
    work.set_key(vni, packet, FORWARD);
    if let Some(entry) = maps::connection(&work.key) {
        let goes_on = if packet.protocol == ipv4::UDP {
            // The entry that leads back stays for a while, because answers may still be on their way. If an answer
            // decided the backend, transitd's scan checks whether the service still has it.
            entry.index == NO_INDEX || connections::has_backend(work, packet, entry)
        } else {
            !work.signal.opens || connections::is_alive(work, packet, entry)
        };
        if goes_on && let Some(backend) = maps::other_side(entry, vni) {
            connections::touch(entry, &work.signal, packet.protocol);
            work.send_to(packet, &backend.address, backend.port);
            work.to.ports[0] = backend.client_port;
            return Ok(Choice::Backend);
        }
    } else {
        work.key.direction = HAIRPIN;
        if let Some(entry) = maps::connection(&work.key)
            && let Some(service) = maps::other_side(entry, vni)
        {
            connections::touch(entry, &work.signal, packet.protocol);
            work.to.source = service.address;
            work.to.ports = [service.port, service.client_port];
            work.to.destination = packet.source;
            return Ok(Choice::Backend);
        }
    }
    work.service.vni = vni;
    work.service.address = packet.destination;
    work.service.port = 0;
    work.service.protocol = 0;
    if !use_address(&work.service) {
        return pending::expect_answer(frame, packet, work);
    }
    work.service.port = packet.ports[1];
    work.service.protocol = packet.protocol;
    Ok(Choice::New)
}

/// Chooses a backend for a packet without a connection, and sets the choice. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn service_choose(packet: *const IpPacket, work: *mut Work) -> u32 {
    // SAFETY: the caller's promise.
    if let (Some(packet), Some(work)) = unsafe { (packet.as_ref(), work.as_mut()) } {
        work.choice = choose(packet, work);
    }
    0
}

#[inline(always)]
fn choose(packet: &IpPacket, work: &mut Work) -> Result<Choice, Counter> {
    let Some(service) = maps::service(&work.service) else {
        return Ok(Choice::Refused);
    };
    if service.slots == 0 {
        return if service.flags & SERVICE_LOCAL == 0 {
            Ok(Choice::Refused)
        } else {
            Err(Counter::NoBackend)
        };
    }
    let kept = kept(service, packet);
    let first = first_slot(packet, service, matches!(kept, Kept::Never));
    // SCTP's ports are in a checksum that only the ends can compute.
    let has_fixed_port = packet.protocol == ipv4::SCTP;
    for attempt in 0..ATTEMPTS {
        let step = if has_fixed_port { attempt } else { 0 };
        let index = match kept {
            Kept::Backend(index) if step == 0 => index,
            _ => {
                let slot = (first + step)
                    .checked_rem(service.slots)
                    .ok_or(Counter::NoBackend)?;
                maps::slot(service.table, slot).ok_or(Counter::NoBackend)?
            }
        };
        let backend = maps::backend(service.service, index).ok_or(Counter::NoBackend)?;
        work.send_to(packet, &backend.address, backend.port);
        if attempt != step {
            work.to.ports[0] = next_port(packet, attempt);
        }
        if work.signal.state & RESET != 0 {
            // No packet follows a reset.
            return Ok(Choice::Backend);
        }
        match connections::make(packet, work, service.service, index) {
            Made::Connection => {
                count(Counter::ServiceConnections);
                if service.affinity != 0 {
                    keep(service, packet, index, backend);
                }
                return Ok(Choice::Backend);
            }
            Made::NoRoom if work.to.ports[0] == packet.ports[0] => {
                count(Counter::ServiceStateless);
                pending::expect_from(packet, work);
                return Ok(Choice::Backend);
            }
            Made::NoRoom | Made::Collision => {}
        }
    }
    Err(Counter::ServiceCollision)
}

/// Calls [`slot`] with a stack of its own.
#[inline(never)]
pub fn first_slot(packet: &IpPacket, service: &ServiceEntry, keeps: bool) -> u32 {
    slot(packet, service, keeps)
}

/// Calls [`other_port`] with a stack of its own.
#[inline(never)]
pub fn next_port(packet: &IpPacket, attempt: u32) -> u16 {
    other_port(packet, attempt)
}

/// Finds, at a bouncer, the backend for a packet of another droplet's client, whose IP header lies at `offset`.
#[inline(always)]
pub fn to_backend_for_other(
    frame: &TcFrame,
    vni: u32,
    packet: &IpPacket,
    offset: u32,
    work: &mut Work,
) -> Result<(), Counter> {
    let Some(whole) = fragments::whole(frame, vni, 0, packet, offset)? else {
        return match fragments::follow(work)? {
            Choice::Backend => Ok(()),
            _ => Err(Counter::FragmentWithoutFirst),
        };
    };
    choose_for_other(vni, whole, work)?;
    if packet.is_fragment() {
        fragments::remember(true, work);
    }
    Ok(())
}

/// Chooses the backend that the client's agent would choose.
#[inline(never)]
fn choose_for_other(vni: u32, packet: &IpPacket, work: &mut Work) -> Result<(), Counter> {
    if !packet.has_ports() {
        return Err(Counter::ServiceUnreadable);
    }
    work.begin(packet);
    work.service.vni = vni;
    work.service.address = packet.destination;
    work.service.port = packet.ports[1];
    work.service.protocol = packet.protocol;
    let service = maps::service(&work.service)
        // This droplet's local backends are not for that client, whose droplet will have a row of its own.
        .filter(|service| service.flags & SERVICE_LOCAL == 0)
        .ok_or(Counter::NoBackend)?;
    let first = first_slot(packet, service, true);
    for attempt in 0..ATTEMPTS {
        let slot = (first + attempt)
            .checked_rem(service.slots)
            .ok_or(Counter::NoBackend)?;
        let index = maps::slot(service.table, slot).ok_or(Counter::NoBackend)?;
        let backend = maps::backend(service.service, index).ok_or(Counter::NoBackend)?;
        // Only the client's own agent can give the client its own packet.
        if backend.address != packet.source {
            work.send_to(packet, &backend.address, backend.port);
            return Ok(());
        }
    }
    Err(Counter::NoBackend)
}

/// Whether the address has a row; marks it as used. The mark is written once, to keep the cache line shared.
#[inline(always)]
fn use_address(key: &ServiceKey) -> bool {
    let Some(entry) = maps::SERVICES.get_ptr_mut(key) else {
        return false;
    };
    // SAFETY: an element of a map, see `maps`; `used` is a single word that user space clears. A mark on another
    // service keeps that one for a scan more.
    unsafe {
        if (*entry).used == 0 {
            (*entry).used = 1;
        }
    }
    true
}

/// The backend of a client's last connection.
enum Kept {
    /// The client is to keep it.
    Backend(u32),
    /// Its time is over, or the service no longer has it.
    Over,
    Never,
}

/// Returns the backend that the client is to keep.
#[inline(never)]
fn kept(service: &ServiceEntry, packet: &IpPacket) -> Kept {
    if service.affinity == 0 {
        return Kept::Never;
    }
    let key = AffinityKey {
        service: service.service,
        client: packet.source,
    };
    // SAFETY: words of a value that stays allocated (preallocated LRU).
    let Some(entry) = (unsafe { AFFINITY.get(&key) }) else {
        return Kept::Never;
    };
    let life = u64::from(service.affinity) * 1_000_000_000;
    let is_valid = now().wrapping_sub(entry.time) < life
        && maps::backend(service.service, entry.index).is_some_and(|backend| *backend == entry.backend);
    if is_valid {
        Kept::Backend(entry.index)
    } else {
        Kept::Over
    }
}

/// Has the client keep the backend for its next connections.
#[inline(never)]
fn keep(service: &ServiceEntry, packet: &IpPacket, index: u32, backend: &BackendEntry) {
    let key = AffinityKey {
        service: service.service,
        client: packet.source,
    };
    let entry = AffinityEntry {
        time: now(),
        index,
        backend: *backend,
    };
    let _ = AFFINITY.insert(&key, entry, u64::from(BPF_ANY));
}

/// Whether the endpoint behind an interface ever used a service.
#[inline(always)]
pub fn is_used(interface: u32) -> bool {
    gates::is_open(interface)
}

/// Whether answers to a packet that goes to another endpoint, not by a service, are that endpoint's, no matter what
/// its port was used for before. They are not if they belong to a connection to a service. With connections only the
/// first packet is checked.
#[inline(always)]
pub fn may_be_direct<F: Frame>(frame: &F, vni: u32, packet: &IpPacket) -> Result<bool, Counter> {
    let interface = frame.interface();
    if !gates::is_open(interface) || !packet.has_ports() {
        return Ok(true);
    }
    let decides = packet.protocol == ipv4::UDP || signal(frame, packet)?.opens;
    Ok(!decides || connections::yield_to(interface, vni, packet))
}

/// Whether an answer to an endpoint of this droplet may be a service's, so that tc must have it.
#[inline(always)]
pub fn may_be_answer(interface: u32, vni: u32, packet: &IpPacket) -> bool {
    gates::is_open(interface) && connections::may_be_answer(interface, vni, packet)
}

/// Gives an answer to the endpoint behind an interface its service's address back. The frame is a plain one.
#[inline(always)]
pub fn restore<F: Frame>(frame: &mut F, interface: u32, vni: u32, packet: &IpPacket) -> Result<(), Counter> {
    let Some(frame) = frame.tc() else {
        return Ok(());
    };
    if !gates::is_open(interface) {
        return Ok(());
    }
    let Some(work) = Work::get() else {
        return Ok(());
    };
    work.interface = interface;
    if quoted::is_error(packet) {
        quoted::restore(frame, vni, packet, work)
    } else if packet.is_fragment() {
        restore_fragment(frame, vni, packet, work)
    } else if connections::is_answer(frame, vni, packet, work)? {
        rewrite(frame, ethernet::LENGTH as u32, packet, &work.to)
    } else {
        Ok(())
    }
}

/// Does what [`restore`] does, for a fragment. Where no connection to a service is known, it stays as it is.
#[inline(always)]
fn restore_fragment(frame: &TcFrame, vni: u32, packet: &IpPacket, work: &mut Work) -> Result<(), Counter> {
    let is_answer = match fragments::whole(frame, vni, 0, packet, ethernet::LENGTH as u32) {
        Ok(Some(whole)) => {
            let is_answer = connections::is_answer(frame, vni, whole, work)?;
            if is_answer {
                fragments::remember(true, work);
            } else {
                fragments::forget_answer();
            }
            is_answer
        }
        Ok(None) => matches!(fragments::follow(work), Ok(Choice::Backend)),
        // Not a datagram.
        Err(_) => false,
    };
    if is_answer {
        rewrite(frame, ethernet::LENGTH as u32, packet, &work.to)
    } else {
        Ok(())
    }
}
