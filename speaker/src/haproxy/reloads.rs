//! How often HAProxy reloads. Each reload leaves a worker behind until its connections have ended, and HAProxy ends the
//! oldest workers. So a tenant that causes reloads without end must not cause many.

use std::time::Duration;

use tokio::time::Instant;

/// The shortest time between two reloads.
const PAUSE: Duration = Duration::from_secs(3);
/// The longest time for which a reload waits.
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// After so many reloads in a row the pause is longer by the shortest one.
const STEP: u32 = 8;
/// The time without a reload that ends a row.
const QUIET: Duration = Duration::from_mins(1);

/// The reloads so far.
#[derive(Debug, Default)]
pub struct Reloads {
    last: Option<Instant>,
    /// How many reloads came one after the other.
    in_row: u32,
}

impl Reloads {
    /// Whether HAProxy may reload now. If so, the reload counts.
    pub fn begin(&mut self, now: Instant) -> bool {
        let since = self.last.map(|last| now.duration_since(last));
        if since.is_some_and(|since| since < pause(self.in_row)) {
            return false;
        }
        let is_in_row = since.is_some_and(|since| since < QUIET);
        self.in_row = if is_in_row {
            self.in_row.saturating_add(1)
        } else {
            0
        };
        self.last = Some(now);
        true
    }
}

/// Returns the time between two reloads.
fn pause(in_row: u32) -> Duration {
    PAUSE.saturating_mul(in_row / STEP + 1).min(MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reloads_without_end_become_rare() {
        let (mut reloads, begun) = (Reloads::default(), Instant::now());
        let mut at = |seconds| reloads.begin(begun + Duration::from_secs(seconds));
        assert!(at(0));
        assert!(!at(2) && at(3), "the first ones are soon");
        let in_an_hour: Vec<u64> = (4..3600).filter(|second| at(*second)).collect();
        assert!((120..=190).contains(&in_an_hour.len()), "{in_an_hour:?}");
        let last = in_an_hour[in_an_hour.len() - 1];
        assert!(!at(last + 29) && at(last + 30), "the pause is longer now");
        assert!(at(last + 90) && at(last + 93), "a quiet minute ends the row");
    }
}
