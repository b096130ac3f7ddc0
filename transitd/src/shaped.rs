//! The limits of bandwidth that the ends of pods' veths have.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use thuban_rows::{ByteRate, LocalEndpoint};

/// The limits of an attachment; none: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// What the pod may send. The limit is at the pod's end.
    pub egress: Option<ByteRate>,
    /// What the pod may receive. The limit is at the host's end.
    pub ingress: Option<ByteRate>,
}

impl From<&LocalEndpoint> for Rates {
    fn from(endpoint: &LocalEndpoint) -> Self {
        Self {
            egress: endpoint.egress_rate,
            ingress: endpoint.ingress_rate,
        }
    }
}

/// The least time between two changes of a pod's limits. With each change a queue has a whole burst again, so a pod
/// whose limits changed all the time would send more than any of them.
const REST: Duration = Duration::from_secs(30);

/// The limits of an attachment, and when they were last changed to others.
#[derive(Clone, Copy, Debug)]
struct Set {
    rates: Rates,
    changed: Option<Instant>,
}

/// The limits that this transitd has set, by the generation of the attachment. Those of attachments that an earlier
/// transitd made are not known.
#[derive(Debug, Default)]
pub struct Shaped(Mutex<HashMap<u64, Set>>);

impl Shaped {
    fn known(&self) -> MutexGuard<'_, HashMap<u64, Set>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn note(&self, generation: u64, rates: Rates) {
        let mut known = self.known();
        let changed = known.contains_key(&generation).then(Instant::now);
        known.insert(generation, Set { rates, changed });
    }

    /// Whether an attachment's limits are to be set now: they are others, or not known, and have not just been changed.
    pub fn is_due(&self, generation: u64, rates: Rates) -> bool {
        self.known().get(&generation).is_none_or(|set| {
            set.rates != rates && set.changed.is_none_or(|changed| changed.elapsed() >= REST)
        })
    }

    /// Forgets all attachments but these.
    pub fn retain(&self, generations: &BTreeSet<u64>) {
        self.known()
            .retain(|generation, _| generations.contains(generation));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_change_all_the_time_are_set_now_and_then() {
        let rates = |rate| Rates {
            egress: ByteRate::new(rate),
            ingress: None,
        };
        let shaped = Shaped::default();
        assert!(shaped.is_due(1, rates(1000)), "nobody knows them");
        shaped.note(1, rates(1000));
        assert!(!shaped.is_due(1, rates(1000)));
        assert!(shaped.is_due(1, rates(2000)), "the first change");
        shaped.note(1, rates(2000));
        assert!(!shaped.is_due(1, rates(1000)) && shaped.is_due(2, rates(1000)));
        shaped.known().get_mut(&1).unwrap().changed = Instant::now().checked_sub(REST);
        assert!(shaped.is_due(1, rates(1000)));
        shaped.retain(&BTreeSet::new());
        assert!(shaped.is_due(1, rates(2000)));
    }
}
