//! How often each of many may do something, in the caller's time.
//!
//! Invariant: who has rested for long enough needs no memory, and may do as much as anybody new.

use std::collections::BTreeMap;

/// Budgets of equal size, by what has one.
#[derive(Debug)]
pub struct Budgets<K> {
    /// The milliseconds that one action costs.
    each: u64,
    /// The most actions at once, after a rest.
    at_once: u64,
    /// The time until which the time is spent, of those that have spent any.
    spent: BTreeMap<K, u64>,
}

impl<K: Ord> Budgets<K> {
    pub fn new(each: u64, at_once: u64) -> Self {
        Self {
            each,
            at_once,
            spent: BTreeMap::new(),
        }
    }

    /// Returns the time until which the time is spent.
    fn spent_until(&self, key: &K) -> u64 {
        self.spent.get(key).copied().unwrap_or_default()
    }

    /// Whether another action may be done now.
    pub fn has_left(&self, key: &K, now: u64) -> bool {
        let spent = self.spent_until(key).saturating_sub(now);
        spent + self.each <= self.each * self.at_once
    }

    /// Takes one action, whether it may be done or not.
    pub fn spend(&mut self, key: K, now: u64) {
        let until = self.spent_until(&key).max(now) + self.each;
        self.spent.insert(key, until);
    }

    /// Forgets those that have rested for long enough.
    pub fn forget_rested(&mut self, now: u64) {
        self.spent.retain(|_, until| *until > now);
    }
}

#[cfg(test)]
mod tests {
    use super::Budgets;

    /// Spends what may be done now. Returns how much that was.
    fn spend(budgets: &mut Budgets<&'static str>, key: &'static str, now: u64) -> usize {
        let mut count = 0;
        while budgets.has_left(&key, now) {
            budgets.spend(key, now);
            count += 1;
        }
        count
    }

    #[test]
    fn a_rest_is_saved_up_to_a_bound_for_each() {
        let mut budgets = Budgets::new(100, 3);
        assert_eq!(spend(&mut budgets, "a", 0), 3);
        assert_eq!(spend(&mut budgets, "b", 0), 3, "another one");
        assert_eq!(spend(&mut budgets, "a", 99), 0);
        assert_eq!(spend(&mut budgets, "a", 250), 2);
        assert_eq!(spend(&mut budgets, "a", 300), 1, "what was left over counts");
        assert_eq!(spend(&mut budgets, "a", 100_000), 3);
    }

    #[test]
    fn nothing_is_kept_of_who_has_rested() {
        let mut budgets = Budgets::new(100, 3);
        spend(&mut budgets, "a", 0);
        budgets.forget_rested(299);
        assert_eq!(spend(&mut budgets, "a", 299), 2, "it is remembered");
        budgets.forget_rested(100_000);
        assert!(budgets.spent.is_empty());
    }
}
