//! Keys and entries of the pinned maps of services, and the pure part of choosing a backend.
//!
//! Invariant: as in [`crate::tables`]: `repr(C)`, integers and arrays only, explicit padding, sizes asserted. Numbers
//! are host order; addresses and ports are network order (raw).

mod choice;
mod signal;

use core::mem::offset_of;

use crate::{
    packet::{ip::IpPacket, ipv4},
    tables::{Address, DropletAddress},
};

pub use choice::{other_port, slot};
pub use signal::Signal;

/// Key of SERVICES. With port and protocol 0 it is the address's own entry: whether the address is known at all.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceKey {
    pub vni: u32,
    pub address: Address,
    /// The port, network order.
    pub port: u16,
    pub protocol: u8,
    /// Of a port of a front: 1 for its table before the last change of its backends.
    pub former: u8,
}

/// SERVICES[(VNI, address, port, protocol)].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceEntry {
    /// The id in the keys of BACKENDS and AFFINITY; no two services of a droplet have the same one. In the own entry of
    /// a front's address (port 0): the VNI of its backends' VPC.
    pub service: u32,
    /// The id in the keys of SLOTS. Each change of the backends makes a new table, so that nobody reads half of one.
    pub table: u32,
    /// Slots of the table; 0: no backends. In the own entry of a front's address: the number of its ports with
    /// backends.
    pub slots: u32,
    /// How long a client keeps its backend after its last connection, seconds; 0: no affinity.
    pub affinity: u32,
    /// Whether the service was used; only in the address's own entry (port 0), else 0. Agents set it to 1, transitd's
    /// scan clears it.
    pub used: u32,
    /// The flags: [`SERVICE_LOCAL`], [`SERVICE_TUNNEL`].
    pub flags: u32,
}

impl ServiceEntry {
    /// Returns an address's own entry. `vni` and `ports`: of a front, the VNI of its backends' VPC and the number of
    /// its ports with backends; else 0.
    pub const fn own(vni: u32, ports: u32) -> Self {
        Self {
            service: vni,
            table: 0,
            slots: ports,
            affinity: 0,
            used: 1,
            flags: 0,
        }
    }
}

/// Key of SLOTS: [`CHUNK`] slots of a table.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotsKey {
    pub table: u32,
    pub chunk: u32,
}

/// SLOTS[(table, slot / [`CHUNK`])]: indexes of backends.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotsEntry {
    pub backends: [u16; CHUNK],
}

/// Key of BACKENDS. A backend keeps its index while the service has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackendKey {
    pub service: u32,
    pub index: u32,
}

/// BACKENDS[(service, index)].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BackendEntry {
    pub address: Address,
    /// The port, network order.
    pub port: u16,
    pub padding: u16,
}

/// HOMES[(service, index)]: the backend of a front and where it is, see [`FRONTS`]. It has all that a front needs, so
/// that a packet costs one look-up less. An element of the map, with its key, fits two cache lines.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeEntry {
    /// The key. It is the word that says whose the entry is, see [`crate::tables`].
    pub service: u32,
    pub index: u32,
    /// The VNI of the backend's VPC.
    pub vni: u32,
    /// The droplet that has the backend.
    pub droplet: DropletAddress,
    /// The address, port (network order) and protocol of the front.
    pub address: Address,
    pub port: u16,
    pub protocol: u8,
    pub padding: u8,
    /// The entry of BACKENDS.
    pub backend: BackendEntry,
}

impl HomeEntry {
    /// Whether the backend serves the front that a packet is for.
    #[inline(always)]
    pub const fn is_for(&self, packet: &IpPacket) -> bool {
        let (own, other) = (
            u128::from_ne_bytes(self.address),
            u128::from_ne_bytes(packet.destination),
        );
        own == other && self.port == packet.ports[1] && self.protocol == packet.protocol
    }
}

/// Key of CONNECTIONS: a packet's flow as it reaches the agent that looks it up.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    pub vni: u32,
    /// The source and destination ports, network order.
    pub ports: [u16; 2],
    pub source: Address,
    pub destination: Address,
    pub protocol: u8,
    /// [`FORWARD`], [`REVERSE`], [`HAIRPIN`], [`ARRIVING`] or [`LEAVING`].
    pub direction: u8,
    pub padding: u16,
}

/// CONNECTIONS[flow]. Written by agents at a change of state, else at most each [`refresh`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionEntry {
    /// The key's VNI: it says whose the entry is, see [`crate::tables`].
    pub vni: u32,
    /// The backend's index in a forward entry: with `service` it is the backend's key, to check whether the service
    /// still has the backend. [`NO_INDEX`] if no row of the service was here. In an entry of [`LEAVING`] the address of
    /// the droplet by which answers leave, raw; [`NO_INDEX`] if they leave from this one.
    pub index: u32,
    /// The last time that was written for a packet, ns since boot.
    pub time: u64,
    /// The other side: in a forward entry the backend, else the service.
    pub address: Address,
    /// The port of the other side, network order.
    pub port: u16,
    /// The packets that this direction has seen: [`SEEN`], [`FINISHED`], [`RESET`], [`CONFIRMED`], [`TUNNELLED`].
    pub state: u16,
    pub service: u32,
    /// The client's port at the other side, network order: in a forward entry the port that the backend sees, else the
    /// client's own. They differ if the backend sees another connection by the client's own port, see [`other_port`].
    pub client_port: u16,
    pub padding: u16,
    /// The VNI of the VPC in whose share the entry counts: the key's VNI, or for packets that the node sends on, that
    /// of the pod's VPC.
    pub payer: u32,
}

impl ConnectionEntry {
    /// Returns the entry that leads back to the client of a packet to a service or front.
    #[inline(always)]
    pub const fn back(packet: &IpPacket, vni: u32, service: u32, payer: u32, time: u64) -> Self {
        Self {
            vni,
            index: NO_INDEX,
            time,
            address: packet.destination,
            port: packet.ports[1],
            state: 0,
            service,
            client_port: packet.ports[0],
            padding: 0,
            payer,
        }
    }
}

/// Key of AFFINITY.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AffinityKey {
    pub service: u32,
    pub client: Address,
}

/// AFFINITY[(service, client)], LRU: the backend of the client's last connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AffinityEntry {
    /// Ns since boot.
    pub time: u64,
    pub index: u32,
    pub backend: BackendEntry,
}

/// Key of PENDING: a client's flow whose backend is unknown here, or is not remembered for lack of room.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PendingKey {
    pub vni: u32,
    pub address: Address,
    /// The port, network order.
    pub port: u16,
    pub protocol: u8,
    pub padding: u8,
}

/// PENDING[flow], LRU.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PendingEntry {
    /// Ns since boot.
    pub time: u64,
    pub service: Address,
    /// The backend that may answer: a chosen one that got no entry; zeros: the backend that answers first.
    pub backend: Address,
    /// The service's port, network order as all here.
    pub service_port: u16,
    pub backend_port: u16,
    /// The number that an answer to the TCP SYN must acknowledge; host order.
    pub acknowledgement: u32,
    /// The payer, as in [`ConnectionEntry`].
    pub payer: u32,
    pub padding: u32,
}

/// Key of FRAGMENTS: one of the [`PLACES_OF_VPC`] places of a VPC for services, or of as many for policy behind them. A
/// datagram's place follows from its addresses and its number.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FragmentKey {
    pub vni: u32,
    pub place: u32,
}

/// FRAGMENTS[(VNI, place)]: what the later fragments of a datagram become, which show no ports. The first fragment
/// writes it. In a place of policy it says that later fragments pass as the first one did, and is changed by nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FragmentEntry {
    /// The datagram's VNI and number (IPv4's or IPv6's identification, raw): they say whose the entry is, see
    /// [`crate::tables`]. For packets that the node sends on, the key has the VNI of the pod's VPC.
    pub vni: u32,
    pub number: u32,
    /// Ns since boot.
    pub time: u64,
    /// The datagram's addresses as it came.
    pub source: Address,
    pub destination: Address,
    /// The addresses that it gets.
    pub to_source: Address,
    /// Zeros: it stays as it is, because a bouncer knows the backend.
    pub to_destination: Address,
}

/// GATES: whether packets of an interface need a look-up at all. Never cleared. Element [`GATE_OF_ANY`] tells of all
/// interfaces together whether there ever was a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatesEntry {
    /// Until when there may be something in PENDING, in units of 2^30 ns since boot.
    pub pending_until: u32,
    /// Whether the endpoint ever had a connection to a service.
    pub services: u8,
    /// Whether it ever had one of a client outside, by a front.
    pub fronts: u8,
    /// Whether FLOWS ever had a flow to the endpoint.
    pub flows: u16,
}

/// [`ServiceEntry::flags`]: the backends are for clients of this droplet alone. Without any backend, packets are
/// dropped: other droplets have some.
pub const SERVICE_LOCAL: u32 = 1;

/// [`ServiceEntry::flags`] of a port of a front: answers leave by the droplet that took the client's packet.
pub const SERVICE_TUNNEL: u32 = 2;

/// [`ServiceKey::vni`] of fronts: addresses outside of all VPCs. Any droplet takes their packets at its NIC, for
/// backends of one VPC. No VPC has this VNI.
pub const FRONTS: u32 = 0;

/// Slots in an entry of SLOTS: the least table, of 251 slots, is one entry.
pub const CHUNK: usize = 256;
/// The most slots of a table.
pub const MAX_SLOTS: u32 = 262_139;

/// [`ConnectionKey::direction`]: from client to service.
pub const FORWARD: u8 = 0;
/// [`ConnectionKey::direction`]: from backend to client.
pub const REVERSE: u8 = 1;
/// [`ConnectionKey::direction`]: from a pod that is its own backend to the service, whose address it saw as its
/// client's.
pub const HAIRPIN: u8 = 2;

/// [`ConnectionKey::direction`]: from a client outside to a front, on the backend's droplet.
pub const ARRIVING: u8 = 3;
/// [`ConnectionKey::direction`]: from the backend to that client.
pub const LEAVING: u8 = 4;

/// [`ConnectionEntry::state`]: a packet of this direction was seen.
pub const SEEN: u16 = 1;
/// [`ConnectionEntry::state`]: a TCP FIN or SCTP SHUTDOWN was seen.
pub const FINISHED: u16 = 2;
/// [`ConnectionEntry::state`]: a TCP RST or SCTP ABORT was seen.
pub const RESET: u16 = 4;

/// [`ConnectionEntry::state`]: a client outside answered the backend, so it has the address that it claims.
pub const CONFIRMED: u16 = 8;

/// [`ConnectionEntry::state`] of [`ARRIVING`]: a front asked for the answers. Each later packet may come by another
/// front, which gets the next answers.
pub const TUNNELLED: u16 = 0x10;

/// [`ConnectionEntry::index`]: the backend is the one that answered first, or answers leave from this droplet.
pub const NO_INDEX: u32 = u32::MAX;

/// How long PENDING is believed, ns.
pub const PENDING_LIFE: u64 = 120_000_000_000;
/// Entries of CONNECTIONS that one client address may have.
pub const CONNECTIONS_OF_CLIENT: u32 = 65_536;
/// The most entries that CONNECTIONS has room for. transitd makes it smaller on a node with little memory.
pub const CONNECTIONS_CAPACITY: u32 = 524_288;
/// The least entries that CONNECTIONS has room for.
pub const LEAST_CONNECTIONS: u32 = 65_536;
/// Index in QUOTAS: entries in CONNECTIONS. Agents add theirs; transitd counts anew.
pub const QUOTA_HELD: u32 = 0;
/// Index in QUOTAS: entries of CONNECTIONS that the clients of each VPC may always have. transitd writes it.
pub const QUOTA_RESERVE: u32 = 1;
/// Index in QUOTAS: entries in CONNECTIONS, of all VPCs, up to which a VPC may have more than its reserve: half of the
/// table. transitd writes it.
pub const QUOTA_SHARED: u32 = 2;
/// Index in QUOTAS: entries in FLOWS, counted as those in CONNECTIONS are.
pub const QUOTA_FLOWS_HELD: u32 = 3;
/// Index in QUOTAS: entries of FLOWS that each VPC may always have. transitd writes it.
pub const QUOTA_FLOWS_RESERVE: u32 = 4;
/// Elements of QUOTAS. There are more than are used, so that a later one changes no layout: transitd refuses a pinned
/// map of another size.
pub const QUOTAS: u32 = 16;
const _: () = assert!(QUOTA_FLOWS_RESERVE < QUOTAS);
/// Flows in PENDING that the clients of one VPC may have: half of the table.
pub const PENDING_OF_VPC: u32 = 8192;
/// The most backends of fronts.
pub const HOMES_CAPACITY: u32 = 32_768;
/// Datagrams in FRAGMENTS that a VPC has room for. A newer one takes the place of an older one of the same VPC.
pub const PLACES_OF_VPC: u32 = 64;
/// The most datagrams in FRAGMENTS: room for 128 VPCs.
pub const FRAGMENTS_CAPACITY: u32 = 2 * 128 * PLACES_OF_VPC;
/// How long FRAGMENTS is believed, ns: senders send all fragments at once.
pub const FRAGMENT_LIFE: u64 = 5_000_000_000;
/// Index in GATES of what all interfaces have together.
pub const GATE_OF_ANY: u32 = 0;
/// Gates of interfaces, behind [`GATE_OF_ANY`]: those of 16,384 interfaces are told apart.
pub const GATES_OF_INTERFACES: u32 = 16_384;

/// Returns the index in GATES of an interface's gate.
#[inline(always)]
pub const fn gate_of(interface: u32) -> u32 {
    GATE_OF_ANY + 1 + interface % GATES_OF_INTERFACES
}

/// The address by which SHARES counts a VPC's entries of CONNECTIONS. No client has it.
pub const ALL_CONNECTIONS: Address = [0; 16];
/// The address by which SHARES counts a VPC's flows in PENDING. No client has it.
pub const ALL_PENDING: Address = [0xff; 16];
/// The address by which SHARES counts a VPC's flows in FLOWS. No client has it.
pub const ALL_FLOWS: Address = [
    0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe,
];

/// Whether a protocol has connections, by which a receiver itself knows whose an answer is.
#[inline(always)]
pub const fn has_connections(protocol: u8) -> bool {
    matches!(protocol, ipv4::TCP | ipv4::SCTP)
}

/// Whether both sides ended a connection, or one of them reset it. `forward`, `reverse`: the states of both directions.
#[inline(always)]
pub const fn has_ended(forward: u16, reverse: u16) -> bool {
    (forward | reverse) & RESET != 0 || forward & reverse & FINISHED != 0
}

/// Returns how long an entry is left unwritten while nothing but time changes, ns: a small part of its least life.
#[inline(always)]
pub const fn refresh(protocol: u8) -> u64 {
    if protocol == ipv4::UDP {
        5_000_000_000
    } else {
        10_000_000_000
    }
}

const _: () = {
    assert!(size_of::<ServiceKey>() == 24);
    assert!(size_of::<ServiceEntry>() == 24);
    assert!(size_of::<SlotsKey>() == 8);
    assert!(size_of::<SlotsEntry>() == 2 * CHUNK);
    assert!(size_of::<BackendKey>() == 8);
    assert!(size_of::<BackendEntry>() == 20);
    assert!(size_of::<HomeEntry>() == 56 && offset_of!(HomeEntry, service) == 0);
    assert!(offset_of!(HomeEntry, backend) == 36);
    assert!(size_of::<ConnectionKey>() == 44);
    assert!(size_of::<ConnectionEntry>() == 48);
    assert!(size_of::<AffinityKey>() == 20);
    assert!(size_of::<AffinityEntry>() == 32);
    assert!(size_of::<PendingKey>() == 24);
    assert!(size_of::<PendingEntry>() == 56);
    assert!(size_of::<FragmentKey>() == 8);
    assert!(size_of::<FragmentEntry>() == 80);
    assert!(size_of::<GatesEntry>() == 8);
};

#[cfg(feature = "user")]
mod pod {
    use super::{
        AffinityEntry, AffinityKey, BackendEntry, BackendKey, ConnectionEntry, ConnectionKey, FragmentEntry,
        FragmentKey, GatesEntry, HomeEntry, PendingEntry, PendingKey, ServiceEntry, ServiceKey, SlotsEntry,
        SlotsKey,
    };
    macro_rules! pod {
        ($($t:ty),*) => {
            // SAFETY: repr(C) of integers and arrays without implicit padding (sizes asserted above).
            $(unsafe impl aya::Pod for $t {})*
        };
    }
    pod!(
        HomeEntry,
        ServiceKey,
        ServiceEntry,
        SlotsKey,
        SlotsEntry,
        BackendKey,
        BackendEntry
    );
    pod!(ConnectionKey, ConnectionEntry, AffinityKey, AffinityEntry);
    pod!(PendingKey, PendingEntry, GatesEntry);
    pod!(FragmentKey, FragmentEntry);
}
