//! The pauses between attempts to reach a server. They grow with the time without a stream, so that droplets reach a
//! new server soon, and no crowd comes after a long absence.

use std::ops::RangeInclusive;
use std::time::Duration;

use thuban_client::jitter::around;
use tokio::time::Instant;

#[derive(Debug)]
pub struct Pauses {
    bounds: RangeInclusive<Duration>,
    part: u32,
    /// Since when there is no stream.
    lost: Instant,
}

impl Pauses {
    /// A pause is the time without a stream divided by `part`, within `bounds`.
    pub fn new(bounds: RangeInclusive<Duration>, part: u32) -> Self {
        Self {
            bounds,
            part,
            lost: Instant::now(),
        }
    }

    /// Returns the pause after an attempt that has ended now, from half to one and a half times as long, so that
    /// droplets do not come back all at once. `had_stream`: the attempt led to a stream.
    pub fn next(&mut self, had_stream: bool) -> Duration {
        if had_stream {
            self.lost = Instant::now();
        }
        around(self.after(self.lost.elapsed()))
    }

    fn after(&self, without_stream: Duration) -> Duration {
        (without_stream / self.part).clamp(*self.bounds.start(), *self.bounds.end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORTEST: Duration = Duration::from_millis(200);
    const LONGEST: Duration = Duration::from_secs(5);

    #[test]
    fn short_absence_is_followed_closely_long_one_from_afar() {
        let pauses = Pauses::new(SHORTEST..=LONGEST, 8);
        let seconds = Duration::from_secs;
        assert_eq!(pauses.after(Duration::ZERO), SHORTEST);
        assert_eq!(pauses.after(seconds(2)), Duration::from_millis(250));
        assert_eq!(pauses.after(seconds(12)), Duration::from_millis(1500));
        assert_eq!(pauses.after(seconds(3600)), LONGEST);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_makes_pauses_short_again() {
        let mut pauses = Pauses::new(SHORTEST..=LONGEST, 8);
        tokio::time::advance(Duration::from_hours(1)).await;
        let drawn: Vec<Duration> = (0..100).map(|_| pauses.next(false)).collect();
        assert!(
            drawn
                .iter()
                .all(|pause| (LONGEST / 2..=LONGEST * 3 / 2).contains(pause))
        );
        assert!(drawn.iter().any(|pause| *pause != drawn[0]));
        assert!(pauses.next(true) <= SHORTEST * 3 / 2);
        assert!(pauses.next(false) <= SHORTEST * 3 / 2);
    }
}
