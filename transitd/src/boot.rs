//! The node's boot: its id, and the clocks that count from it, which no change of the wall clock moves.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

pub fn id() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?
        .trim()
        .to_owned())
}

/// Returns the time of the programs' clock, which stands still while the node is asleep.
pub fn monotonic() -> Duration {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(Duration::ZERO, Duration::from)
}

/// Nanoseconds since the node was started, time asleep included; what the CNI plugin's clock tells.
pub fn nanoseconds() -> u64 {
    // The kernel has had this clock since 2.6.39.
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(0, |time| Duration::from(time).as_nanos() as u64)
}
