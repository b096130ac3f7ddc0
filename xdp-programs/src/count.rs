//! Counts what happened to packets.

use thuban_common::counters::Counter;

use crate::maps::COUNTERS;

/// Adds one to a counter of this CPU.
#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: this CPU's slot; programs at these hooks don't preempt each other on it.
        unsafe { *value += 1 };
    }
}
