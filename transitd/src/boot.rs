//! The node's boot: its id, and the clocks that count from it, which no change of the wall clock moves.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
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

/// Returns the wall clock's time of a time of the programs' clock, ns.
pub fn wall_clock(time: u64) -> Timestamp {
    let age = (monotonic().as_nanos() as u64).saturating_sub(time);
    Timestamp::now()
        .saturating_sub(SignedDuration::from_nanos(i64::try_from(age).unwrap_or(i64::MAX)))
        .unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_packet_is_by_the_wall_clock() {
        let age = Timestamp::now().duration_since(wall_clock(monotonic().as_nanos() as u64 - 5_000_000_000));
        assert!((4900..6000).contains(&age.as_millis()), "{age:?}");
    }
}
