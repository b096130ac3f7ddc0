//! Limits how often a second something may be done.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// A token bucket.
#[derive(Debug)]
pub struct RateLimit {
    /// The time that one action costs.
    each: Duration,
    /// The most time that can be saved up.
    most: Duration,
    /// The time since which time has been saved up.
    since: Mutex<Instant>,
}

impl RateLimit {
    /// Makes a limit of so many actions a second, and so many at once after a rest.
    pub fn new(a_second: u32, at_once: u32) -> Self {
        let each = Duration::from_secs(1) / a_second;
        let most = each * at_once;
        let now = Instant::now();
        Self {
            each,
            most,
            since: Mutex::new(now.checked_sub(most).unwrap_or(now)),
        }
    }

    /// Takes one action, and returns whether it may be done now.
    pub fn take(&self) -> bool {
        self.take_up_to(1) == 1
    }

    /// Takes so many actions, or as many of them as may be done now. Returns how many.
    pub fn take_up_to(&self, wanted: u32) -> u32 {
        let mut since = self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let saved = since.elapsed().min(self.most);
        let there = saved.as_nanos() / self.each.as_nanos().max(1);
        let taken = u32::try_from(there).map_or(wanted, |there| there.min(wanted));
        if taken > 0 {
            let (left, now) = (saved.saturating_sub(self.each * taken), Instant::now());
            *since = now.checked_sub(left).unwrap_or(now);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::RateLimit;

    #[tokio::test(start_paused = true)]
    async fn a_rest_is_saved_up_to_a_bound() {
        let limit = RateLimit::new(10, 3);
        let taken = || (0..100).filter(|_| limit.take()).count();
        assert_eq!(taken(), 3);
        tokio::time::advance(Duration::from_millis(250)).await;
        assert_eq!(taken(), 2);
        tokio::time::advance(Duration::from_millis(50)).await;
        assert_eq!(taken(), 1, "what was left over counts");
        tokio::time::advance(Duration::from_secs(100)).await;
        assert_eq!(taken(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn many_are_taken_as_far_as_there_are_so_many() {
        let limit = RateLimit::new(10, 30);
        let taken = [20, 20, 20].map(|wanted| limit.take_up_to(wanted));
        assert_eq!(taken, [20, 10, 0]);
        tokio::time::advance(Duration::from_millis(450)).await;
        assert_eq!(limit.take_up_to(20), 4);
        tokio::time::advance(Duration::from_millis(50)).await;
        assert_eq!(limit.take_up_to(20), 1, "what was left over counts");
    }
}
