//! Counts of the rows that hollow droplets received, over all of them.

use std::sync::atomic::{AtomicU64, Ordering};

/// The kinds of rows. Rows of snapshots are counted by themselves: deltas are the cost of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Count {
    /// A row of an endpoint that its droplet did not have.
    Local,
    /// The same row once more, now ready.
    Ready,
    /// A row of an endpoint that a bouncer did not have.
    Bouncer,
    /// A row of an endpoint that the droplet had in the same form.
    Repeated,
    Direct,
    Refused,
    Droplet,
    Vpc,
    Network,
    Policy,
    Service,
    Delete,
    Snapshot,
    Program,
    Nack,
    Hello,
}

const COUNTS: usize = Count::Hello as usize + 1;

#[derive(Debug, Default)]
pub struct Tally([AtomicU64; COUNTS]);

/// The counts at one time, or their growth between two.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts([u64; COUNTS]);

impl Tally {
    pub fn add(&self, count: Count, number: u64) {
        self.0[count as usize].fetch_add(number, Ordering::Relaxed);
    }

    pub fn now(&self) -> Counts {
        Counts(std::array::from_fn(|index| self.0[index].load(Ordering::Relaxed)))
    }

    pub fn since(&self, then: &Counts) -> Counts {
        let now = self.now();
        Counts(std::array::from_fn(|index| now.0[index] - then.0[index]))
    }
}

impl Counts {
    pub fn of(&self, count: Count) -> u64 {
        self.0[count as usize]
    }

    /// Returns the number of distinct rows of endpoints.
    pub fn endpoint_rows(&self) -> u64 {
        self.of(Count::Local) + self.of(Count::Bouncer)
    }
}
