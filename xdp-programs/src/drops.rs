//! Counts what agents drop by interface and reason, so that each pod can be told.
//!
//! Invariant: a packet that is not dropped costs nothing here. One that is costs a look-up, and the first of its kind a
//! write.

use aya_ebpf::bindings::BPF_ANY;
use thuban_common::{
    counters::Counter,
    tables::{DropKey, TracePoint},
};

use crate::maps::DROPS;

/// Counts a drop, if an agent drops. What transit drops came by the NIC, which is no pod's.
#[inline(always)]
pub fn note(point: TracePoint, interface: u32, reason: Counter) {
    if matches!(point, TracePoint::AgentTc | TracePoint::AgentXdp) {
        drops_count(interface, reason as u32);
    }
}

/// Adds one to a pod's drops for a reason. A global function, see `main`.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn drops_count(interface: u32, reason: u32) -> u32 {
    let key = DropKey { interface, reason };
    if let Some(packets) = DROPS.get_ptr_mut(&key) {
        // SAFETY: a word of a value that stays allocated (preallocated LRU); counts lost between CPUs do no harm.
        unsafe { *packets = (*packets).wrapping_add(1) };
    } else {
        let _ = DROPS.insert(&key, 1_u64, u64::from(BPF_ANY));
    }
    0
}
