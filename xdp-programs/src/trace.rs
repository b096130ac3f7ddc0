//! The end of every packet: its verdict is counted, and recorded if its endpoint is traced.
//!
//! Invariant: without `CONFIG_TRACE` tracing costs one test of a word.

use aya_ebpf::{helpers::bpf_ktime_get_ns, macros::map, maps::PerCpuArray};
use thuban_common::{
    counters::Counter,
    packet::{
        ethernet::{self, EthernetHeader},
        ip::IpPacket,
    },
    policy::{Stamp, in_vpc},
    tables::{
        AttachmentEntry, CONFIG_TRACE, DropletAddress, EndpointKey, NO_COUNTER, TracePoint, TraceRecord,
    },
};

use crate::{
    count::count,
    denials, drops,
    frame::{Frame, Outcome, Verdict},
    inner,
    maps::{self, TRACE, TRACED},
};

/// The facts that a program found out about the packet, up to where the packet ended.
pub struct Observed {
    pub packet: IpPacket,
    /// The client's packet of the flow that an ICMP error or a backend's answer at a front is of.
    pub quoted: IpPacket,
    pub vni: u32,
    pub next: DropletAddress,
    /// What the packet says of its sender, at an agent what it is to say.
    pub stamp: Stamp,
    length: u32,
    interface: u32,
    is_traced: bool,
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
        observed.is_traced = maps::config().is_some_and(|config| config.flags & CONFIG_TRACE != 0);
        if observed.is_traced {
            observed.packet = IpPacket::default();
            denials::forget();
        }
        Some((observed, attachment))
    }

    #[inline(always)]
    pub const fn is_traced(&self) -> bool {
        self.is_traced
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
pub fn record_outcome<F: Frame>(point: TracePoint, observed: &Observed, outcome: Outcome) -> Verdict {
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
    if observed.is_traced {
        write(point, observed, counter);
    }
    verdict
}

#[inline(never)]
fn write(point: TracePoint, observed: &Observed, counter: Option<Counter>) {
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
        counter: counter.map_or(NO_COUNTER, |counter| counter as u32),
        next: observed.next,
        ports: packet.ports,
        protocol: packet.protocol,
        point: point as u8,
        rank,
        set,
    });
    record.submit(0);
}
