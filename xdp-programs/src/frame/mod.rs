//! A frame at a hook: bytes, room in front, and ways out. All differences between tc and XDP are here and nowhere
//! else.

pub mod tc;
pub mod xdp;

use thuban_common::{
    counters::Counter,
    packet::Header,
    tables::{ConfigEntry, DropletAddress, LocalEntry},
};

/// The value that a program returns to the kernel.
pub type Verdict = i32;

/// The result of a way out: `None` when this hook can't take it and has left the frame unchanged for the next one.
pub type Exit = Result<Option<Verdict>, Counter>;

/// The end of a packet: the verdict with the counter (none, when a later hook has the last word), or the reason why
/// it's dropped.
pub type Outcome = Result<(Verdict, Option<Counter>), Counter>;

pub trait Frame {
    /// Passes the frame to the next hook or the host's stack, unchanged.
    const PASS: Verdict;
    const DROP: Verdict;
    /// No program of ours sees the frame after this one.
    const IS_LAST: bool;
    /// The way to reach a droplet.
    type NextHop;

    /// Returns the frame if this is tc, for work that only the stack can do.
    fn tc(&mut self) -> Option<&mut tc::TcFrame>;
    /// Returns the header at a constant offset, if the directly readable part holds it.
    fn load<H: Header>(&self, offset: usize) -> Option<H>;
    /// Returns the header at any offset.
    fn load_far<H: Header>(&self, offset: u32) -> Option<H>;
    /// Overwrites the header at a constant offset.
    fn store<H: Header>(&mut self, offset: usize, header: &H) -> Option<()>;
    /// Makes the first `length` bytes (or all there are) directly readable. Returns false when only a later hook can.
    fn make_linear(&mut self, length: u32) -> bool;
    /// Returns the bytes from the Ethernet header to the end.
    fn length(&self) -> u32;
    /// Returns the interface by which the frame came in.
    fn interface(&self) -> u32;
    /// Returns the payload bytes of each segment, 0 when it's no GSO frame.
    fn segment_size(&self) -> u32;
    /// Returns the offset at which a NIC is to write a checksum into the frame; none: it is to write none.
    fn checksum_place(&self) -> Option<u32>;
    /// Whether the frame is for this node, as far as this hook knows: a NIC may let others' frames through.
    fn is_for_node(&self) -> bool;
    /// Whether the frame had a VLAN tag that the NIC or the stack removed.
    fn is_vlan_tagged(&self) -> bool;

    fn next_hop(&self, config: &ConfigEntry, droplet: DropletAddress) -> Option<Self::NextHop>;
    /// Makes room for the outer headers behind the outer Ethernet header, whose addresses `send` writes. `protocol` is
    /// that of the plain packet.
    fn grow(&mut self, protocol: u8) -> Result<(), Counter>;
    /// Sends an encapsulated frame to a droplet.
    fn send(&mut self, next_hop: &Self::NextHop) -> Result<Verdict, Counter>;
    /// Sends the frame back by the interface that it came from.
    fn reply(&mut self) -> Option<Verdict>;
    /// Keeps the first `length` bytes; `None` when it can't be done.
    fn cut(&mut self, length: u32) -> Option<()>;
    /// Keeps the first `keep` bytes and makes `room` behind the Ethernet header; `None` when it can't be done.
    fn quote(&mut self, keep: u32, room: u32) -> Option<()>;
    /// Returns the sum of the 16-bit words in `N` bytes at a constant offset, folded to less than 2^18.
    fn sum<const N: usize>(&self, offset: usize) -> Option<u32>;
    /// Gives a plain frame to an endpoint of this droplet.
    fn deliver(&mut self, local: &LocalEntry) -> Verdict;
    /// Removes `length` bytes of outer headers for an endpoint of this droplet. Returns false when this hook can't,
    /// and has left the frame unchanged. The caller writes the inner Ethernet header; its place holds arbitrary bytes.
    fn decapsulate(
        &mut self,
        length: u32,
        is_v6: bool,
        vni: u32,
        local: &LocalEntry,
    ) -> Result<bool, Counter>;
}
