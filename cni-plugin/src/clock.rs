//! Time that no change of the wall clock moves, and the boot that it counts from.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Returns the time since the node was started, time asleep included.
pub fn since_boot() -> Duration {
    // The kernel has had this clock since 2.6.39.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from)
}

/// Returns the id of this boot; empty where /proc has none.
pub fn boot_id() -> String {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    text.trim().to_owned()
}
