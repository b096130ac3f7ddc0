//! The end of every packet: its verdict is counted, recorded if its endpoint is traced, and told with its flow.
//!
//! Invariant: without `CONFIG_TRACE` and the flags of flows, all but the counting costs one test of a word.

use aya_ebpf::{helpers::bpf_ktime_get_ns, macros::map, maps::PerCpuArray};
use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        ip::IpPacket,
    },
    policy::{Stamp, in_vpc},
    tables::{
        AttachmentEntry, CONFIG_FLOW_DROPS, CONFIG_FLOWS, CONFIG_TRACE, DropletAddress, EndpointKey,
        NO_COUNTER, TracePoint, TraceRecord,
    },
};

use crate::{
    count::count,
    denials, drops, flows,
    frame::{Frame, Outcome, Verdict},
    inner,
    maps::{self, TRACE, TRACED},
};

/// The facts that a program found out about the packet, up to where the packet ended.
pub struct Observed {
    /// Its length is 0 until it is read.
    pub packet: IpPacket,
    /// The client's packet of the flow that an ICMP error or a backend's answer at a front is of.
    pub quoted: IpPacket,
    pub vni: u32,
    pub next: DropletAddress,
    /// What the packet says of its sender, at an agent what it is to say.
    pub stamp: Stamp,
    pub interface: u32,
    /// The number of the [`Counter`] of the packet's end, or [`NO_COUNTER`]: for what is told of the end.
    pub counter: u32,
    length: u32,
    /// The flags of CONFIG that say what is told.
    told: u32,
}

/// The scratch space, too large for the stack beside everything else. One value for each CPU is enough: these hooks
/// run with bottom halves off and never within each other.
#[map]
static OBSERVED: PerCpuArray<Scratch> = PerCpuArray::with_max_entries(1, 0);

/// The memory that a run of a program has beside its stack.
pub struct Scratch {
    observed: Observed,
    /// The agent's copy of the attachment that its pod is held to.
    attachment: AttachmentEntry,
}

impl Observed {
    /// Returns the facts of a frame that wasn't looked at yet.
    #[inline(always)]
    pub fn new<F: Frame>(frame: &F) -> Option<&'static mut Self> {
        Self::with_attachment(frame).map(|(observed, _)| observed)
    }

    /// Does what [`Self::new`] does, and returns the place for the agent's attachment too.
    #[inline(always)]
    pub fn with_attachment<F: Frame>(frame: &F) -> Option<(&'static mut Self, &'static mut AttachmentEntry)> {
        let scratch = OBSERVED.get_ptr_mut(0)?;
        // SAFETY: this CPU's only value, and nobody else has it now, see OBSERVED.
        let Scratch { observed, attachment } = unsafe { &mut *scratch };
        observed.vni = 0;
        observed.next = [0; 4];
        observed.length = frame.length();
        observed.interface = frame.interface();
        observed.packet.length = 0;
        observed.told = maps::config().map_or(0, |config| {
            config.flags & (CONFIG_TRACE | CONFIG_FLOW_DROPS | CONFIG_FLOWS)
        });
        if observed.is_traced() {
            observed.packet = IpPacket::default();
            denials::forget();
        }
        Some((observed, attachment))
    }

    #[inline(always)]
    pub const fn is_traced(&self) -> bool {
        self.told & CONFIG_TRACE != 0
    }

    /// Whether packets of this end are told with their flow: of one that drops them, or that passes them.
    #[inline(always)]
    pub const fn tells(&self, is_drop: bool) -> bool {
        let flag = if is_drop { CONFIG_FLOW_DROPS } else { CONFIG_FLOWS };
        self.told & flag != 0
    }

    /// Reads the packet of a plain frame.
    #[inline(always)]
    pub fn read<F: Frame>(&mut self, frame: &F) {
        self.packet = IpPacket::default();
        if let Some(header) = frame.load::<EthernetHeader>(0) {
            // Fields that aren't read stay empty.
            let _ = inner::read(frame, header.ethertype, ethernet::LENGTH, 0, &mut self.packet);
        }
    }
}

/// Counts the outcome; an error is a drop, which an agent counts for its pod too.
#[inline(always)]
pub fn record_outcome<F: Frame>(point: TracePoint, observed: &mut Observed, outcome: Outcome) -> Verdict {
    let (verdict, counter) = match outcome {
        Ok((verdict, counter)) => (verdict, counter),
        Err(reason) => {
            drops::note(point, observed.interface, reason);
            (F::DROP, Some(reason))
        }
    };
    if let Some(counter) = counter {
        count(counter);
    }
    if observed.told != 0 {
        observed.counter = counter.map_or(NO_COUNTER, |counter| counter as u32);
        if observed.is_traced() {
            write(point, observed);
        }
        flows::note(point, observed);
    }
    verdict
}

#[inline(never)]
fn write(point: TracePoint, observed: &Observed) {
    // SAFETY: helper without arguments.
    let time = unsafe { bpf_ktime_get_ns() };
    let vni = observed.vni;
    let packet = &observed.packet;
    let is_wanted = |address| {
        let key = EndpointKey { vni, address };
        // SAFETY: a single word; another endpoint's time costs a line of a trace.
        unsafe { TRACED.get(&key) }.is_some_and(|until| time < *until)
    };
    if !is_wanted(packet.source) && !is_wanted(packet.destination) {
        return;
    }
    let (set, rank) = denials::noted().map_or((0, 0), |key| (in_vpc(key.set).1, key.rank));
    let Some(mut record) = TRACE.reserve::<TraceRecord>(0) else {
        count(Counter::TraceLost);
        return;
    };
    record.write(TraceRecord {
        time,
        vni,
        interface: observed.interface,
        source: packet.source,
        destination: packet.destination,
        length: observed.length,
        counter: observed.counter,
        next: observed.next,
        ports: packet.ports,
        protocol: packet.protocol,
        point: point as u8,
        rank,
        set,
    });
    record.submit(0);
}
