//! Since when this leader has known something, by its own monotonic clock: a new leader begins anew.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// What is timed, and of what it is the UID or the name that stands beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timed {
    /// A role waits for a droplet or for acks. By its UID.
    RoleWait,
    /// An Endpoint waits for acks. By its UID.
    EndpointWait,
    /// A scaled Endpoint waits for acks, or its status was written. By its UID.
    ScaledWait,
    /// The address that an Endpoint asks for was refused by its droplet. By its UID.
    AddressRefused,
    /// A VPC needs fewer dividers. By its name.
    FewerDividers,
    /// A network needs fewer bouncers. By its name.
    FewerBouncers,
    /// The numbers in a network's status are not its own any more. By its name.
    NetworkCount,
    /// A claim was released. By its UID.
    ClaimReleased,
    /// No Endpoint counts a claim. By its UID.
    ClaimOrphaned,
    /// No VPC counts a VNI's claim. By its UID.
    VniClaimVoid,
    /// A pod names an Endpoint that is not there. By the pod's UID.
    EndpointMissing,
    /// A pod names an Endpoint that is another pod's. By the pod's UID.
    EndpointInUse,
    /// A pod's annotations can't be read. By its UID.
    AnnotationUnread,
    /// A pod's annotations make no Endpoint. By its UID.
    PodInvalid,
    /// The name of a Service's Endpoint is taken. By the Service's UID.
    ServiceNameTaken,
    /// A Service's annotations make no Endpoint. By its UID.
    ServiceInvalid,
    /// The name of a node's Endpoint is taken. By the node's name.
    HostNameTaken,
}

#[derive(Debug, Default)]
pub struct Clocks(Mutex<HashMap<(Timed, String), Instant>>);

impl Clocks {
    /// For how long it has been known: nothing at the first time of asking.
    pub fn known_for(&self, what: Timed, whose: &str) -> Duration {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match known.entry((what, whose.to_owned())) {
            Entry::Occupied(since) => since.get().elapsed(),
            Entry::Vacant(unknown) => {
                unknown.insert(Instant::now());
                Duration::ZERO
            }
        }
    }

    /// Asked again, it is new.
    pub fn forget(&self, what: Timed, whose: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(&(what, whose.to_owned()));
    }

    /// What is left of `time` since it was first asked about.
    pub fn remaining(&self, what: Timed, whose: &str, time: Duration) -> Option<Duration> {
        time.checked_sub(self.known_for(what, whose))
            .filter(|left| !left.is_zero())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Clocks, Timed};

    #[tokio::test(start_paused = true)]
    async fn what_is_asked_about_first_is_new_until_it_is_forgotten() {
        let clocks = Clocks::default();
        assert!(clocks.known_for(Timed::RoleWait, "a").is_zero());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(clocks.known_for(Timed::RoleWait, "a"), Duration::from_secs(2));
        assert!(
            clocks.known_for(Timed::EndpointWait, "a").is_zero(),
            "another thing"
        );
        let left = clocks.remaining(Timed::RoleWait, "a", Duration::from_secs(5));
        assert_eq!(left, Some(Duration::from_secs(3)));
        assert_eq!(
            clocks.remaining(Timed::RoleWait, "a", Duration::from_secs(2)),
            None
        );
        clocks.forget(Timed::RoleWait, "a");
        assert!(clocks.known_for(Timed::RoleWait, "a").is_zero());
    }
}
