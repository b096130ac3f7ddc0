//! The lease of tenants' ports: how long ports of tenants' Services stay open without the operator. A port that is
//! removed from a Service may soon be another tenant's. A node that does not hear of the removal would lead the other
//! tenant's clients to the old Service.
//!
//! The lease is elements of a set with a timeout: the kernel removes them by itself, even if transitd is dead. Without
//! the elements no new connection reaches such a port. Existing connections go on.
//!
//! Times are nanoseconds since boot ([`crate::boot::nanoseconds`]).

use std::time::Duration;

use thuban_common::host_stack::NFT_TABLE;

/// The name of the set, and of the counter of packets that are dropped without its elements: a reason of drops.
pub const LEASE: &str = "lease";
pub const STALE: &str = "node_port_stale";

const PROTOCOLS: [&str; 3] = ["tcp", "udp", "sctp"];

/// The lease as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Until(u64),
    /// The state is unknown: an earlier transitd wrote the lease.
    Unknown,
    Nothing,
}

/// Returns the commands that fill an empty set with a lease until that time. The timeout is rounded down to whole
/// seconds.
pub fn elements(until: u64, now: u64) -> Option<String> {
    let left = Duration::from_nanos(until.saturating_sub(now)).as_secs();
    let each = PROTOCOLS.map(|protocol| format!("{protocol} timeout {left}s"));
    (left > 0).then(|| format!("add element inet {NFT_TABLE} {LEASE} {{ {} }}\n", each.join(", ")))
}

/// Returns the commands that make any lease one until that time.
pub fn renewal(until: u64, now: u64) -> String {
    let elements = elements(until, now).unwrap_or_default();
    format!("flush set inet {NFT_TABLE} {LEASE}\n{elements}")
}

/// Returns the rule that drops new connections without a lease.
pub fn rule() -> String {
    format!("meta l4proto != @{LEASE} counter name \"{STALE}\" drop")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn a_lease_ends_no_later_than_it_is_to() {
        let text = renewal(700 * SECOND, 100 * SECOND + 1);
        assert!(text.starts_with("flush set inet thuban lease\n"), "{text}");
        assert!(
            text.ends_with("{ tcp timeout 599s, udp timeout 599s, sctp timeout 599s }\n"),
            "{text}"
        );
        for until in [0, 99 * SECOND, 100 * SECOND, 101 * SECOND - 1] {
            assert_eq!(elements(until, 100 * SECOND), None);
        }
    }
}
