//! Takes leases from holders that did not renew them, and frees addresses after their quarantine.
//!
//! Invariant: times are measured by this process's own monotonic clock, from the moment when it saw a renewal or a
//! release. A clock that is set changes nothing, and a start of the process only makes a lease last longer.

use std::collections::HashMap;
use std::time::Duration;

use kube::ResourceExt;
use thuban_api::ip_lease::{IpLease, LeaseState};
use tokio::time::Instant;

/// How long a lease may be Proposed: a cidrd that did not end its request by then has died.
const PROPOSED: Duration = Duration::from_mins(1);

/// What must be seen to change before a time begins anew: another object, state or renewal.
#[derive(PartialEq, Eq)]
struct Seen {
    uid: Option<String>,
    state: LeaseState,
    renewals: u64,
}

/// Since when each lease has been as it is, by its name.
#[derive(Default)]
pub struct Expiry(HashMap<String, (Seen, Instant)>);

impl Expiry {
    /// Looks at all leases, and returns those whose time is over.
    pub fn look<'a>(
        &mut self,
        leases: impl IntoIterator<Item = &'a IpLease>,
        now: Instant,
    ) -> Vec<&'a IpLease> {
        let mut known = std::mem::take(&mut self.0);
        let mut due = Vec::new();
        for lease in leases {
            let seen = Seen {
                uid: lease.uid(),
                state: lease.state(),
                renewals: lease.status.as_ref().map_or(0, |status| status.renewals),
            };
            let name = lease.name_any();
            let since = match known.remove(&name) {
                Some((before, since)) if before == seen => since,
                _ => now,
            };
            if now.duration_since(since) >= life(lease) {
                due.push(lease);
            }
            self.0.insert(name, (seen, since));
        }
        due
    }
}

/// How long a lease may stay as it is.
fn life(lease: &IpLease) -> Duration {
    let seconds = match lease.state() {
        LeaseState::Proposed => return PROPOSED,
        LeaseState::Held => lease.spec.lease_seconds,
        LeaseState::Quarantined => lease.spec.quarantine_seconds,
    };
    Duration::from_secs(seconds.into())
}
