//! Clocks that say since when this leader has known something, by its own monotonic clock: a new leader starts again.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The subjects that are timed. Each is timed by a UID or a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Timed {
    /// A role waits for a droplet or for acks. By its UID.
    RoleWait,
    /// No droplet uses a role any more where it was. By its UID.
    RoleUnused,
    /// A role moved because its droplet had no room for its tables. By its UID.
    RoleMoved,
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
    /// A VPC's stored status is out of date. By its name.
    VpcStatus,
    /// A network's stored status is out of date. By its name.
    NetworkStatus,
    /// The roles in a droplet's status are out of date. By its name.
    DropletRoles,
    /// The numbers in a network's status are out of date. By its name.
    NetworkCount,
    /// An event said that a network's addresses are nearly used up. By its name.
    AddressesNearlyUsedUp,
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
    /// The API server denies a pod, a Service or a node its Endpoint. By its UID.
    EndpointDenied,
    /// An event reported the denial. By the same UID.
    DenialTold,
    /// The name of a Service's Endpoint is taken. By the Service's UID.
    ServiceNameTaken,
    /// A Service's annotations ask for addresses that can't be read. By its UID.
    ServiceInvalid,
    /// The name of a node's Endpoint is taken. By the node's name.
    HostNameTaken,
    /// A policy waits until droplets enforce it. By its UID and generation.
    PolicyWait,
    /// An event said that a pod has too many rules. By the Endpoint's UID.
    TooManyRules,
}

#[derive(Debug, Default)]
pub struct Clocks(Mutex<HashMap<(Timed, String), Instant>>);

impl Clocks {
    /// Returns how long it has been known: zero at the first call.
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

    /// Begins it anew, now.
    pub fn begin(&self, what: Timed, whose: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.insert((what, whose.to_owned()), Instant::now());
    }

    /// Whether it began less than `time` ago. An unknown one does not begin by this.
    pub fn is_recent(&self, what: Timed, whose: &str, time: Duration) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = known.get(&(what, whose.to_owned()));
        since.is_some_and(|since| since.elapsed() < time)
    }

    /// Whether it was asked about, and has not been forgotten since.
    pub fn is_known(&self, what: Timed, whose: &str) -> bool {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.contains_key(&(what, whose.to_owned()))
    }

    /// Returns true at the first call, and again whenever so much time has passed since the last time that it was true.
    pub fn is_due(&self, what: Timed, whose: &str, every: Duration) -> bool {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (what, whose.to_owned());
        let is_due = known.get(&key).is_none_or(|since| since.elapsed() >= every);
        if is_due {
            known.insert(key, Instant::now());
        }
        is_due
    }

    /// Forgets the time: at the next call it is new.
    pub fn forget(&self, what: Timed, whose: &str) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.remove(&(what, whose.to_owned()));
    }

    /// Forgets the time, and returns how long it has been known.
    pub fn take(&self, what: Timed, whose: &str) -> Option<Duration> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let since = known.remove(&(what, whose.to_owned()))?;
        Some(since.elapsed())
    }

    /// Returns the rest of `time` since it was first asked about.
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
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(clocks.take(Timed::RoleWait, "a"), Some(Duration::from_secs(3)));
        assert_eq!(clocks.take(Timed::RoleWait, "a"), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_began_is_recent_for_its_time() {
        let clocks = Clocks::default();
        let is_recent = || clocks.is_recent(Timed::RoleMoved, "a", Duration::from_mins(5));
        assert!(!is_recent() && !is_recent(), "a question begins nothing");
        for _ in 0..2 {
            clocks.begin(Timed::RoleMoved, "a");
            tokio::time::advance(Duration::from_secs(299)).await;
            assert!(is_recent());
        }
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!is_recent());
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_due_is_due_again_after_its_time() {
        let clocks = Clocks::default();
        let is_due = || clocks.is_due(Timed::DenialTold, "a", Duration::from_mins(1));
        assert!(!clocks.is_known(Timed::DenialTold, "a") && is_due());
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(clocks.is_known(Timed::DenialTold, "a") && !is_due());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(is_due());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(!is_due());
    }

    /// A clock that advances by itself never shows the same time at two looks.
    #[tokio::test]
    async fn what_is_due_is_due_by_a_clock_that_runs() {
        let clocks = Clocks::default();
        let is_due = || clocks.is_due(Timed::DenialTold, "a", Duration::from_mins(1));
        assert!(is_due() && !is_due());
    }
}
