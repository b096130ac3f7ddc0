//! Keys and entries of the pinned maps of services, and the pure part of choosing a backend.
//!
//! Invariant: as [`crate::tables`]: `repr(C)`, integers and arrays only, explicit padding, sizes asserted. Numbers are host
//! order; addresses and ports are network order (raw).

use crate::{
    packet::{flow, ip::IpPacket},
    tables::Address,
};

/// Key of SERVICES. Port and protocol 0: whether the address is known at all.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ServiceKey {
    pub vni: u32,
    pub address: Address,
    /// Network order.
    pub port: u16,
    pub protocol: u8,
    pub padding: u8,
}

/// SERVICES[(VNI, address, port, protocol)].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceEntry {
    /// In the keys of BACKENDS and AFFINITY; no two services of a droplet have one.
    pub service: u32,
    /// In the keys of SLOTS. Each change of the backends makes a new table, so that nobody reads half of one.
    pub table: u32,
    /// Slots of the table; 0: no backends.
    pub slots: u32,
    /// How long a client keeps its backend after its last connection, seconds; 0: no affinity.
    pub affinity: u32,
    /// Of the address's own entry (port 0): set to 1 by agents that use the service, cleared by transitd's scan. Else 0.
    pub used: u32,
    /// [`SERVICE_LOCAL`].
    pub flags: u32,
}

/// Key of SLOTS: 64 slots of a table.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotsKey {
    pub table: u32,
    pub chunk: u32,
}

/// SLOTS[(table, slot / 64)]: indexes of backends.
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
    /// Network order.
    pub port: u16,
    pub padding: u16,
}

/// Key of CONNECTIONS: a packet's flow as the agent that looks it up meets it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    pub vni: u32,
    /// Source and destination, network order.
    pub ports: [u16; 2],
    pub source: Address,
    pub destination: Address,
    pub protocol: u8,
    /// [`FORWARD`], [`REVERSE`] or [`HAIRPIN`].
    pub direction: u8,
    pub padding: u16,
}

/// CONNECTIONS[flow]. Written by agents at a change of state, else at most each [`refresh`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionEntry {
    /// The key's: says whose the entry is, see [`crate::tables`].
    pub vni: u32,
    /// Of a forward entry, with `service`: the backend's key, to ask whether the service still has it; [`NO_INDEX`]
    /// where no row of the service was here.
    pub index: u32,
    /// When a packet was last written down, ns since boot.
    pub time: u64,
    /// The other side: the backend of a forward entry, else the service.
    pub address: Address,
    /// Network order.
    pub port: u16,
    /// What this direction has seen: [`SEEN`], [`FINISHED`], [`RESET`].
    pub state: u16,
    pub service: u32,
    /// The client's port at the other side, network order: of a forward entry the one that the backend sees, else the
    /// client's own. They differ if the backend sees another connection by the client's own, see [`other_port`].
    pub client_port: u16,
    pub padding: u16,
    /// VNI of the VPC in whose share it counts: the key's, or of what the node sends on the VPC of the pod.
    pub payer: u32,
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

/// Key of PENDING: a client's flow, whose backend nobody here knows or has room to remember.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PendingKey {
    pub vni: u32,
    pub address: Address,
    /// Network order.
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
    /// Who may answer: a choice that got no entry; zeros: whoever answers first.
    pub backend: Address,
    /// Network order, as all here.
    pub service_port: u16,
    pub backend_port: u16,
    /// What an answer to the TCP SYN must acknowledge; host order.
    pub acknowledgement: u32,
    /// As in [`ConnectionEntry`].
    pub payer: u32,
    pub padding: u32,
}

/// GATES[0]: what no packet need be looked up for. Written by agents, never cleared.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatesEntry {
    /// Until when there may be something in PENDING, ns since boot.
    pub pending_until: u64,
    /// There was a connection.
    pub connections: u32,
    pub padding: u32,
}

/// [`ServiceEntry::flags`]: the backends are for clients of this droplet alone. Without any, packets are dropped: other droplets
/// have some.
pub const SERVICE_LOCAL: u32 = 1;

/// Slots in an entry of SLOTS.
pub const CHUNK: usize = 64;
/// Most slots of a table.
pub const MAX_SLOTS: u32 = 262_139;

/// [`ConnectionKey::direction`]: client to service.
pub const FORWARD: u8 = 0;
/// [`ConnectionKey::direction`]: backend to client.
pub const REVERSE: u8 = 1;
/// [`ConnectionKey::direction`]: a pod that is its own backend, to the service whose address it saw as its client's.
pub const HAIRPIN: u8 = 2;

/// [`ConnectionEntry::state`]: a packet of this direction was seen.
pub const SEEN: u16 = 1;
/// [`ConnectionEntry::state`]: TCP FIN, SCTP SHUTDOWN.
pub const FINISHED: u16 = 2;
/// [`ConnectionEntry::state`]: TCP RST, SCTP ABORT.
pub const RESET: u16 = 4;

/// [`ConnectionEntry::index`]: who answered first is the backend.
pub const NO_INDEX: u32 = u32::MAX;

/// How long PENDING is believed, ns.
pub const PENDING_LIFE: u64 = 120_000_000_000;
/// Entries of CONNECTIONS that one client address may have.
pub const CONNECTIONS_OF_CLIENT: u32 = 65_536;
/// Entries that CONNECTIONS has room for.
pub const CONNECTIONS_CAPACITY: u32 = 524_288;
/// Entries in CONNECTIONS, of whomever, up to which a VPC may have more than its reserve: half of the table.
pub const CONNECTIONS_BEYOND_RESERVE: u32 = CONNECTIONS_CAPACITY / 2;
/// Index in QUOTAS: entries in CONNECTIONS. Agents add theirs; transitd counts anew.
pub const QUOTA_HELD: u32 = 0;
/// Index in QUOTAS: entries of CONNECTIONS that the clients of each VPC may always have. transitd writes it.
pub const QUOTA_RESERVE: u32 = 1;
/// Elements of QUOTAS.
pub const QUOTAS: u32 = 2;
/// Flows in PENDING that the clients of one VPC may have: half of the table.
pub const PENDING_OF_VPC: u32 = 8192;
/// The address, no client's, by which SHARES counts a VPC's entries of CONNECTIONS.
pub const ALL_CONNECTIONS: Address = [0; 16];
/// The address, no client's, by which SHARES counts a VPC's flows in PENDING.
pub const ALL_PENDING: Address = [0xff; 16];

/// What the first bytes of a transport header say of its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Opens a connection: TCP SYN alone, SCTP INIT.
    pub opens: bool,
    /// An answer that only a packet which was heard can get: TCP SYN-ACK or RST, any of UDP and SCTP.
    pub decides: bool,
    /// The bits of [`ConnectionEntry::state`] that it sets.
    pub state: u16,
}

impl Signal {
    /// Of TCP's byte of flags.
    #[inline(always)]
    pub const fn of_tcp(flags: u8) -> Self {
        let (finishes, resets) = (flags & 1 != 0, flags & 4 != 0);
        Self {
            opens: flags & 0x16 == 0x02,
            decides: flags & 0x12 == 0x12 || resets,
            state: SEEN | if finishes { FINISHED } else { 0 } | if resets { RESET } else { 0 },
        }
    }

    /// Of an SCTP packet's first chunk (RFC 9260 section 3.2).
    #[inline(always)]
    pub const fn of_sctp(chunk: u8) -> Self {
        let state = match chunk {
            6 => RESET,
            7 | 8 | 14 => FINISHED,
            _ => 0,
        };
        Self {
            opens: chunk == 1,
            decides: true,
            state: SEEN | state,
        }
    }

    /// Of a datagram.
    pub const DATAGRAM: Self = Self {
        opens: false,
        decides: true,
        state: SEEN,
    };
}

/// How long an entry is left unwritten while nothing but time changes, ns: a small part of its least life.
#[inline(always)]
pub const fn refresh(protocol: u8) -> u64 {
    if protocol == crate::packet::ipv4::UDP {
        5_000_000_000
    } else {
        10_000_000_000
    }
}

/// The slot of a packet to a service: of its flow, or of its client where clients keep their backends. Every droplet
/// chooses the same.
#[inline(always)]
pub const fn slot(packet: &IpPacket, entry: &ServiceEntry) -> u32 {
    let hash = flow::hash_of(packet, entry.affinity == 0);
    // Mixed once more: the flow's hash also picks bouncers.
    ((flow::finish(hash ^ 0x5e72_71ce) as u64 * entry.slots as u64) >> 32) as u32
}

/// First of the ports that clients get towards a backend in the place of their own. Linux's sockets get lower ones, unless
/// they ask or a node is told otherwise (32768 to 60999).
const OTHER_PORTS: u16 = 61_000;

/// A port, network order, for a packet to a service whose backend sees another connection by the client's own port.
#[inline(always)]
pub const fn other_port(packet: &IpPacket, attempt: u32) -> u16 {
    let hash = flow::finish(flow::hash(packet) ^ attempt.wrapping_mul(0x9e37_79b9));
    let count = (u16::MAX - OTHER_PORTS) as u64 + 1;
    (OTHER_PORTS + ((hash as u64 * count) >> 32) as u16).to_be()
}

const _: () = {
    assert!(size_of::<ServiceKey>() == 24);
    assert!(size_of::<ServiceEntry>() == 24);
    assert!(size_of::<SlotsKey>() == 8);
    assert!(size_of::<SlotsEntry>() == 128);
    assert!(size_of::<BackendKey>() == 8);
    assert!(size_of::<BackendEntry>() == 20);
    assert!(size_of::<ConnectionKey>() == 44);
    assert!(size_of::<ConnectionEntry>() == 48);
    assert!(size_of::<AffinityKey>() == 20);
    assert!(size_of::<AffinityEntry>() == 32);
    assert!(size_of::<PendingKey>() == 24);
    assert!(size_of::<PendingEntry>() == 56);
    assert!(size_of::<GatesEntry>() == 16);
};

#[cfg(feature = "user")]
mod pod {
    use super::{
        AffinityEntry, AffinityKey, BackendEntry, BackendKey, ConnectionEntry, ConnectionKey, GatesEntry,
        PendingEntry, PendingKey, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
    };
    macro_rules! pod {
        ($($t:ty),*) => {
            // SAFETY: repr(C) of integers and arrays without implicit padding (sizes asserted above).
            $(unsafe impl aya::Pod for $t {})*
        };
    }
    pod!(
        ServiceKey,
        ServiceEntry,
        SlotsKey,
        SlotsEntry,
        BackendKey,
        BackendEntry
    );
    pod!(ConnectionKey, ConnectionEntry, AffinityKey, AffinityEntry);
    pod!(PendingKey, PendingEntry, GatesEntry);
}

#[cfg(test)]
mod tests {
    use super::{FINISHED, RESET, SEEN, ServiceEntry, Signal, other_port, slot};
    use crate::{
        packet::{ip::IpPacket, ipv6::Ipv6Header},
        testing::Random,
    };

    #[test]
    fn signals_of_tcp_and_sctp() {
        let tcp = Signal::of_tcp;
        assert!(tcp(0x02).opens && tcp(0xc2).opens && !tcp(0x12).opens && !tcp(0x06).opens);
        assert!(tcp(0x12).decides && tcp(0x14).decides && !tcp(0x10).decides && !tcp(0x02).decides);
        assert_eq!(tcp(0x11).state, SEEN | FINISHED);
        assert_eq!(tcp(0x14).state, SEEN | RESET);
        let sctp = Signal::of_sctp;
        assert!(sctp(1).opens && !sctp(2).opens);
        assert_eq!(
            (sctp(0).state, sctp(6).state, sctp(7).state),
            (SEEN, SEEN | RESET, SEEN | FINISHED)
        );
    }

    #[test]
    fn other_ports_are_those_that_sockets_do_not_get() {
        let mut random = Random::from_clock();
        for _ in 0..10_000 {
            let header = Ipv6Header::new(&[0xfd; 16], &[0xfc; 16], 6, 64, 20);
            let mut packet = IpPacket::from_v6(&header).unwrap();
            packet.ports = [random.u32() as u16, random.u32() as u16];
            let ports: [u16; 3] = core::array::from_fn(|n| u16::from_be(other_port(&packet, n as u32 + 1)));
            assert!(ports.iter().all(|port| *port >= 61_000), "{ports:?}");
            assert!(ports[0] != ports[1] || ports[1] != ports[2], "{ports:?}");
        }
    }

    #[test]
    fn slots_are_within_the_table_spread_and_follow_affinity() {
        let mut random = Random::from_clock();
        let entry = |slots, affinity| ServiceEntry {
            service: 1,
            table: 1,
            slots,
            affinity,
            used: 0,
            flags: 0,
        };
        let mut hits = [0_u32; 251];
        for _ in 0..25_100 {
            let header = Ipv6Header::new(&[0xfd; 16], &[0xfc; 16], 6, 64, 20);
            let mut packet = IpPacket::from_v6(&header).unwrap();
            packet.ports = [random.u32() as u16, 80];
            hits[slot(&packet, &entry(251, 0)) as usize] += 1;
            let kept = slot(&packet, &entry(251, 60));
            packet.ports[0] ^= 1;
            assert_eq!(
                kept,
                slot(&packet, &entry(251, 60)),
                "a client's port decides nothing"
            );
        }
        assert!(hits.iter().all(|hits| (40..200).contains(hits)), "{hits:?}");
    }
}
