//! CONNECTIONS: the backend that a client's flow goes to, and the service that its answers come from.
//!
//! Invariant: an entry that leads to a backend stands only while one stands that leads back. Entries are written at a
//! change of state and at intervals, never for each packet. Only user space removes entries, except where a key is
//! used anew.

use aya_ebpf::{bindings::BPF_ANY, bindings::BPF_NOEXIST};
use thuban_common::{
    counters::Counter,
    packet::{ip::IpPacket, ipv4},
    services::{
        ConnectionEntry, FINISHED, FORWARD, HAIRPIN, NO_INDEX, PENDING_LIFE, PendingEntry, RESET, REVERSE,
        SEEN, ServiceKey, Signal, has_ended, refresh,
    },
};

use crate::{
    count::count,
    frame::tc::TcFrame,
    gates::{is_pending_open, open},
    inner::signal,
    maps::{self, CONNECTIONS, PENDING},
    pending::{acknowledges, pending_key},
    quoted,
    shares::{give_share, has_share, payer, take_share},
    work::{Work, now},
};

/// errno EEXIST.
const EXISTS: i32 = -17;
/// How long an entry that leads back may stand before its forward entry is written, ns: far longer than writing takes.
pub const MAKING: u64 = 1_000_000_000;
/// The result of making a connection.
pub enum Made {
    Connection,
    /// The table, or the client's or its VPC's share of it, is full.
    NoRoom,
    /// Its answers would be another connection's.
    Collision,
}

/// Notes a packet of the connection in this direction.
#[inline(always)]
pub fn touch(entry: &mut ConnectionEntry, signal: &Signal, protocol: u8) {
    let (now, state) = (now(), entry.state | signal.state);
    if state != entry.state {
        entry.state = state;
        entry.time = now;
    } else if now.wrapping_sub(entry.time) > refresh(protocol) {
        entry.time = now;
    }
}

/// Whether a connection goes on when its client opens it once more: neither side ended it, and the service still has
/// the backend. If not, both its entries are removed, so that the next backend that answers may be adopted.
#[inline(never)]
pub fn is_alive(work: &mut Work, packet: &IpPacket, entry: &ConnectionEntry) -> bool {
    let (vni, payer) = (work.key.vni, entry.payer);
    work.set_reverse(vni, packet, &entry.address, [entry.client_port, entry.port]);
    let reverse = maps::connection(&work.reverse).map_or(0, |reverse| reverse.state);
    let is_alive = has_backend(work, packet, entry) && (entry.state | reverse) & (FINISHED | RESET) == 0;
    if !is_alive {
        // A missing entry is as good.
        let _ = CONNECTIONS.remove(&work.reverse);
        let _ = CONNECTIONS.remove(&work.key);
        give_share(work, payer, &packet.source);
    }
    is_alive
}

/// Whether the service still has the backend of a connection.
#[inline(never)]
pub fn has_backend(work: &mut Work, packet: &IpPacket, entry: &ConnectionEntry) -> bool {
    if entry.index == NO_INDEX {
        // A row that has come since decides.
        work.service = ServiceKey {
            vni: work.key.vni,
            address: packet.destination,
            port: 0,
            protocol: 0,
            former: 0,
        };
        return maps::service(&work.service).is_none();
    }
    maps::backend(entry.service, entry.index)
        .is_some_and(|backend| backend.address == entry.address && backend.port == entry.port)
}

/// Removes entries of a service that would claim the answers to a packet which the endpoint sends to another endpoint
/// itself, by a port that it used before. Returns false if such an entry is a connection that still lives.
#[inline(never)]
pub fn yield_to(interface: u32, vni: u32, packet: &IpPacket) -> bool {
    let Some(work) = Work::get() else {
        return true;
    };
    work.set_reverse(vni, packet, &packet.destination, packet.ports);
    // Nothing tells the end of datagrams: the last packet counts.
    if !take_over(work, packet.protocol == ipv4::UDP) {
        return false;
    }
    !is_pending_open(interface, now()) || yield_pending(vni, packet, work)
}

#[inline(always)]
fn yield_pending(vni: u32, packet: &IpPacket, work: &mut Work) -> bool {
    work.pending = pending_key(vni, packet.source, packet.ports[0], packet.protocol);
    // SAFETY: words of a value that stays allocated (preallocated LRU).
    let Some(entry) = (unsafe { PENDING.get(&work.pending) }) else {
        return true;
    };
    let is_here = entry.backend == packet.destination && entry.backend_port == packet.ports[1];
    if packet.protocol != ipv4::UDP && is_here {
        // This is a connection that got no entry, and nothing tells of its end.
        return now().wrapping_sub(entry.time) > PENDING_LIFE;
    }
    // The backend would be the one that answers first, and this endpoint would be it. With TCP an answer must
    // acknowledge the packet that the service was sent.
    if is_here || entry.backend == [0; 16] && packet.protocol != ipv4::TCP {
        let _ = PENDING.remove(&work.pending);
    }
    true
}

/// Removes the connection whose answers [`Work::reverse`] finds, if it is over or `anyway`. Returns false if it stays.
#[inline(never)]
fn take_over(work: &mut Work, anyway: bool) -> bool {
    let Some(back) = maps::connection(&work.reverse) else {
        return true;
    };
    work.other = work.reverse;
    work.other.ports = [back.client_port, back.port];
    if work.reverse.direction != HAIRPIN {
        work.other.source = work.reverse.destination;
    }
    work.other.destination = back.address;
    work.other.direction = FORWARD;
    let Some(there) = maps::connection(&work.other).filter(|there| {
        // An entry that leads elsewhere by now doesn't belong to this one.
        there.address == work.reverse.source && [there.port, there.client_port] == work.reverse.ports
    }) else {
        // Another CPU may be about to write the forward entry.
        if now().wrapping_sub(back.time) < MAKING {
            return anyway;
        }
        let _ = CONNECTIONS.remove(&work.reverse);
        return true;
    };
    let payer = there.payer;
    if !has_ended(there.state, back.state) && !anyway {
        return false;
    }
    // A missing entry is as good.
    let _ = CONNECTIONS.remove(&work.other);
    let _ = CONNECTIONS.remove(&work.reverse);
    let client = work.other.source;
    give_share(work, payer, &client);
    true
}

/// Writes the entry that leads to [`Work::to`], after the one that leads back. Without room both are gone.
#[inline(always)]
pub fn lead_on(work: &mut Work, index: u32) -> bool {
    work.entry.address = work.to.destination;
    work.entry.port = work.to.ports[1];
    work.entry.client_port = work.to.ports[0];
    work.entry.state = work.signal.state;
    work.entry.index = index;
    let written = CONNECTIONS.insert(&work.key, &work.entry, u64::from(BPF_ANY));
    if written.is_err() {
        let _ = CONNECTIONS.remove(&work.reverse);
    }
    written.is_ok()
}

/// Writes both entries of a connection to [`Work::to`].
#[inline(never)]
pub fn make(packet: &IpPacket, work: &mut Work, service: u32, index: u32) -> Made {
    let vni = work.key.vni;
    let payer = payer(work.mark, vni);
    if !has_share(work, payer, &packet.source) {
        return Made::NoRoom;
    }
    let (backend, ports) = (work.to.destination, work.to.ports);
    work.set_reverse(vni, packet, &backend, ports);
    work.entry = ConnectionEntry::back(packet, vni, service, payer, now());
    match CONNECTIONS.insert(&work.reverse, &work.entry, u64::from(BPF_NOEXIST)) {
        Ok(()) => {}
        Err(EXISTS) => {
            let is_same = maps::connection(&work.reverse).is_some_and(|old| {
                old.address == packet.destination && [old.client_port, old.port] == packet.ports
            });
            if !is_same && !take_over(work, false) {
                return Made::Collision;
            }
            if CONNECTIONS
                .insert(&work.reverse, &work.entry, u64::from(BPF_ANY))
                .is_err()
            {
                return Made::NoRoom;
            }
        }
        Err(_) => return Made::NoRoom,
    }
    work.key.direction = FORWARD;
    if !lead_on(work, index) {
        return Made::NoRoom;
    }
    open(work.interface, 0);
    take_share(work, payer, &packet.source);
    Made::Connection
}

/// Whether tc must look at a packet to an endpoint of this droplet.
#[inline(never)]
pub fn may_be_answer(interface: u32, vni: u32, packet: &IpPacket) -> bool {
    let Some(work) = Work::get() else {
        return false;
    };
    if quoted::is_error(packet) || packet.is_fragment() {
        return true;
    }
    if !packet.has_ports() {
        return false;
    }
    work.set_key(vni, packet, REVERSE);
    if maps::connection(&work.key).is_some() {
        return true;
    }
    work.pending = pending_key(vni, packet.destination, packet.ports[1], packet.protocol);
    // SAFETY: words of a value that stays allocated (preallocated LRU).
    is_pending_open(interface, now()) && unsafe { PENDING.get(&work.pending) }.is_some()
}

/// Whether a packet to an endpoint of this droplet is an answer of a backend. If so, [`Work::to`] has its new
/// addresses and ports.
#[inline(never)]
pub fn is_answer(frame: &TcFrame, vni: u32, packet: &IpPacket, work: &mut Work) -> Result<bool, Counter> {
    if !packet.has_ports() {
        return Ok(false);
    }
    work.set_key(vni, packet, REVERSE);
    work.begin(packet);
    work.signal = signal(frame, packet)?;
    if let Some(entry) = maps::connection(&work.key)
        && let Some(service) = maps::other_side(entry, vni)
    {
        if !is_superseded(frame, vni, packet, work, entry)? {
            touch(entry, &work.signal, packet.protocol);
            work.to.source = service.address;
            work.to.ports = [service.port, service.client_port];
            return Ok(true);
        }
        work.reverse = work.key;
        take_over(work, true);
    }
    if !is_pending_open(work.interface, now()) {
        return Ok(false);
    }
    take_pending(frame, vni, packet, work)
}

/// Whether the client has since used the port of this connection for another service, whose backend an answer decides.
/// If so, the packet is an answer of that service. With TCP it must acknowledge the packet that the other service was
/// sent.
#[inline(never)]
fn is_superseded(
    frame: &TcFrame,
    vni: u32,
    packet: &IpPacket,
    work: &mut Work,
    connection: &ConnectionEntry,
) -> Result<bool, Counter> {
    if !work.signal.decides || !is_pending_open(work.interface, now()) {
        return Ok(false);
    }
    work.pending = pending_key(vni, packet.destination, packet.ports[1], packet.protocol);
    // SAFETY: words of a value that stays allocated (preallocated LRU).
    let Some(entry) = (unsafe { PENDING.get(&work.pending) }) else {
        return Ok(false);
    };
    if entry.backend != [0; 16] || entry.time < connection.time {
        return Ok(false);
    }
    Ok(packet.protocol != ipv4::TCP || acknowledges(frame, packet, entry)?)
}

/// Whether the packet answers a pending flow.
#[inline(never)]
fn take_pending(frame: &TcFrame, vni: u32, packet: &IpPacket, work: &mut Work) -> Result<bool, Counter> {
    work.pending = pending_key(vni, packet.destination, packet.ports[1], packet.protocol);
    let Some(entry) = PENDING.get_ptr_mut(&work.pending) else {
        return Ok(false);
    };
    // SAFETY: words of a value that stays allocated (preallocated LRU).
    let entry = unsafe { &mut *entry };
    if now().wrapping_sub(entry.time) > PENDING_LIFE {
        return Ok(false);
    }
    work.to.source = entry.service;
    work.to.ports[0] = entry.service_port;
    if entry.backend != [0; 16] {
        return Ok(entry.backend == packet.source && entry.backend_port == packet.ports[0]);
    }
    if !work.signal.decides {
        return Ok(false);
    }
    if packet.protocol == ipv4::TCP && !acknowledges(frame, packet, entry)? {
        return Ok(false);
    }
    Ok(adopt(packet, work, entry))
}

/// Makes the sender of the answer the flow's backend, unless the flow has one.
#[inline(always)]
fn adopt(packet: &IpPacket, work: &mut Work, entry: &mut PendingEntry) -> bool {
    let vni = work.key.vni;
    work.reverse = work.key;
    work.key.ports = [packet.ports[1], entry.service_port];
    work.key.source = packet.destination;
    work.key.destination = entry.service;
    work.key.direction = FORWARD;
    if maps::connection(&work.key).is_some() {
        return false;
    }
    work.entry.vni = vni;
    work.entry.time = now();
    work.entry.address = entry.service;
    work.entry.port = entry.service_port;
    work.entry.state = work.signal.state;
    work.entry.index = NO_INDEX;
    work.entry.client_port = packet.ports[1];
    let payer = entry.payer;
    work.entry.payer = payer;
    let is_made = has_share(work, payer, &packet.destination)
        && CONNECTIONS
            .insert(&work.reverse, &work.entry, u64::from(BPF_ANY))
            .is_ok();
    if is_made {
        work.entry.address = packet.source;
        work.entry.port = packet.ports[0];
        work.entry.state = SEEN;
        let _ = CONNECTIONS.insert(&work.key, &work.entry, u64::from(BPF_ANY));
        // A flow that stays in PENDING would claim everything else that comes to this port.
        let _ = PENDING.remove(&work.pending);
        take_share(work, payer, &packet.destination);
        count(Counter::ServiceConnections);
    } else {
        entry.backend = packet.source;
        entry.backend_port = packet.ports[0];
        count(Counter::ServiceStateless);
    }
    true
}
