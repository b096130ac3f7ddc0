//! Whether an API server answers nothing but errors of its own.

use std::time::{Duration, Instant};

/// The answers in a row with errors of the server after which it is left.
const MAX_FAILURES: u32 = 5;
/// How long they must have lasted: a change of etcd's leader is no reason, and many requests may fail at once.
const MIN_TIME: Duration = Duration::from_secs(2);

/// The errors of a server since its last other answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Failures {
    count: u32,
    since: Option<Instant>,
}

impl Failures {
    /// Notes an answer. Returns whether the server is to be left, and forgets its errors then.
    pub fn note(&mut self, is_failure: bool, now: Instant) -> bool {
        if !is_failure {
            *self = Self::default();
            return false;
        }
        self.count += 1;
        let since = *self.since.get_or_insert(now);
        let is_enough = self.count >= MAX_FAILURES && now.duration_since(since) >= MIN_TIME;
        if is_enough {
            *self = Self::default();
        }
        is_enough
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_left_after_errors_for_a_while() {
        let start = Instant::now();
        let mut failures = Failures::default();
        let mut note = |is_failure, milliseconds| {
            let at = start + Duration::from_millis(milliseconds);
            failures.note(is_failure, at)
        };
        assert!((0..100).all(|_| !note(true, 0)), "all at once");
        assert!(!note(true, 1999));
        assert!(note(true, 2000));
        assert!((0..4).all(|number| !note(true, 3000 + 1000 * number)), "too few");
        assert!(!note(false, 7000));
        assert!(
            (0..4).all(|number| !note(true, 8000 + 1000 * number)),
            "again too few"
        );
        assert!(note(true, 12_000));
    }
}
