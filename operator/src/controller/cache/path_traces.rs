//! The PathTraces of each namespace, and how often they are answered.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::rate_limit::RateLimit;

/// How many PathTraces of a namespace are looked at: the oldest.
pub const MAX_TRACES: usize = 20;
/// How many are answered for one namespace.
const ANSWERS_A_SECOND: u32 = 5;
const ANSWERS_AT_ONCE: u32 = 20;
/// How many are answered for all namespaces together: each holds the lock under which droplets are served.
const ALL_ANSWERS_A_SECOND: u32 = 50;
const ALL_ANSWERS_AT_ONCE: u32 = 100;

/// The second of a PathTrace's creation, and its name.
pub type Place = (i64, String);

#[derive(Debug)]
pub struct PathTraces {
    spaces: Mutex<HashMap<String, Space>>,
    answers: RateLimit,
}

impl Default for PathTraces {
    fn default() -> Self {
        Self {
            spaces: Mutex::default(),
            answers: RateLimit::new(ALL_ANSWERS_A_SECOND, ALL_ANSWERS_AT_ONCE),
        }
    }
}

#[derive(Debug)]
struct Space {
    traces: BTreeSet<Place>,
    /// It stays without traces: nobody gets more answers by deleting questions.
    answers: RateLimit,
}

impl Default for Space {
    fn default() -> Self {
        Self {
            traces: BTreeSet::new(),
            answers: RateLimit::new(ANSWERS_A_SECOND, ANSWERS_AT_ONCE),
        }
    }
}

impl PathTraces {
    fn spaces(&self) -> MutexGuard<'_, HashMap<String, Space>> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, namespace: &str, place: Place) {
        let mut spaces = self.spaces();
        spaces
            .entry(namespace.to_owned())
            .or_default()
            .traces
            .insert(place);
    }

    pub fn remove(&self, namespace: &str, place: &Place) {
        if let Some(space) = self.spaces().get_mut(namespace) {
            space.traces.remove(place);
        }
    }

    /// Returns how many PathTraces of a namespace are older, at most [`MAX_TRACES`].
    pub fn older(&self, namespace: &str, place: &Place) -> usize {
        let spaces = self.spaces();
        let space = spaces.get(namespace);
        space.map_or(0, |space| space.traces.range(..place).take(MAX_TRACES).count())
    }

    /// Takes one answer of a namespace, and returns whether it may be given now.
    pub fn may_answer(&self, namespace: &str) -> bool {
        let mut spaces = self.spaces();
        let space = spaces.entry(namespace.to_owned()).or_default();
        space.answers.take() && self.answers.take()
    }
}

#[cfg(test)]
mod tests {
    use super::{ALL_ANSWERS_AT_ONCE, ANSWERS_AT_ONCE, MAX_TRACES, PathTraces};

    #[test]
    fn the_oldest_of_a_namespace_are_looked_at() {
        let traces = PathTraces::default();
        for number in 0..30 {
            traces.add("red", (number, "why".to_owned()));
        }
        let older = |namespace, number| traces.older(namespace, &(number, "why".to_owned()));
        assert_eq!([older("red", 0), older("red", 19)], [0, 19]);
        assert_eq!(older("red", 29), MAX_TRACES);
        assert_eq!(older("blue", 29), 0);
        traces.remove("red", &(0, "why".to_owned()));
        assert_eq!(older("red", 19), 18);
    }

    #[test]
    fn one_namespace_takes_no_answers_of_another() {
        let traces = PathTraces::default();
        let taken = (0..100).filter(|_| traces.may_answer("red")).count();
        assert!(taken >= ANSWERS_AT_ONCE as usize && taken < 50, "{taken}");
        assert!(traces.may_answer("blue"));
    }

    #[tokio::test(start_paused = true)]
    async fn all_namespaces_together_get_a_bounded_number_of_answers() {
        let traces = PathTraces::default();
        let spaces = (0..1000).map(|number| format!("space-{number}"));
        let taken = spaces.filter(|space| traces.may_answer(space)).count();
        assert_eq!(taken, ALL_ANSWERS_AT_ONCE as usize);
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        assert!(traces.may_answer("red"));
    }
}
