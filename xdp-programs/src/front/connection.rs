//! Connections of clients to backends of fronts, which the droplet of the backend remembers.

use aya_ebpf::bindings::{BPF_ANY, BPF_NOEXIST};
use thuban_common::{
    counters::Counter,
    packet::{ip::IpPacket, ipv4},
    services::{CONFIRMED, ConnectionEntry, FINISHED, LEAVING, RESET, SEEN, TUNNELLED, has_ended},
    tables::Address,
};

use crate::{
    connections::{self, MAKING, Made, lead_on},
    maps::{self, CONNECTIONS},
    service,
    shares::{give_share_of_vpc, has_share_of_fronts, take_share_of_vpc},
    work::{Work, now},
};

/// The most ports that a client is given towards a backend.
const ATTEMPTS: u32 = 4;

/// Whether the packet is of a connection to an endpoint that is still here. Then [`Work::to`] has the endpoint.
#[inline(never)]
pub(super) fn connection(work: &mut Work, vni: u32) -> bool {
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
    touch(entry, work, vni);
    true
}

#[inline(always)]
pub fn is_endpoint_here(vni: u32, address: Address) -> bool {
    maps::rows(&maps::key(vni, address)).is_here()
}

/// Notes a client's packet to [`Work::to`], and by which droplet answers leave from now on. A packet that comes after a
/// reset shows that somebody else sent the reset.
#[inline(always)]
fn touch(entry: &mut ConnectionEntry, work: &mut Work, vni: u32) {
    if work.signal.state & RESET == 0 {
        entry.state &= !RESET;
    }
    connections::touch(entry, &work.signal, work.key.protocol);
    if entry.state & TUNNELLED != 0 {
        note_front(work, vni);
    }
}

/// Writes the droplet by which answers leave into the entry that leads back, if it is another one now.
#[inline(never)]
fn note_front(work: &mut Work, vni: u32) {
    let (backend, [client_port, port]) = (work.to.destination, work.to.ports);
    set_leaving(work, &backend, [port, client_port]);
    let Some(back) = maps::connection(&work.reverse) else {
        return;
    };
    // An entry that another key has by now would send that one's answers astray.
    let is_own = maps::other_side(back, vni).is_some_and(|front| front.address == work.key.destination);
    if is_own && back.index != work.answers_by {
        back.index = work.answers_by;
    }
}

/// Whether a packet that may begin a connection is of one to the chosen backend that neither side has ended, or of any
/// one that lives: whoever claims to be the client ends nothing. A client that begins anew is reset by the old backend.
/// Any other connection is forgotten.
#[inline(always)]
pub(super) fn goes_on(work: &mut Work, vni: u32) -> bool {
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
        touch(entry, work, vni);
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
pub(super) fn make(packet: &IpPacket, work: &mut Work, vni: u32) -> Result<(), Counter> {
    if !has_share_of_fronts(work, vni) {
        return Err(Counter::FrontNoRoom);
    }
    work.entry = ConnectionEntry::back(packet, vni, work.backend.service, vni, now());
    work.entry.index = work.answers_by;
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
