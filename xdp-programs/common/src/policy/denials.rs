//! What policy denied: keys and entries of DENIALS, and records of DENIED.

use crate::tables::Address;

/// Key of DENIALS: what denied packets of an endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DenialKey {
    /// [`super::of_vpc`]; 0: nothing.
    pub set: u64,
    /// The host's end of the veth of the endpoint on this droplet: the one that the packets are for, of
    /// [`DENIAL_OUTSIDE`] the one that they come from.
    pub interface: u32,
    /// The rank of the rule that denies; [`super::NO_RULE`]: none does, and none accepts.
    pub rank: u16,
    /// [`DENIAL_EGRESS`], [`DENIAL_OUTSIDE`].
    pub flags: u16,
}

/// [`DenialKey::flags`]: the sender's egress set denies, else the destination's ingress set.
pub const DENIAL_EGRESS: u16 = 1;
/// [`DenialKey::flags`]: the packets are for an address outside of the VPC. The agent marks them, and the node drops
/// them unless they answer somebody or are for the node itself.
pub const DENIAL_OUTSIDE: u16 = 2;

/// DENIALS[[`DenialKey`]], LRU: how many packets were denied so, and one of them.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DenialEntry {
    /// The time of the packet that the entry shows, ns since boot. It is the first one of a [`DENIAL_WINDOW`].
    pub time: u64,
    /// All packets so far. Some are not counted where several CPUs deny at once.
    pub packets: u64,
    /// The flow that was judged: behind the translation of a Service. Of an ICMP error, the flow of the answers to the
    /// packet that it quotes.
    pub source: Address,
    pub destination: Address,
    /// Packets in the window.
    pub recent: u32,
    /// Network order, as in keys of FLOWS: an echo has its identifier in the place of a port.
    pub ports: [u16; 2],
    pub protocol: u8,
    /// Whether the packet is an ICMP error (1).
    pub is_error: u8,
    pub padding: [u8; 6],
}

/// Record of the ring buffer DENIED: a denied packet. Its entry counts the packets up to this one. At most
/// [`DENIALS_PER_WINDOW`] are written for a key, and only until the time in FOLLOWED.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DenialRecord {
    pub key: DenialKey,
    pub entry: DenialEntry,
}

/// A second, ns.
pub const DENIAL_WINDOW: u64 = 1_000_000_000;
pub const DENIALS_PER_WINDOW: u32 = 16;
/// How many packets that a rule denies to or from a pod are answered in a second, if they are answered.
pub const REJECTIONS_PER_WINDOW: u32 = 100;
/// Entries of DENIALS.
pub const DENIALS_CAPACITY: u32 = 4096;
