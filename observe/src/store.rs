//! The last flows, and readers that follow them.
//!
//! Invariant: memory is bounded. The ring has a fixed number of flows. A reader has a bounded queue, which holds only
//! what the reader asked for: others' floods lose nothing for it. A reader that is too slow hears how much it lost.
//!
//! A flow takes 160 bytes, 24 more for its Arc and the ring's place. So 100,000 flows take 18 MB; names are shared
//! with the index ([`crate::names`]).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::flow::{Flow, Lost};
use crate::metrics;
use crate::names::Name;
use crate::view::{Query, Scope};

/// How many flows are kept.
pub const CAPACITY: usize = 100_000;
/// How many lines wait for a reader.
pub const QUEUE: usize = 1024;

/// What a reader hears.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Told {
    Flow(Arc<Flow>),
    /// The droplet is none if the reader itself was too slow.
    Lost(Option<Name>, Lost),
}

struct Reader {
    query: Query,
    queue: mpsc::Sender<Told>,
    lost: Arc<AtomicU64>,
}

impl Reader {
    fn tell(&self, told: Told) {
        if let Err(TrySendError::Full(_)) = self.queue.try_send(told) {
            self.lost.fetch_add(1, Ordering::Relaxed);
            metrics::line_lost();
        }
    }
}

#[derive(Default)]
struct State {
    ring: VecDeque<Arc<Flow>>,
    next_id: u64,
    readers: HashMap<u64, Reader>,
}

/// Flows of the last minute, or of less if there was no room for a minute's.
#[derive(Debug, PartialEq, Eq)]
pub struct Recent {
    pub flows: Vec<Arc<Flow>>,
    pub seconds: u64,
}

#[derive(Default)]
pub struct Store {
    state: Mutex<State>,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps flows, and tells readers.
    pub fn push(&self, flows: impl IntoIterator<Item = Flow>) {
        let state = &mut *self.lock();
        for flow in flows {
            let flow = Arc::new(flow);
            for reader in state.readers.values() {
                if reader.query.accepts(&flow) {
                    reader.tell(Told::Flow(flow.clone()));
                }
            }
            if state.ring.len() >= CAPACITY {
                state.ring.pop_front();
            }
            state.ring.push_back(flow);
        }
    }

    /// Tells readers that nobody will hear of some flows of a droplet. `concerns`: whose readers are told.
    pub fn tell_lost(&self, droplet: &Name, lost: Lost, concerns: impl Fn(&Scope) -> bool) {
        for reader in self.lock().readers.values() {
            if concerns(&reader.query.scope) {
                reader.tell(Told::Lost(Some(droplet.clone()), lost));
            }
        }
    }

    /// Returns how many flows are kept.
    pub fn count(&self) -> usize {
        self.lock().ring.len()
    }

    /// Returns the last flows that belong to the answer, oldest first: at most so many, and none that came before
    /// `from`, in milliseconds since 1970.
    pub fn last(&self, query: &Query, from: u64, most: usize) -> Vec<Arc<Flow>> {
        last(&self.lock().ring, query, from, most)
    }

    /// Does what [`Self::last`] does, and begins to follow: no flow is missed between the two.
    pub fn follow(self: &Arc<Self>, query: Query, from: u64, most: usize) -> (Vec<Arc<Flow>>, Following) {
        let (queue, lines) = mpsc::channel(QUEUE);
        let lost = Arc::new(AtomicU64::new(0));
        let state = &mut *self.lock();
        let past = last(&state.ring, &query, from, most);
        state.next_id += 1;
        let id = state.next_id;
        let reader = Reader {
            query,
            queue,
            lost: lost.clone(),
        };
        state.readers.insert(id, reader);
        let following = Following {
            store: self.clone(),
            id,
            lines,
            lost,
        };
        (past, following)
    }

    /// Returns the flows of the last minute that are accepted. `now`: milliseconds since 1970.
    pub fn recent(&self, now: u64, accepts: impl Fn(&Flow) -> bool) -> Recent {
        const MINUTE: u64 = 60_000;
        let state = self.lock();
        let start = now.saturating_sub(MINUTE);
        let is_cut = state.ring.len() >= CAPACITY;
        let oldest = state.ring.front().map(|flow| flow.arrived).filter(|_| is_cut);
        let start = start.max(oldest.unwrap_or_default());
        let recent = state.ring.iter().rev().take_while(|flow| flow.arrived >= start);
        Recent {
            flows: recent.filter(|flow| accepts(flow)).cloned().collect(),
            seconds: now.saturating_sub(start).div_ceil(1000).max(1),
        }
    }
}

fn last(ring: &VecDeque<Arc<Flow>>, query: &Query, from: u64, most: usize) -> Vec<Arc<Flow>> {
    let fits = ring.iter().rev().take_while(|flow| flow.arrived >= from);
    let mut found: Vec<_> = fits
        .filter(|flow| query.accepts(flow))
        .take(most)
        .cloned()
        .collect();
    found.reverse();
    found
}

/// A reader that follows; dropped, it ends.
pub struct Following {
    store: Arc<Store>,
    id: u64,
    lines: mpsc::Receiver<Told>,
    lost: Arc<AtomicU64>,
}

impl Following {
    /// Waits for the next news.
    pub async fn next(&mut self) -> Option<Told> {
        let reader = self.lost.swap(0, Ordering::Relaxed);
        if reader > 0 {
            let lost = Lost {
                reader,
                ..Lost::default()
            };
            return Some(Told::Lost(None, lost));
        }
        self.lines.recv().await
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.store.lock().readers.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use thuban_common::counters::Counter;

    use super::*;
    use crate::flow::tests::{flow, names};
    use crate::view::Filter;

    fn query(namespace: &str) -> Query {
        Query {
            scope: Scope::Namespace(namespace.to_owned()),
            filter: Filter::default(),
        }
    }

    fn between(from: &str, to: &str, arrived: u64) -> Flow {
        Flow {
            arrived,
            ..flow(&names(), from, to, Counter::SentDirect)
        }
    }

    fn arrivals(flows: &[Arc<Flow>]) -> Vec<u64> {
        flows.iter().map(|flow| flow.arrived).collect()
    }

    #[test]
    fn last_flows_of_a_namespace_come_oldest_first() {
        let store = Store::default();
        store.push((1..=5).map(|at| between("10.0.1.3", "10.0.1.4", at)));
        store.push([between("10.0.2.4", "8.8.8.8", 6)]);
        assert_eq!(arrivals(&store.last(&query("red"), 0, 3)), [3, 4, 5]);
        assert_eq!(arrivals(&store.last(&query("red"), 5, 3)), [5]);
        assert_eq!(arrivals(&store.last(&query("blue"), 0, 3)), [6]);
    }

    #[test]
    fn the_oldest_flows_make_room() {
        let store = Store::default();
        let many = CAPACITY as u64 + 10;
        let one = between("10.0.1.3", "10.0.1.4", 0);
        store.push((1..=many).map(|arrived| Flow {
            arrived: arrived / 2,
            ..one.clone()
        }));
        assert_eq!(store.count(), CAPACITY);
        let all = store.last(&query("red"), 0, usize::MAX);
        assert_eq!((all[0].arrived, all[CAPACITY - 1].arrived), (5, many / 2));
        let recent = store.recent(many / 2, |_| true);
        assert_eq!(recent.seconds, 50, "less than a minute is there");
    }

    #[test]
    fn recent_flows_are_those_of_a_minute() {
        let store = Store::default();
        store.push([1_000, 2_000, 62_500].map(|at| between("10.0.1.3", "10.0.1.4", at)));
        let recent = store.recent(62_500, |_| true);
        assert_eq!((arrivals(&recent.flows), recent.seconds), (vec![62_500], 60));
        assert_eq!(store.recent(62_000, |_| true).flows.len(), 2);
        assert!(store.recent(62_500, |_| false).flows.is_empty());
    }

    #[tokio::test]
    async fn a_follower_hears_its_own_flows_after_the_past() {
        let store = Arc::new(Store::default());
        store.push([between("10.0.1.3", "10.0.1.4", 1)]);
        let (past, mut following) = store.follow(query("red"), 0, 10);
        assert_eq!(arrivals(&past), [1]);
        store.push([
            between("10.0.2.4", "8.8.8.8", 2),
            between("10.0.1.3", "10.0.1.4", 3),
        ]);
        match following.next().await {
            Some(Told::Flow(flow)) => assert_eq!(flow.arrived, 3),
            other => panic!("{other:?}"),
        }
        drop(following);
        assert!(store.lock().readers.is_empty());
    }

    #[tokio::test]
    async fn a_slow_follower_hears_how_much_it_lost_and_no_other_does() {
        let store = Arc::new(Store::default());
        let (_, mut slow) = store.follow(query("red"), 0, 0);
        let (_, mut quiet) = store.follow(query("blue"), 0, 0);
        let one = between("10.0.1.3", "10.0.1.4", 1);
        store.push(std::iter::repeat_n(one, QUEUE + 7));
        store.push([between("10.0.2.4", "8.8.8.8", 2)]);
        let expected = Lost {
            reader: 7,
            ..Lost::default()
        };
        assert_eq!(slow.next().await, Some(Told::Lost(None, expected)));
        for _ in 0..QUEUE {
            assert!(matches!(slow.next().await, Some(Told::Flow(_))));
        }
        assert!(matches!(quiet.next().await, Some(Told::Flow(flow)) if flow.arrived == 2));
        let lost = Lost {
            budget: 14,
            ..Lost::default()
        };
        store.tell_lost(&"node-b".into(), lost, |_| true);
        assert_eq!(slow.next().await, Some(Told::Lost(Some("node-b".into()), lost)));
    }
}
