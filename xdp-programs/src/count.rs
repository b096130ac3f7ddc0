//! Counting what happened to packets.

use thuban_common::counters::Counter;

use crate::{frame::Verdict, maps::COUNTERS};

/// Adds one to a counter of this CPU.
#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(value) = COUNTERS.get_ptr_mut(counter as u32) {
        // SAFETY: this CPU's slot; programs at these hooks don't preempt each other on it.
        unsafe { *value += 1 };
    }
}

/// Ends a packet: the verdict, or `drop` after its reason was counted.
#[inline(always)]
pub fn settle(outcome: Result<Verdict, Counter>, drop: Verdict) -> Verdict {
    match outcome {
        Ok(verdict) => verdict,
        Err(reason) => {
            count(reason);
            drop
        }
    }
}
