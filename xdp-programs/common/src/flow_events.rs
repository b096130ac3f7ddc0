//! What programs tell of flows: keys and entries of SEEN_FLOWS and FLOW_BUDGETS, and records of FLOW_EVENTS.
//!
//! A flow has two directions, each with entries of its own, and one entry for each verdict of each program on the way.
//! If passes are told too, one more entry says that the flow is known, whatever its verdict.

use crate::{
    packet::tcp::{ACK, SYN},
    tables::{Address, DropletAddress},
};

/// Key of SEEN_FLOWS: packets of one direction of a flow that a program of this droplet gave one verdict.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SeenFlowKey {
    pub source: Address,
    pub destination: Address,
    pub vni: u32,
    /// The port of the flow's server, network order; 0 where the packet has none. Clients' ports are left out, so that
    /// all connections of a client with a server are one flow.
    pub server_port: u16,
    pub protocol: u8,
    /// The number of the [`crate::counters::Counter`] of the verdict, or [`NO_VERDICT`].
    pub verdict: u8,
    /// The number of the [`crate::tables::TracePoint`].
    pub point: u8,
    /// Whether the source is the server (1).
    pub from_server: u8,
    pub padding: [u8; 2],
}

/// SEEN_FLOWS[[`SeenFlowKey`]], LRU: what was not told yet of a flow, and when it was told last.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenFlowEntry {
    /// The time of the last event, ns since boot.
    pub told: u64,
    /// Packets and bytes since the last event. Some are not counted where several CPUs count at once.
    pub packets: u64,
    pub bytes: u64,
    /// All flags of these packets, or-ed.
    pub tcp_flags: u8,
    /// Whether the end of the flow was told (1).
    pub has_ended: u8,
    pub padding: [u8; 6],
}

/// Record of the ring buffer FLOW_EVENTS.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowEventRecord {
    /// Nanoseconds since boot.
    pub time: u64,
    /// Since the last event of the flow with this verdict and point, this packet included.
    pub packets: u64,
    pub bytes: u64,
    pub source: Address,
    pub destination: Address,
    pub vni: u32,
    /// Interface that the frame came in by.
    pub interface: u32,
    /// The [`crate::counters::Counter`] of the verdict, or [`crate::tables::NO_COUNTER`].
    pub counter: u32,
    /// The droplet that it was sent to; zeros if to none.
    pub next: DropletAddress,
    /// The ports of this packet, network order; zeros where the packet doesn't show them.
    pub ports: [u16; 2],
    /// What denies the packet, as in [`crate::tables::TraceRecord`].
    pub set: u32,
    pub rank: u16,
    pub protocol: u8,
    /// All flags of TCP of these packets, or-ed.
    pub tcp_flags: u8,
    /// The [`crate::tables::TracePoint`].
    pub point: u8,
    /// The [`FlowEvent`].
    pub event: u8,
    /// Whether the source is the server (1).
    pub from_server: u8,
    pub padding: [u8; 1],
}

/// Why a flow is told of. The numbers are those of the protocol of thuban-observe.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowEvent {
    /// The first packet with this verdict.
    First = 1,
    /// The flow is known, but not with this verdict. Told only if passes are told.
    Changed = 2,
    /// A packet with FIN or RST, once a direction.
    Ended = 3,
    /// Packets since the last event, told each [`TELL_EVERY`].
    GoesOn = 4,
}

/// Key of FLOW_BUDGETS.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FlowBudgetKey {
    /// 0: all VPCs that packets of the wire name, and this droplet doesn't know.
    pub vni: u32,
    /// Whether it is for events of drops (1), or of packets that pass.
    pub is_of_drops: u32,
}

/// FLOW_BUDGETS[[`FlowBudgetKey`]], LRU: how many events a VPC had in a second.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowBudgetEntry {
    /// Seconds since boot.
    pub second: u32,
    pub events: u32,
}

/// Returns the port of the server of a packet's flow, network order, and whether the packet's source is the server. Who
/// opens a TCP connection is the client. Of other packets the lower port is the server's, of equal ones the
/// destination's.
#[inline(always)]
pub const fn server([source, destination]: [u16; 2], tcp_flags: u8) -> (u16, bool) {
    let is_source = if tcp_flags & SYN != 0 {
        tcp_flags & ACK != 0
    } else {
        u16::from_be(source) < u16::from_be(destination)
    };
    if is_source {
        (source, true)
    } else {
        (destination, false)
    }
}

/// [`SeenFlowKey::verdict`] of the entry that says that a flow is known, whatever its verdict.
pub const NO_VERDICT: u8 = u8::MAX;
/// How long packets of a flow are added up before they are told, ns.
pub const TELL_EVERY: u64 = 30_000_000_000;
/// Entries of SEEN_FLOWS, if programs tell of all flows.
pub const SEEN_FLOWS_CAPACITY: u32 = 65_536;
/// Entries of SEEN_FLOWS, if programs tell of drops alone.
pub const SEEN_DROPS_CAPACITY: u32 = 4096;
/// Entries of FLOW_BUDGETS: two for each VPC.
pub const FLOW_BUDGETS_CAPACITY: u32 = 4096;
/// Events of packets that pass, and events of drops, that one VPC may have in a second on a droplet.
pub const FLOW_EVENTS_PER_SECOND: u32 = 1000;

const _: () = {
    assert!(size_of::<SeenFlowKey>() == 44);
    assert!(size_of::<SeenFlowEntry>() == 32);
    assert!(size_of::<FlowEventRecord>() == 88);
    assert!(size_of::<FlowBudgetKey>() == 8);
    assert!(size_of::<FlowBudgetEntry>() == 8);
};

#[cfg(feature = "user")]
mod pod {
    use super::{FlowBudgetEntry, FlowBudgetKey, FlowEventRecord, SeenFlowEntry, SeenFlowKey};
    macro_rules! pod {
        ($($t:ty),*) => {
            // SAFETY: repr(C) of integers and arrays without implicit padding (sizes asserted above).
            $(unsafe impl aya::Pod for $t {})*
        };
    }
    pod!(
        FlowBudgetEntry,
        FlowBudgetKey,
        FlowEventRecord,
        SeenFlowEntry,
        SeenFlowKey
    );
}

#[cfg(test)]
mod tests {
    use super::server;
    use crate::packet::tcp::{ACK, FIN, RST, SYN};

    fn served(ports: [u16; 2], tcp_flags: u8) -> (u16, bool) {
        let (port, is_source) = server(ports.map(u16::to_be), tcp_flags);
        (u16::from_be(port), is_source)
    }

    #[test]
    fn who_opens_a_connection_is_the_client() {
        assert_eq!(served([80, 40_000], SYN), (40_000, false));
        assert_eq!(served([40_000, 80], SYN), (80, false));
        assert_eq!(served([40_000, 80], SYN | ACK), (40_000, true));
        assert_eq!(served([80, 40_000], SYN | ACK), (80, true));
    }

    #[test]
    fn else_the_lower_port_is_the_servers() {
        for flags in [0, ACK, FIN | ACK, RST] {
            assert_eq!(served([40_000, 80], flags), (80, false));
            assert_eq!(served([80, 40_000], flags), (80, true));
            // In network order 256 is the lower one.
            assert_eq!(served([255, 256], flags), (255, true));
            assert_eq!(served([256, 255], flags), (255, false));
        }
    }

    #[test]
    fn of_equal_ports_the_destinations_is_the_servers() {
        assert_eq!(served([5353, 5353], 0), (5353, false));
        assert_eq!(served([0, 0], 0), (0, false), "without ports");
    }
}
