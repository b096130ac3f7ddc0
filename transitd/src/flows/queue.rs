//! Events of flows that wait to be told, and the number of those that are lost.
//!
//! Invariant: nobody waits for room. The newest events stay, because who asks wants to know what happens now. A VPC
//! with many events takes neither room nor its turn from a VPC with few.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use thuban_proto::observe::{Flow, Lost};

use crate::metrics::FlowMetrics;

/// The most events that wait, of all VPCs together. They take about 3 MiB.
pub const MAX_WAITING: usize = 8192;

#[derive(Debug)]
pub struct Queue {
    waiting: Mutex<Waiting>,
    pub metrics: FlowMetrics,
}

#[derive(Debug, Default)]
struct Waiting {
    /// By VNI, the oldest first. No queue is empty.
    flows: BTreeMap<u32, VecDeque<Flow>>,
    /// The number of flows.
    count: usize,
    /// Whose turn it is: the first VNI from this one on.
    next: u32,
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

    /// Adds events. Without room the oldest ones of the VPC that has most are lost.
    pub fn add(&self, flows: Vec<Flow>) {
        self.metrics.events.inc_by(flows.len() as u64);
        let beyond = {
            let mut waiting = self.lock();
            for flow in flows {
                waiting.push(flow);
            }
            waiting.shed()
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

    /// Takes the oldest events, of each VPC in turn, and what is lost since the last call.
    pub fn take(&self, most: usize) -> (Vec<Flow>, Lost) {
        let mut waiting = self.lock();
        let mut flows = Vec::with_capacity(waiting.count.min(most));
        while flows.len() < most
            && let Some(flow) = waiting.take_next()
        {
            flows.push(flow);
        }
        (flows, std::mem::take(&mut waiting.lost))
    }
}

impl Waiting {
    fn push(&mut self, flow: Flow) {
        self.flows.entry(flow.vni).or_default().push_back(flow);
        self.count += 1;
    }

    /// Drops events beyond the limit. Returns their number.
    fn shed(&mut self) -> usize {
        let beyond = self.count.saturating_sub(MAX_WAITING);
        for _ in 0..beyond {
            let largest = self.flows.iter().max_by_key(|(_, flows)| flows.len());
            if let Some(vni) = largest.map(|(vni, _)| *vni) {
                self.pop(vni);
            }
        }
        beyond
    }

    /// Takes the oldest event of the VPC whose turn it is.
    fn take_next(&mut self) -> Option<Flow> {
        let mut from_here = self.flows.range(self.next..).chain(&self.flows);
        let vni = from_here.next().map(|(vni, _)| *vni)?;
        self.next = vni.wrapping_add(1);
        self.pop(vni)
    }

    fn pop(&mut self, vni: u32) -> Option<Flow> {
        let flows = self.flows.get_mut(&vni)?;
        let flow = flows.pop_front()?;
        if flows.is_empty() {
            self.flows.remove(&vni);
        }
        self.count -= 1;
        Some(flow)
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

    /// Returns an event of a VPC.
    fn of_vpc(vni: u32, packets: u64) -> Flow {
        Flow {
            vni,
            packets,
            ..Flow::default()
        }
    }

    #[test]
    fn a_flood_of_a_vpc_pushes_out_its_own_events_alone() {
        let queue = Queue::new(FlowMetrics::default());
        queue.add((1..=3).map(|packets| of_vpc(8, packets)).collect());
        let flood = 2 * MAX_WAITING as u64;
        queue.add((1..=flood).map(|packets| of_vpc(7, packets)).collect());
        let (taken, lost) = queue.take(usize::MAX);
        assert_eq!(lost.stream, flood + 3 - MAX_WAITING as u64);
        let few: Vec<u64> = taken
            .iter()
            .filter(|flow| flow.vni == 8)
            .map(|flow| flow.packets)
            .collect();
        assert_eq!(few, [1, 2, 3]);
        assert_eq!(taken.last().map(|flow| flow.packets), Some(flood));
    }

    #[test]
    fn vpcs_take_turns() {
        let queue = Queue::new(FlowMetrics::default());
        queue.add((1..=9).map(|packets| of_vpc(7, packets)).collect());
        queue.add(vec![of_vpc(8, 1), of_vpc(9, 1), of_vpc(8, 2)]);
        let turn = |most| -> Vec<(u32, u64)> {
            let (flows, _) = queue.take(most);
            flows.iter().map(|flow| (flow.vni, flow.packets)).collect()
        };
        assert_eq!(turn(2), [(7, 1), (8, 1)]);
        assert_eq!(turn(4), [(9, 1), (7, 2), (8, 2), (7, 3)]);
        assert_eq!(turn(usize::MAX).len(), 6);
        assert!(turn(1).is_empty());
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
