//! For how long ports of tenants' Services are open without the operator: a port that is taken from a Service may be another
//! tenant's soon, and a node that hears nothing of it would lead that tenant's clients to the old one.
//!
//! Elements of a set with a timeout are the lease: the kernel takes them out by itself, also when transitd is dead. Without them
//! no new connection gets to such a port. Those that there are go on.
//!
//! Times are nanoseconds since boot ([`crate::boot::nanoseconds`]).

use std::time::Duration;

use thuban_common::host_stack::NFT_TABLE;

/// The set, and the counter of what is dropped without its elements: a reason of drops.
pub const LEASE: &str = "lease";
pub const STALE: &str = "node_port_stale";

const PROTOCOLS: [&str; 3] = ["tcp", "udp", "sctp"];

/// The lease as the kernel has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Until(u64),
    /// Whatever an earlier transitd told.
    Unknown,
    Nothing,
}

/// What makes a lease until then of an empty set. Whole seconds, rather too few.
pub fn elements(until: u64, now: u64) -> Option<String> {
    let left = Duration::from_nanos(until.saturating_sub(now)).as_secs();
    let each = PROTOCOLS.map(|protocol| format!("{protocol} timeout {left}s"));
    (left > 0).then(|| format!("add element inet {NFT_TABLE} {LEASE} {{ {} }}\n", each.join(", ")))
}

/// What makes a lease until then of any.
pub fn renewal(until: u64, now: u64) -> String {
    let elements = elements(until, now).unwrap_or_default();
    format!("flush set inet {NFT_TABLE} {LEASE}\n{elements}")
}

/// Drops new connections without a lease.
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
