//! Tells transitd of flows: of the first packet with a verdict, of the end, and each half minute of what was added.
//! Agents and delivery tell of what passes, and every program of what it drops.
//!
//! Invariant: without `CONFIG_FLOW_DROPS` and `CONFIG_FLOWS` nothing here runs. No VPC has more than
//! [`FLOW_EVENTS_PER_SECOND`] events of a kind in a second. That is asked before anything is written: a flood of new
//! flows costs two look-ups a packet, and no VPC takes room in SEEN_FLOWS and FLOW_EVENTS faster than so.

use aya_ebpf::{bindings::BPF_ANY, helpers::bpf_ktime_get_coarse_ns, macros::map, maps::PerCpuArray};
use thuban_common::{
    counters::{Counter, is_drop},
    flow_events::{
        FLOW_EVENTS_PER_SECOND, FlowBudgetEntry, FlowBudgetKey, FlowEvent, FlowEventRecord, NO_VERDICT,
        SeenFlowEntry, SeenFlowKey, TELL_EVERY, server,
    },
    packet::{
        ethernet,
        tcp::{FIN, RST},
    },
    policy::in_vpc,
    tables::{NO_COUNTER, NO_DROPLET, TracePoint},
};

use crate::{
    count::count,
    denials,
    maps::{self, FLOW_BUDGETS, FLOW_EVENTS, SEEN_FLOWS},
    trace::Observed,
    work::now,
};

/// A second, ns.
const SECOND: u64 = 1_000_000_000;

/// What is too large for the stack: the flow of a packet, and what is told of it.
struct Flow {
    key: SeenFlowKey,
    entry: SeenFlowEntry,
}

/// One value for each CPU is enough, see `trace`.
#[map]
static FLOW: PerCpuArray<Flow> = PerCpuArray::with_max_entries(1, 0);

/// Notes the end of a packet, if flows are told of such ends. A packet whose addresses were not read is of no flow.
#[inline(always)]
pub fn note(point: TracePoint, observed: &Observed) {
    // It is read back from memory: the verifier would follow each number that it knows by itself.
    // SAFETY: a field of a reference.
    let number = unsafe { (&raw const observed.counter).read_volatile() };
    let is_drop = is_drop(number);
    if observed.tells(is_drop)
        && (is_drop || is_end(point, number))
        && observed.packet.length != 0
        && observed.vni != 0
    {
        // SAFETY: the reference is valid for the call.
        unsafe { flows_tell(observed, point as u32) };
    }
}

/// Whether a packet that passes is sent by an agent or delivered. What this node answers itself is no flow's.
#[inline(always)]
const fn is_end(point: TracePoint, number: u32) -> bool {
    const NEIGHBOUR: u32 = Counter::NeighbourReplies as u32;
    const DELIVERED: u32 = Counter::Delivered as u32;
    const FRONT_DELIVERED: u32 = Counter::FrontDelivered as u32;
    const FRONT_ERROR: u32 = Counter::FrontErrors as u32;
    if is_agent(point as u32) {
        !matches!(number, NO_COUNTER | NEIGHBOUR)
    } else {
        matches!(number, DELIVERED | FRONT_DELIVERED | FRONT_ERROR)
    }
}

#[inline(always)]
const fn is_agent(point: u32) -> bool {
    point == TracePoint::AgentTc as u32 || point == TracePoint::AgentXdp as u32
}

/// Adds a packet to its flow, and tells of it if there is news. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
unsafe extern "C" fn flows_tell(observed: *const Observed, point: u32) -> u32 {
    // SAFETY: the caller's promise.
    let observed = unsafe { observed.as_ref() };
    // SAFETY: this CPU's only value, and nobody else has it now.
    let flow = FLOW.get_ptr_mut(0).map(|flow| unsafe { &mut *flow });
    if let (Some(observed), Some(flow)) = (observed, flow) {
        tell(flow, observed, point);
    }
    0
}

#[inline(always)]
fn tell(flow: &mut Flow, observed: &Observed, point: u32) {
    flow.set_key(observed, point);
    // SAFETY: helper without arguments. It costs less than the exact time, and half minutes and seconds need no more.
    let time = unsafe { bpf_ktime_get_coarse_ns() };
    let known = SEEN_FLOWS.get_ptr_mut(&flow.key);
    let news = match known {
        // SAFETY: an element of the map.
        Some(known) => unsafe { add(known, observed, time) },
        None => Some(FlowEvent::First),
    };
    let Some(mut event) = news else {
        return;
    };
    if !has_budget(observed, point, time) {
        // What goes on is told later.
        if !matches!(event, FlowEvent::GoesOn) {
            count(Counter::FlowsOverBudget);
        }
        return;
    }
    match known {
        // SAFETY: an element of the map.
        Some(known) => unsafe { flow.take(known, observed, time) },
        None => match flow.begin(observed, time) {
            Some(first) => event = first,
            None => return,
        },
    }
    flow.write(observed, point, event);
}

/// Whether a packet ends its direction of a flow.
#[inline(always)]
const fn ends(observed: &Observed) -> bool {
    observed.packet.tcp_flags & (FIN | RST) != 0
}

/// Returns the bytes of a packet's inner frame.
#[inline(always)]
const fn bytes(observed: &Observed) -> u64 {
    observed.packet.length as u64 + ethernet::LENGTH as u64
}

/// Adds a packet to a known flow. Returns what there is to tell.
///
/// # Safety
///
/// `known` is an element of SEEN_FLOWS. Another flow may have got it meanwhile (see `maps`), and other CPUs may write
/// it: then some packets are counted for the wrong flow or not at all.
#[inline(always)]
unsafe fn add(known: *mut SeenFlowEntry, observed: &Observed, time: u64) -> Option<FlowEvent> {
    // SAFETY: by the caller; the map is preallocated, so the element stays allocated.
    let known = unsafe { &mut *known };
    known.packets = known.packets.wrapping_add(1);
    known.bytes = known.bytes.wrapping_add(bytes(observed));
    known.tcp_flags |= observed.packet.tcp_flags;
    if ends(observed) && known.has_ended == 0 {
        Some(FlowEvent::Ended)
    } else if time.saturating_sub(known.told) >= TELL_EVERY {
        Some(FlowEvent::GoesOn)
    } else {
        None
    }
}

/// Whether the VPC may have an event more in this second; counts it. All VPCs of the wire that this droplet doesn't
/// know share one budget, so that nobody gets another one by another VNI.
#[inline(always)]
fn has_budget(observed: &Observed, point: u32, time: u64) -> bool {
    let is_drop = is_drop(observed.counter);
    let is_unknown = is_drop && !is_agent(point) && maps::vpc(observed.vni).is_none();
    let key = FlowBudgetKey {
        vni: if is_unknown { 0 } else { observed.vni },
        is_of_drops: is_drop.into(),
    };
    let second = (time / SECOND) as u32;
    let Some(entry) = FLOW_BUDGETS.get_ptr_mut(&key) else {
        let entry = FlowBudgetEntry { second, events: 1 };
        return FLOW_BUDGETS.insert(&key, entry, u64::from(BPF_ANY)).is_ok();
    };
    // SAFETY: words of a value that stays allocated (preallocated LRU); counts lost between CPUs do no harm.
    unsafe {
        if (*entry).second != second {
            (*entry).second = second;
            (*entry).events = 0;
        }
        if (*entry).events >= FLOW_EVENTS_PER_SECOND {
            return false;
        }
        (*entry).events += 1;
    }
    true
}

impl Flow {
    #[inline(always)]
    fn set_key(&mut self, observed: &Observed, point: u32) {
        let packet = &observed.packet;
        let (server_port, from_server) = server(packet.ports, packet.tcp_flags);
        self.key = SeenFlowKey {
            source: packet.source,
            destination: packet.destination,
            vni: observed.vni,
            server_port,
            protocol: packet.protocol,
            verdict: observed.counter as u8,
            point: point as u8,
            from_server: from_server.into(),
            padding: [0; 2],
        };
    }

    /// Takes out of a known flow what is told of it now.
    ///
    /// # Safety
    ///
    /// As of [`add`].
    #[inline(always)]
    unsafe fn take(&mut self, known: *mut SeenFlowEntry, observed: &Observed, time: u64) {
        // SAFETY: by the caller; the map is preallocated, so the element stays allocated.
        let known = unsafe { &mut *known };
        self.entry = *known;
        known.told = time;
        known.packets = 0;
        known.bytes = 0;
        known.tcp_flags = 0;
        known.has_ended = ends(observed).into();
    }

    /// Remembers a flow with a verdict that it did not have, and returns what to tell; nothing if there is no room.
    #[inline(always)]
    fn begin(&mut self, observed: &Observed, time: u64) -> Option<FlowEvent> {
        self.entry = SeenFlowEntry {
            told: time,
            packets: 0,
            bytes: 0,
            tcp_flags: 0,
            has_ended: ends(observed).into(),
            padding: [0; 6],
        };
        if !self.put() {
            count(Counter::FlowTableFull);
            return None;
        }
        let mut event = FlowEvent::First;
        // If drops alone are told, the table is small: a scan of ports takes one entry of it for each port, not two.
        if observed.tells(false) {
            self.key.verdict = NO_VERDICT;
            if SEEN_FLOWS.get_ptr(&self.key).is_some() {
                event = FlowEvent::Changed;
            } else {
                // Without room for it, a changed verdict is told as a first packet.
                self.put();
            }
        }
        self.entry.packets = 1;
        self.entry.bytes = bytes(observed);
        self.entry.tcp_flags = observed.packet.tcp_flags;
        Some(event)
    }

    #[inline(always)]
    fn put(&self) -> bool {
        SEEN_FLOWS
            .insert(&self.key, &self.entry, u64::from(BPF_ANY))
            .is_ok()
    }

    #[inline(always)]
    fn write(&self, observed: &Observed, point: u32, event: FlowEvent) {
        const INGRESS: u32 = Counter::PolicyIngress as u32;
        const EGRESS: u32 = Counter::PolicyEgress as u32;
        let packet = &observed.packet;
        let counter = observed.counter;
        // With these two reasons, what denied this packet was noted last.
        let denial = denials::noted().filter(|_| matches!(counter, INGRESS | EGRESS));
        let (set, rank) = denial.map_or((0, 0), |key| (in_vpc(key.set).1, key.rank));
        let is_sent = is_agent(point) && !is_drop(counter);
        let Some(mut record) = FLOW_EVENTS.reserve::<FlowEventRecord>(0) else {
            count(Counter::FlowEventsLost);
            return;
        };
        record.write(FlowEventRecord {
            time: now(),
            packets: self.entry.packets,
            bytes: self.entry.bytes,
            source: packet.source,
            destination: packet.destination,
            vni: observed.vni,
            interface: observed.interface,
            counter,
            next: if is_sent { observed.next } else { NO_DROPLET },
            ports: packet.ports,
            set,
            rank,
            protocol: packet.protocol,
            tcp_flags: self.entry.tcp_flags,
            point: point as u8,
            event: event as u8,
            from_server: self.key.from_server,
            padding: [0; 1],
        });
        record.submit(0);
    }
}
