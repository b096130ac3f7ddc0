//! What the packet of a client of a service is worked on with: data that is too large for the stack.

use aya_ebpf::{helpers::bpf_ktime_get_ns, macros::map, maps::PerCpuArray};
use thuban_common::{
    counters::Counter,
    packet::ip::IpPacket,
    services::{
        BackendKey, ConnectionEntry, ConnectionKey, HAIRPIN, HomeEntry, PendingEntry, PendingKey, REVERSE,
        ServiceKey, Signal,
    },
    tables::{Address, EndpointKey},
};

use crate::rewrite::Flow;

/// The decision about a packet to a service.
#[derive(Clone, Copy)]
pub enum Choice {
    /// The packet goes to a backend: [`Work::to`] has its new addresses and ports.
    Backend,
    /// No row of the service is here; its clients' bouncers know.
    NoRow,
    /// Nobody serves it.
    Refused,
    /// The packet is of no connection: a backend is still to be chosen.
    New,
}

/// The data that is too large for the stack.
pub struct Work {
    /// What `service_choose` chose.
    pub choice: Result<Choice, Counter>,
    /// The addresses and ports that the packet is to have.
    pub to: Flow,
    /// The flow of the packet as it came.
    pub key: ConnectionKey,
    pub service: ServiceKey,
    /// The backend that a front chose, and where it is.
    pub backend: BackendKey,
    pub home: HomeEntry,
    /// Whether that front wants the answers.
    pub is_tunnel: bool,
    /// Whether the packet of a front is of a known connection.
    pub is_known: bool,
    /// The droplet by which answers to a client outside leave, as [`ConnectionEntry::index`] has it.
    pub answers_by: u32,
    /// The meaning of its transport header.
    pub signal: Signal,
    /// The packet's mark, if it comes from the node's own endpoint; else 0.
    pub mark: u32,
    /// The interface of the client's endpoint.
    pub interface: u32,
    pub reverse: ConnectionKey,
    /// The key of the connection that was there before.
    pub other: ConnectionKey,
    pub share: EndpointKey,
    pub entry: ConnectionEntry,
    pub pending: PendingKey,
    pub expected: PendingEntry,
}

/// One value for each CPU is enough, see `trace`.
#[map]
static WORK: PerCpuArray<Work> = PerCpuArray::with_max_entries(1, 0);

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
    pub fn set_reverse(&mut self, vni: u32, packet: &IpPacket, backend: &Address, ports: [u16; 2]) {
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
