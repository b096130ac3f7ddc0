//! GATES: whether packets are looked up in CONNECTIONS and PENDING at all.

use crate::maps::GATES;

/// The interval at which the gate of PENDING is extended, ns.
const GATE: u64 = 1_000_000_000;

/// Whether there ever was a connection or something pending.
#[inline(always)]
pub fn is_open() -> bool {
    GATES.get(0).is_some_and(|gates| gates.connections != 0)
}

/// Opens the gates: from now on packets are looked up in CONNECTIONS and, until `pending_until`, in PENDING.
#[inline(always)]
pub fn open(pending_until: u64) {
    let Some(gates) = GATES.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: words of an array's element, which stays.
    unsafe {
        if (*gates).connections == 0 {
            (*gates).connections = 1;
        }
        if (*gates).pending_until + GATE < pending_until {
            (*gates).pending_until = pending_until;
        }
    }
}

#[inline(always)]
pub fn is_pending_open(now: u64) -> bool {
    GATES.get(0).is_some_and(|gates| now < gates.pending_until + GATE)
}
