//! Events of flows that wait to be told, and the number of those that are lost.
//!
//! Invariant: nobody waits for room. The newest events stay, because who asks wants to know what happens now.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use thuban_proto::observe::{Flow, Lost};

use crate::metrics::FlowMetrics;

/// The most events that wait. They take about 3 MiB.
pub const MAX_WAITING: usize = 8192;

#[derive(Debug)]
pub struct Queue {
    waiting: Mutex<Waiting>,
    pub metrics: FlowMetrics,
}

#[derive(Debug, Default)]
struct Waiting {
    flows: VecDeque<Flow>,
    /// What no report tells yet.
    lost: Lost,
}

impl Queue {
    pub fn new(metrics: FlowMetrics) -> Self {
        Self {
            waiting: Mutex::default(),
            metrics,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds events. Older ones without room are lost.
    pub fn add(&self, flows: Vec<Flow>) {
        self.metrics.events.inc_by(flows.len() as u64);
        let beyond = {
            let mut waiting = self.lock();
            waiting.flows.extend(flows);
            let beyond = waiting.flows.len().saturating_sub(MAX_WAITING);
            waiting.flows.drain(..beyond);
            beyond
        };
        self.lose(Lost {
            stream: beyond as u64,
            ..Lost::default()
        });
    }

    /// Notes events that are lost.
    pub fn lose(&self, lost: Lost) {
        self.metrics.loses(lost);
        self.put_back(lost);
    }

    /// Notes losses that a report told, and nobody has acknowledged.
    pub fn put_back(&self, lost: Lost) {
        let mut waiting = self.lock();
        waiting.lost = sum(waiting.lost, lost);
    }

    /// Takes the oldest events, and what is lost since the last call.
    pub fn take(&self, most: usize) -> (Vec<Flow>, Lost) {
        let mut waiting = self.lock();
        let count = waiting.flows.len().min(most);
        let flows = waiting.flows.drain(..count).collect();
        (flows, std::mem::take(&mut waiting.lost))
    }
}

/// Adds up two numbers of lost events.
pub const fn sum(one: Lost, other: Lost) -> Lost {
    Lost {
        budget: one.budget.saturating_add(other.budget),
        table: one.table.saturating_add(other.table),
        ring: one.ring.saturating_add(other.ring),
        stream: one.stream.saturating_add(other.stream),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flows(packets: std::ops::Range<u64>) -> Vec<Flow> {
        let flow = |packets| Flow {
            packets,
            ..Flow::default()
        };
        packets.map(flow).collect()
    }

    fn packets(flows: &[Flow]) -> Vec<u64> {
        flows.iter().map(|flow| flow.packets).collect()
    }

    #[test]
    fn without_room_the_oldest_events_are_lost_and_counted() {
        let queue = Queue::new(FlowMetrics::default());
        queue.add(flows(0..MAX_WAITING as u64));
        queue.add(flows(MAX_WAITING as u64..MAX_WAITING as u64 + 3));
        let (taken, lost) = queue.take(2);
        assert_eq!((packets(&taken), lost.stream), (vec![3, 4], 3));
        let (taken, lost) = queue.take(usize::MAX);
        assert_eq!((taken.len(), lost), (MAX_WAITING - 2, Lost::default()));
        let metrics = &queue.metrics;
        assert_eq!(
            (metrics.events.get(), metrics.lost("stream")),
            (MAX_WAITING as u64 + 3, 3)
        );
    }

    #[test]
    fn losses_are_taken_once_and_counted_once() {
        let queue = Queue::new(FlowMetrics::default());
        let lost = |budget, ring| Lost {
            budget,
            ring,
            ..Lost::default()
        };
        queue.lose(lost(5, 0));
        queue.lose(lost(1, 2));
        assert_eq!(queue.take(0).1, lost(6, 2));
        assert_eq!(queue.take(0).1, Lost::default());
        queue.put_back(lost(6, 2));
        assert_eq!(queue.take(0).1, lost(6, 2));
        assert_eq!((queue.metrics.lost("budget"), queue.metrics.lost("ring")), (6, 2));
    }
}
