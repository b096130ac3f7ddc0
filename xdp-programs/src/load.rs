//! Counts the packets that the roles of this droplet pass on, for each role that user space has made an entry for.

use thuban_common::tables::LoadKey;

use crate::maps::LOADS;

/// Counts one more packet that a role passed on; `network` as in [`LoadKey`].
#[inline(always)]
pub fn count(vni: u32, network: u32) {
    if let Some(packets) = LOADS.get_ptr_mut(&LoadKey { vni, network }) {
        // SAFETY: this CPU's value; programs at these hooks don't preempt each other on it. A role that goes at this
        // moment may leave its packet to another's count, see `maps`.
        unsafe { *packets += 1 };
    }
}
