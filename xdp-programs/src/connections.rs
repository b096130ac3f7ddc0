//! CONNECTIONS and PENDING: the backend that a client's flow goes to, and the service that its answers come from.
//!
//! Invariant: an entry that leads to a backend stands only while one stands that leads back. Entries are written at a
//! change of state and at intervals, never for each packet. Only user space removes entries, except where a key is
//! used anew.

use aya_ebpf::{
    bindings::BPF_ANY, bindings::BPF_NOEXIST, helpers::bpf_ktime_get_ns, macros::map, maps::PerCpuArray,
};
use thuban_common::{
    counters::Counter,
    host_stack::{MARK_HOST_ENDPOINT, MARK_MASK},
    packet::{ip::IpPacket, ipv4},
    services::{
        ALL_CONNECTIONS, ALL_PENDING, AffinityEntry, AffinityKey, BackendEntry, CONNECTIONS_BEYOND_RESERVE,
        CONNECTIONS_OF_CLIENT, ConnectionEntry, ConnectionKey, FINISHED, FORWARD, HAIRPIN, NO_INDEX,
        PENDING_LIFE, PENDING_OF_VPC, PendingEntry, PendingKey, QUOTA_HELD, QUOTA_RESERVE, RESET, REVERSE,
        SEEN, ServiceEntry, ServiceKey, Signal, refresh,
    },
    tables::{Address, EndpointKey},
};

use crate::{
    count::count,
    frame::tc::TcFrame,
    inner::transport,
    maps::{self, AFFINITY, CONNECTIONS, GATES, PENDING, QUOTAS, SHARES},
    quoted,
    rewrite::Flow,
    service::{Choice, signal},
};

/// errno EEXIST.
const EXISTS: i32 = -17;
/// How long an entry that leads back may stand before its forward entry is written, ns: far longer than writing takes.
const MAKING: u64 = 1_000_000_000;
/// The number of high halves of an interface's number that are tried: a node makes at most so many times 65,536
/// interfaces while it is up.
const EPOCHS: u32 = 8;
/// The interval at which the gate of PENDING is extended, ns.
const GATE: u64 = 1_000_000_000;

/// The data that is too large for the stack.
pub struct Work {
    /// The addresses and ports that the packet is to have.
    pub to: Flow,
    /// The flow of the packet as it came.
    pub key: ConnectionKey,
    pub service: ServiceKey,
    /// The meaning of its transport header.
    pub signal: Signal,
    /// The packet's mark, if it comes from the node's own endpoint; else 0.
    pub mark: u32,
    reverse: ConnectionKey,
    /// The key of the connection that was there before.
    other: ConnectionKey,
    share: EndpointKey,
    entry: ConnectionEntry,
    pending: PendingKey,
    expected: PendingEntry,
}

/// One value for each CPU is enough, see `trace`.
#[map]
static WORK: PerCpuArray<Work> = PerCpuArray::with_max_entries(1, 0);

/// The result of making a connection.
pub enum Made {
    Connection,
    /// The table, or the client's or its VPC's share of it, is full.
    NoRoom,
    /// Its answers would be another connection's.
    Collision,
}

impl Work {
    #[inline(always)]
    pub fn get() -> Option<&'static mut Self> {
        // SAFETY: this CPU's only value, and nobody else has it now.
        WORK.get_ptr_mut(0).map(|work| unsafe { &mut *work })
    }

    #[inline(always)]
    pub fn begin(&mut self, packet: &IpPacket) {
        self.to.source = packet.source;
        self.to.destination = packet.destination;
        self.to.ports = packet.ports;
    }

    #[inline(always)]
    pub fn set_key(&mut self, vni: u32, packet: &IpPacket, direction: u8) {
        self.key = ConnectionKey {
            vni,
            ports: packet.ports,
            source: packet.source,
            destination: packet.destination,
            protocol: packet.protocol,
            direction,
            padding: 0,
        };
    }

    /// Directs the packet to a backend. A client that is its own backend gets it from the service, because nobody
    /// accepts a packet from itself.
    #[inline(always)]
    pub fn send_to(&mut self, packet: &IpPacket, backend: &Address, port: u16) {
        self.to.destination = *backend;
        self.to.ports[1] = port;
        self.to.source = packet.source;
        if *backend == packet.source {
            self.to.source = packet.destination;
        }
    }

    /// Sets the key by which the answers of `backend` are found. `ports`: the client's, as the backend sees it, and
    /// the backend's.
    #[inline(always)]
    fn set_reverse(&mut self, vni: u32, packet: &IpPacket, backend: &Address, ports: [u16; 2]) {
        self.reverse = ConnectionKey {
            vni,
            ports: [ports[1], ports[0]],
            source: *backend,
            destination: packet.source,
            protocol: packet.protocol,
            direction: REVERSE,
            padding: 0,
        };
        if *backend == packet.source {
            self.reverse.destination = packet.destination;
            self.reverse.direction = HAIRPIN;
        }
    }
}

#[inline(always)]
pub fn now() -> u64 {
    // SAFETY: helper without arguments.
    unsafe { bpf_ktime_get_ns() }
}

/// Whether there ever was a connection or something pending.
#[inline(always)]
pub fn is_open() -> bool {
    GATES.get(0).is_some_and(|gates| gates.connections != 0)
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
            padding: 0,
        };
        return maps::service(&work.service).is_none();
    }
    maps::backend(entry.service, entry.index)
        .is_some_and(|backend| backend.address == entry.address && backend.port == entry.port)
}

/// Removes entries of a service that would claim the answers to a packet which the endpoint sends to another endpoint
/// itself, by a port that it used before. Returns false if such an entry is a connection that still lives.
#[inline(never)]
pub fn yield_to(vni: u32, packet: &IpPacket) -> bool {
    let Some(work) = Work::get() else {
        return true;
    };
    work.set_reverse(vni, packet, &packet.destination, packet.ports);
    // Nothing tells the end of datagrams: the last packet counts.
    if !take_over(work, packet.protocol == ipv4::UDP) {
        return false;
    }
    !is_pending_open(now()) || yield_pending(vni, packet, work)
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
    let is_over = (there.state | back.state) & RESET != 0 || there.state & back.state & FINISHED != 0;
    if !is_over && !anyway {
        return false;
    }
    // A missing entry is as good.
    let _ = CONNECTIONS.remove(&work.other);
    let _ = CONNECTIONS.remove(&work.reverse);
    let client = work.other.source;
    give_share(work, payer, &client);
    true
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
    work.entry = ConnectionEntry {
        vni,
        index: NO_INDEX,
        time: now(),
        address: packet.destination,
        port: packet.ports[1],
        state: 0,
        service,
        client_port: packet.ports[0],
        padding: 0,
        payer,
    };
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
    work.entry.address = backend;
    work.entry.port = ports[1];
    work.entry.client_port = ports[0];
    work.entry.state = work.signal.state;
    work.entry.index = index;
    if CONNECTIONS
        .insert(&work.key, &work.entry, u64::from(BPF_ANY))
        .is_err()
    {
        let _ = CONNECTIONS.remove(&work.reverse);
        return Made::NoRoom;
    }
    open(0);
    take_share(work, payer, &packet.source);
    Made::Connection
}

/// Returns the VPC of the pod whose packet this is, if the node sends it on by its own endpoint in the VPC `vni`.
#[inline(never)]
fn payer(mark: u32, vni: u32) -> u32 {
    if mark & MARK_MASK != MARK_HOST_ENDPOINT || mark == MARK_HOST_ENDPOINT {
        return vni;
    }
    // The mark has the low half of an interface's number.
    for high in 0..EPOCHS {
        if let Some(vni) = maps::vpc_of(high << 16 | mark >> 16) {
            return vni;
        }
    }
    vni
}

/// Whether the client may have more entries. Its VPC must have less than its reserve, or half of the table must be
/// free.
#[inline(always)]
fn has_share(work: &mut Work, vni: u32, client: &Address) -> bool {
    work.share.vni = vni;
    work.share.address = *client;
    if !has_less(&work.share, CONNECTIONS_OF_CLIENT) {
        return false;
    }
    work.share.address = ALL_CONNECTIONS;
    has_less(&work.share, quota(QUOTA_RESERVE)) || quota(QUOTA_HELD) < CONNECTIONS_BEYOND_RESERVE
}

#[inline(always)]
fn quota(index: u32) -> u32 {
    QUOTAS.get(index).copied().unwrap_or(0)
}

#[inline(never)]
fn has_less(of: &EndpointKey, most: u32) -> bool {
    // SAFETY: a single word of an element, see `maps`.
    let held = unsafe { SHARES.get(of) };
    held.is_none_or(|held| *held < most)
}

/// Counts a connection's entries.
#[inline(always)]
fn take_share(work: &mut Work, vni: u32, client: &Address) {
    work.share.vni = vni;
    work.share.address = *client;
    add_share(&work.share, 2);
    work.share.address = ALL_CONNECTIONS;
    add_share(&work.share, 2);
    if let Some(held) = QUOTAS.get_ptr_mut(QUOTA_HELD) {
        add(held, 2);
    }
}

/// Gives back the share of a connection that is forgotten.
#[inline(always)]
fn give_share(work: &mut Work, vni: u32, client: &Address) {
    work.share.vni = vni;
    work.share.address = *client;
    give_back(&work.share);
    work.share.address = ALL_CONNECTIONS;
    give_back(&work.share);
    if let Some(held) = QUOTAS.get_ptr_mut(QUOTA_HELD) {
        take(held);
    }
}

#[inline(always)]
fn give_back(of: &EndpointKey) {
    if let Some(share) = SHARES.get_ptr_mut(of) {
        take(share);
    }
}

/// Adds to a count. User space, which counts anew, corrects what is lost between CPUs.
#[inline(always)]
fn add(count: *mut u32, more: u32) {
    // SAFETY: as in `has_less`; a single word.
    unsafe { *count += more };
}

/// Subtracts from a count as [`add`] adds, but never below zero.
#[inline(always)]
fn take(count: *mut u32) {
    // SAFETY: as in `has_less`; a single word.
    unsafe { *count = (*count).saturating_sub(2) };
}

#[inline(never)]
fn add_share(of: &EndpointKey, more: u32) {
    match SHARES.get_ptr_mut(of) {
        Some(share) => add(share, more),
        None => {
            let _ = SHARES.insert(of, more, u64::from(BPF_ANY));
        }
    }
}

/// Has the client keep the backend for its next connections.
#[inline(never)]
pub fn keep(service: &ServiceEntry, packet: &IpPacket, index: u32, backend: &BackendEntry) {
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

/// Opens the gates: from now on packets are looked up in CONNECTIONS and, until `pending_until`, in PENDING.
#[inline(always)]
fn open(pending_until: u64) {
    let Some(gates) = GATES.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: words of an array's element, which stays.
    unsafe {
        if (*gates).connections == 0 {
            (*gates).connections = 1;
        }
        if (*gates).pending_until + GATE < pending_until {
            (*gates).pending_until = pending_until;
        }
    }
}

#[inline(always)]
fn is_pending_open(now: u64) -> bool {
    GATES.get(0).is_some_and(|gates| now < gates.pending_until + GATE)
}

/// Returns the key of the client's flow in PENDING.
#[inline(always)]
const fn pending_key(vni: u32, address: Address, port: u16, protocol: u8) -> PendingKey {
    PendingKey {
        vni,
        address,
        port,
        protocol,
        padding: 0,
    }
}

/// Notes a packet to a service without a row here: its answer decides the backend.
#[inline(never)]
pub fn expect_answer(frame: &TcFrame, packet: &IpPacket, work: &mut Work) -> Result<Choice, Counter> {
    let now = now();
    work.pending = pending_key(work.key.vni, packet.source, packet.ports[0], packet.protocol);
    if let Some(old) = PENDING.get_ptr_mut(&work.pending) {
        // SAFETY: words of a value that stays allocated (preallocated LRU).
        let old = unsafe { &mut *old };
        let is_same = old.service == packet.destination && old.service_port == packet.ports[1];
        if is_same && !work.signal.opens {
            if now.wrapping_sub(old.time) > refresh(packet.protocol) {
                old.time = now;
                open(now + PENDING_LIFE);
            }
            if old.backend != [0; 16] {
                work.send_to(packet, &old.backend, old.backend_port);
                return Ok(Choice::Backend);
            }
            return Ok(Choice::NoRow);
        }
    }
    let mut acknowledgement = 0;
    if packet.protocol == ipv4::TCP {
        if !work.signal.opens {
            // No answer to this packet would be believed.
            return Ok(Choice::NoRow);
        }
        let sequence: [u16; 2] = transport(frame, packet, 4).ok_or(Counter::Truncated)?;
        acknowledgement = number(sequence).wrapping_add(1);
    }
    work.expected.backend = [0; 16];
    work.expected.backend_port = 0;
    if !expect(packet, work, now, acknowledgement) {
        count(Counter::ServiceStateless);
    }
    Ok(Choice::NoRow)
}

/// Notes that a packet without a connection goes to [`Work::to`]. Answers from there, and only from there, find the
/// service.
#[inline(never)]
pub fn expect_from(packet: &IpPacket, work: &mut Work) {
    work.pending = pending_key(work.key.vni, packet.source, packet.ports[0], packet.protocol);
    work.expected.backend = work.to.destination;
    work.expected.backend_port = work.to.ports[1];
    expect(packet, work, now(), 0);
}

/// Notes the flow in PENDING. Returns false if there is no room; a flow that is noted already stays.
#[inline(always)]
fn expect(packet: &IpPacket, work: &mut Work, now: u64, acknowledgement: u32) -> bool {
    // SAFETY: only whether it is there.
    let is_new = unsafe { PENDING.get(&work.pending) }.is_none();
    if is_new {
        work.expected.payer = payer(work.mark, work.pending.vni);
        work.share.vni = work.expected.payer;
        work.share.address = ALL_PENDING;
        if !has_less(&work.share, PENDING_OF_VPC) {
            return false;
        }
        add_share(&work.share, 1);
    }
    work.expected.time = now;
    work.expected.service = packet.destination;
    work.expected.service_port = packet.ports[1];
    work.expected.acknowledgement = acknowledgement;
    let _ = PENDING.insert(&work.pending, &work.expected, u64::from(BPF_ANY));
    open(now + PENDING_LIFE);
    true
}

/// Returns two raw words as a number.
#[inline(always)]
fn number(words: [u16; 2]) -> u32 {
    u32::from(u16::from_be(words[0])) << 16 | u32::from(u16::from_be(words[1]))
}

/// Whether tc must look at a packet to an endpoint of this droplet.
#[inline(never)]
pub fn may_be_answer(vni: u32, packet: &IpPacket) -> bool {
    let Some(work) = Work::get() else {
        return false;
    };
    if quoted::is_error(packet) {
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
    is_pending_open(now()) && unsafe { PENDING.get(&work.pending) }.is_some()
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
    if !is_pending_open(now()) {
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
    if !work.signal.decides || !is_pending_open(now()) {
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

/// Whether a TCP segment acknowledges the packet that opened the waiting flow.
#[inline(always)]
fn acknowledges(frame: &TcFrame, packet: &IpPacket, entry: &PendingEntry) -> Result<bool, Counter> {
    let acknowledged: [u16; 2] = transport(frame, packet, 8).ok_or(Counter::Truncated)?;
    Ok(number(acknowledged) == entry.acknowledgement)
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
