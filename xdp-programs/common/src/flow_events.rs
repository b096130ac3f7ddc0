//! What programs tell of flows: keys and entries of SEEN_FLOWS, and records of FLOW_EVENTS.
//!
//! A flow has two directions, each with entries of its own, and one entry for each verdict of each program on the way.

use crate::tables::{Address, DropletAddress};

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
    /// The flow is known, but not with this verdict.
    Changed = 2,
    /// A packet with FIN or RST, once a direction.
    Ended = 3,
    /// Packets since the last event, told each [`TELL_EVERY`].
    GoesOn = 4,
}

/// [`SeenFlowKey::verdict`] of a packet that went on uncounted.
pub const NO_VERDICT: u8 = u8::MAX;
/// How long packets of a flow are added up before they are told, ns.
pub const TELL_EVERY: u64 = 30_000_000_000;
/// Entries of SEEN_FLOWS, if programs tell of all flows.
pub const SEEN_FLOWS_CAPACITY: u32 = 65_536;
