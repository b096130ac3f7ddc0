//! How much of something is held at once: in all, and by each of those who ask.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::metrics::gauge::Gauge;

/// Places, none of which is waited for. Memory is that of those who hold one.
#[derive(Debug)]
pub(super) struct Shares<K: Clone + Eq + Hash> {
    in_all: usize,
    each: usize,
    /// Of those held in all.
    gauge: Gauge,
    held: Mutex<Held<K>>,
}

#[derive(Debug)]
struct Held<K> {
    in_all: usize,
    by: HashMap<K, usize>,
}

/// Given back when dropped.
#[derive(Debug)]
pub(super) struct Place<K: Clone + Eq + Hash> {
    shares: Arc<Shares<K>>,
    holder: K,
}

impl<K: Clone + Eq + Hash> Shares<K> {
    pub(super) fn new(in_all: usize, each: usize, gauge: Gauge) -> Arc<Self> {
        Arc::new(Self {
            in_all,
            each,
            gauge,
            held: Mutex::new(Held {
                in_all: 0,
                by: HashMap::new(),
            }),
        })
    }

    pub(super) fn take(self: &Arc<Self>, holder: K) -> Option<Place<K>> {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let own = held.by.get(&holder).copied().unwrap_or_default();
        if held.in_all >= self.in_all || own >= self.each {
            return None;
        }
        held.in_all += 1;
        self.gauge.inc();
        held.by.insert(holder.clone(), own + 1);
        Some(Place {
            shares: Arc::clone(self),
            holder,
        })
    }
}

impl<K: Clone + Eq + Hash> Drop for Place<K> {
    fn drop(&mut self) {
        let mut held = self.shares.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.in_all -= 1;
        self.shares.gauge.dec();
        if let Entry::Occupied(mut own) = held.by.entry(self.holder.clone()) {
            *own.get_mut() -= 1;
            if *own.get() == 0 {
                own.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gets_more_than_a_share_and_all_no_more_than_there_is() {
        let shares = Shares::new(3, 2, Gauge::default());
        let first = shares.take("red").unwrap();
        let _second = shares.take("red").unwrap();
        assert!(shares.take("red").is_none(), "its share");
        let blue = shares.take("blue").unwrap();
        assert!(shares.take("green").is_none(), "all there is");
        drop(first);
        assert!(shares.take("green").is_some());
        let _again = shares.take("red").unwrap();
        drop(blue);
        assert_eq!(shares.gauge.get(), 2);
        assert!(!shares.held.lock().unwrap().by.contains_key("blue"));
    }
}
