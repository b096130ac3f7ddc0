//! Detours are counted, and a flow that stays is announced, so that user space asks for a direct row.

use aya_ebpf::bindings::BPF_ANY;
use thuban_common::{
    counters::Counter,
    tables::{EndpointKey, MissEntry},
};

use crate::{
    count::count,
    maps::{DIRECT_WANTED, MISSES},
};

/// Packets of a destination before it is announced.
const FEW: u32 = 3;

/// Counts a packet; announces the third, and again at each power of two, so that a lost event heals.
#[inline(always)]
pub fn note(key: &EndpointKey) {
    let Some(entry) = MISSES.get_ptr_mut(key) else {
        // A full table evicts; a failure costs one count.
        let _ = MISSES.insert(key, MissEntry { packets: 1 }, u64::from(BPF_ANY));
        return;
    };
    // SAFETY: a single word; a count lost between CPUs does no harm.
    let packets = unsafe {
        (*entry).packets = (*entry).packets.saturating_add(1);
        (*entry).packets
    };
    if packets == FEW || packets > FEW && packets & (packets - 1) == 0 {
        if DIRECT_WANTED.output::<EndpointKey>(key, 0).is_ok() {
            count(Counter::DirectWanted);
        }
    }
}
