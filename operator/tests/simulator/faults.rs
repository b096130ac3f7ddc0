//! The chances of faults, chosen for each schedule, so that some schedules know one fault only.

use std::time::Duration;

use crate::random::Random;

/// The chances of faults, in thousandths.
#[derive(Clone, Debug)]
pub struct Faults {
    /// The chance that another writer touches the object first.
    pub touched: u64,
    /// The chance that a write is done, but answered with an error.
    pub lost_answer: u64,
    /// A write whose client gives up before it is done, seconds later.
    pub done_later: u64,
    /// A request that is answered with an error and not done.
    pub refused: u64,
    pub slow_request: u64,
    /// The chance that a watch brings its events seconds late.
    pub stale_watch: u64,
    /// The chance that a watch breaks, at each delivery.
    pub dropped_watch: u64,
    pub late_ack: u64,
    pub stream_lost: u64,
    pub small_pages: bool,
    pub has_default: bool,
    /// Whether no machine is lost, no droplet stays away, and one operator leads at a time: every packet must arrive.
    pub is_steady: bool,
}

impl Faults {
    pub fn random(random: &mut Random) -> Self {
        let mut chance = |most: u64| {
            if random.permille(400) {
                random.below(most) + 1
            } else {
                0
            }
        };
        Self {
            touched: chance(100),
            lost_answer: chance(60),
            refused: chance(60),
            slow_request: chance(100),
            stale_watch: chance(500),
            dropped_watch: chance(100),
            late_ack: chance(300),
            stream_lost: chance(20),
            small_pages: chance(1000) > 500,
            has_default: chance(1000) > 500,
            is_steady: chance(1000) > 0,
            done_later: chance(60),
        }
    }

    pub fn ended(&self) -> Self {
        Self {
            touched: 0,
            lost_answer: 0,
            done_later: 0,
            refused: 0,
            slow_request: 0,
            stale_watch: 0,
            dropped_watch: 0,
            late_ack: 0,
            stream_lost: 0,
            small_pages: false,
            has_default: self.has_default,
            is_steady: self.is_steady,
        }
    }

    pub fn latency(&self, random: &mut Random) -> Duration {
        if random.permille(self.slow_request) {
            random.millis(100, 6000)
        } else {
            random.millis(0, 4)
        }
    }
}
