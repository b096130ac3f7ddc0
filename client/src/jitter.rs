//! Spreads pauses, so that many clients, or many objects of one, don't come back at the same moment.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Returns a pause from half to one and a half times as long.
pub fn around(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + share())
}

/// Returns a pause that is not shorter, and at most a quarter longer.
pub fn at_least(pause: Duration) -> Duration {
    pause.mul_f64(1.0 + share() / 4.0)
}

/// Draws a number that is less than `count`, or 0.
pub fn below(count: usize) -> usize {
    drawn() as usize % count.max(1)
}

/// Draws a number from 0 to less than 1.
fn share() -> f64 {
    f64::from((drawn() >> 32) as u32) / 4_294_967_296.0
}

/// Draws any number. std takes the keys of each new hasher from the system's randomness.
fn drawn() -> u64 {
    RandomState::new().hash_one(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::{around, at_least, below};

    const PAUSE: Duration = Duration::from_secs(2);

    #[test]
    fn pauses_differ_within_their_bounds() {
        let drawn: HashSet<Duration> = (0..100).map(|_| around(PAUSE)).collect();
        assert!(drawn.len() > 50, "they hardly differ");
        assert!(
            drawn
                .iter()
                .all(|pause| (PAUSE / 2..=PAUSE * 3 / 2).contains(pause))
        );
        let drawn: HashSet<Duration> = (0..100).map(|_| at_least(PAUSE)).collect();
        assert!(drawn.len() > 50, "they hardly differ");
        assert!(drawn.iter().all(|pause| (PAUSE..=PAUSE * 5 / 4).contains(pause)));
    }

    #[test]
    fn all_numbers_below_a_count_are_drawn() {
        let drawn: HashSet<usize> = (0..200).map(|_| below(4)).collect();
        assert_eq!(drawn, HashSet::from([0, 1, 2, 3]));
        assert_eq!(below(0), 0);
    }
}
