//! What programs tell transitd of the packets that they saw: misses and wanted addresses, loads, drops, and traces.

use super::{Address, DropletAddress, EndpointKey};

/// MISSES[[`MissEntry::place`]]: packets to an endpoint that an agent sent by way of a bouncer or divider. Endpoints of
/// one place take it from each other. A VPC takes at most [`NOTED_PER_WINDOW`] places in a [`NOTED_WINDOW`], so that a
/// scan rarely takes the place of another VPC's slow flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissEntry {
    /// Tells the endpoints of a place apart.
    pub tag: u32,
    pub packets: u32,
}

impl MissEntry {
    /// Returns an endpoint's index in MISSES, and its tag.
    #[inline(always)]
    pub const fn place(of: &EndpointKey, seed: u32) -> (u32, u32) {
        let mut hash = mix(seed as u64, of.vni);
        let mut byte = 0;
        while byte < of.address.len() {
            let [a, b, c, d] = [
                of.address[byte],
                of.address[byte + 1],
                of.address[byte + 2],
                of.address[byte + 3],
            ];
            hash = mix(hash, u32::from_ne_bytes([a, b, c, d]));
            byte += 4;
        }
        (hash as u32 % MISSES_CAPACITY, (hash >> 32) as u32)
    }
}

#[inline(always)]
const fn mix(hash: u64, word: u32) -> u64 {
    let product = (hash ^ word as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ product >> 29
}

/// Key of LOADS: packets that a role of this droplet passed on, per CPU. transitd makes the entries, and programs
/// count where there is one.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LoadKey {
    pub vni: u32,
    /// The network whose bouncer it is, or [`LOAD_OF_DIVIDER`].
    pub network: u32,
}

/// ANNOUNCED[vni], LRU: how many events of DIRECT_WANTED a VPC had in a second, and how many places it took
/// in MISSES in a window. Written by agents.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AnnouncedEntry {
    /// Seconds since boot.
    pub second: u32,
    pub events: u32,
    /// [`NOTED_WINDOW`]s since boot.
    pub window: u32,
    pub noted: u32,
}

/// Record of the ring buffer TRACE: what a program did with a packet of a traced endpoint.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Nanoseconds since boot.
    pub time: u64,
    pub vni: u32,
    /// Interface that the frame came in by.
    pub interface: u32,
    pub source: Address,
    pub destination: Address,
    /// Bytes of the frame as the program got it.
    pub length: u32,
    /// The [`crate::counters::Counter`] of the verdict, or [`NO_COUNTER`].
    pub counter: u32,
    /// The droplet that it was sent to; zeros if to none.
    pub next: DropletAddress,
    /// The ports, network order; zeros where the packet doesn't show them.
    pub ports: [u16; 2],
    pub protocol: u8,
    /// The [`TracePoint`].
    pub point: u8,
    /// The rank of the rule of `set` that denies the packet, as in [`crate::policy::DenialKey`].
    pub rank: u16,
    /// The set of network policy that denies the packet; 0: none.
    pub set: u32,
}

/// Key of DROPS, LRU: the packets that the agent of an interface dropped for a reason. The value is their number; some
/// are not counted where several CPUs drop at once.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DropKey {
    /// The host's end of the pod's veth.
    pub interface: u32,
    /// The number of the [`crate::counters::Counter`].
    pub reason: u32,
}

/// Entries of DROPS.
pub const DROPS_CAPACITY: u32 = 8192;

/// Program that a trace record comes from.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TracePoint {
    AgentTc = 0,
    AgentXdp = 1,
    TransitTc = 2,
    TransitXdp = 3,
}

/// Record of the ring buffer DIRECT_WANTED: transitd subscribes to this address.
pub type DirectWanted = EndpointKey;

/// [`TraceRecord::counter`] of a packet that went on to the next hook or the host's stack uncounted.
pub const NO_COUNTER: u32 = u32::MAX;
/// [`LoadKey::network`] of the VPC's divider.
pub const LOAD_OF_DIVIDER: u32 = 0;
/// Events of DIRECT_WANTED that one VPC may have in a second on a droplet.
pub const ANNOUNCEMENTS_PER_SECOND: u32 = 512;
/// Places in MISSES: twice as many as 32 VPCs may take in a window.
pub const MISSES_CAPACITY: u32 = 131_072;
/// Places that one VPC may take in MISSES in a window on a droplet.
pub const NOTED_PER_WINDOW: u32 = 2048;
/// How long a window is, seconds. A flow with a packet in 3 s is found again in it.
pub const NOTED_WINDOW: u32 = 8;
