//! The rests of NodePorts that pass from one VPC to another. A rest is over when every droplet has acked that the port
//! is no longer the old VPC's. At the latest it is over when no droplet that is away can still serve the port.
//!
//! A droplet shuts such ports by itself when it has not heard from an operator for `THUBAN_NODE_PORT_LEASE_SECONDS`
//! (transitd's `netfilter::node_ports`). A rest is longer, by the time that a droplet may take to notice that its
//! stream is dead.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::State;
use crate::model::acks::Marks;
use crate::model::world::RestId;

/// How much longer than a lease a rest is.
const MARGIN: Duration = Duration::from_mins(1);
/// The lease of droplets, until it is set.
const DEFAULT_LEASE: Duration = Duration::from_mins(10);

#[derive(Debug)]
pub(super) struct Rests {
    longest: Duration,
    begun: BTreeMap<RestId, Begun>,
}

#[derive(Debug)]
struct Begun {
    /// The time of the hub, in milliseconds.
    at: u64,
    marks: Arc<Marks>,
}

impl Default for Rests {
    fn default() -> Self {
        Self {
            longest: DEFAULT_LEASE + MARGIN,
            begun: BTreeMap::new(),
        }
    }
}

impl Rests {
    pub fn set_lease(&mut self, lease: Duration) {
        self.longest = lease + MARGIN;
    }
}

impl State {
    /// Begins the rests that the last programs tell droplets of.
    pub(super) fn note_rests(&mut self, now: u64) {
        let begun = self.world.begun_rests();
        if begun.is_empty() {
            return;
        }
        // Rests of ports that nobody asks for end here.
        self.end_rests(now);
        let marks = Arc::new(self.acks.marks());
        for rest in begun {
            let marks = Arc::clone(&marks);
            self.rests.begun.insert(rest, Begun { at: now, marks });
        }
    }

    /// Ends the rests that are over. Returns whether there were any.
    pub(super) fn end_rests(&mut self, now: u64) -> bool {
        let longest = self.rests.longest.as_millis() as u64;
        let droplets = || self.world.droplets().map(|(name, _)| name);
        let is_over = |begun: &Begun| {
            let all_know = || droplets().all(|name| self.acks.has_passed(name, &begun.marks));
            now.saturating_sub(begun.at) >= longest || all_know()
        };
        let over = self.rests.begun.iter().filter(|(_, begun)| is_over(begun));
        let over: BTreeSet<RestId> = over.map(|(rest, _)| *rest).collect();
        self.rests.begun.retain(|rest, _| !over.contains(rest));
        self.world.end_rests(&over);
        !over.is_empty()
    }
}
