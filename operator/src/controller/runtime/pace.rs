//! Holds back writes of statuses that say only what may soon be different: roles that begin to work, and numbers. What
//! a user waits for is written at once: an error, and that an object is Provisioned.
//!
//! Invariant: what stays true is written. The wait is timed from the first time that the stored status was out of date.

use std::time::Duration;

use kube::core::object::HasStatus;
use kube::{Api, ResourceExt};

use crate::controller::runtime::clocks::{Clocks, Timed};
use crate::controller::runtime::objects::{Object, WriteError, write_status};
use crate::rate_limit::RateLimit;

/// How long the stored status may be out of date in what may soon be different.
const PASSING: Duration = Duration::from_secs(3);
/// The longest pause between two tries of a status that waits for its turn.
const LONGEST: Duration = Duration::from_secs(30);

/// How a status differs from the stored one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Same,
    /// In what may soon be different alone.
    Passing,
    News,
}

/// How the writes of a kind's statuses are held back.
pub struct Pace<'a, S> {
    pub clocks: &'a Clocks,
    /// The clock of a stored status that is out of date, by the object's name.
    pub timed: Timed,
    /// Leaves what does not pass by itself in a status.
    pub steady: fn(&mut S),
    /// Limits the writes that say only what may soon be different, of all objects together.
    pub limit: Option<&'a RateLimit>,
}

/// Writes the status of an object, unless it says only what may soon be different. Returns how long that is held back.
pub async fn write_in_time<K>(
    api: &Api<K>,
    object: &K,
    status: K::Status,
    pace: &Pace<'_, K::Status>,
) -> Result<Option<Duration>, WriteError>
where
    K: Object + HasStatus,
    K::Status: Clone + PartialEq,
{
    let name = object.name_any();
    let change = compare(object.status(), &status, pace.steady);
    let mut left = held_back(change, pace.clocks, pace.timed, &name);
    if left.is_none() && change == Change::Passing && pace.limit.is_some_and(|limit| !limit.take()) {
        // Many wait for their turn: those that have waited long look less often.
        left = Some((pace.clocks.known_for(pace.timed, &name) / 2).clamp(PASSING, LONGEST));
    }
    if left.is_none() {
        write_status(api, object, status).await?;
        pace.clocks.forget(pace.timed, &name);
    }
    Ok(left)
}

/// Compares two statuses. `steady` leaves what does not pass by itself.
fn compare<S: Clone + PartialEq>(stored: Option<&S>, now: &S, steady: impl Fn(&mut S)) -> Change {
    let Some(stored) = stored else {
        return Change::News;
    };
    if stored == now {
        return Change::Same;
    }
    let (mut stored, mut now) = (stored.clone(), now.clone());
    steady(&mut stored);
    steady(&mut now);
    if stored == now {
        Change::Passing
    } else {
        Change::News
    }
}

/// Returns how long the write of a status is held back; none: it may be written now. The caller forgets the clock after
/// the write.
fn held_back(change: Change, clocks: &Clocks, what: Timed, whose: &str) -> Option<Duration> {
    match change {
        Change::Same => {
            clocks.forget(what, whose);
            None
        }
        Change::Passing => clocks.remaining(what, whose, PASSING),
        Change::News => None,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::{Change, PASSING, compare, held_back};
    use crate::controller::runtime::clocks::{Clocks, Timed};

    #[test]
    fn only_what_passes_by_itself_is_passing() {
        // A name, and a number that passes.
        let compare = |stored: Option<&(&'static str, u32)>, now: (&'static str, u32)| {
            compare(stored, &now, |status: &mut (&'static str, u32)| status.1 = 0)
        };
        assert_eq!(compare(None, ("a", 1)), Change::News);
        assert_eq!(compare(Some(&("a", 1)), ("a", 1)), Change::Same);
        assert_eq!(compare(Some(&("a", 1)), ("a", 2)), Change::Passing);
        assert_eq!(compare(Some(&("a", 1)), ("b", 2)), Change::News);
    }

    #[tokio::test(start_paused = true)]
    async fn what_passes_is_written_once_it_has_lasted() {
        let clocks = Clocks::default();
        let held = |change| held_back(change, &clocks, Timed::VpcStatus, "red");
        assert_eq!(held(Change::News), None);
        assert_eq!(held(Change::Passing), Some(PASSING));
        advance(Duration::from_secs(2)).await;
        assert_eq!(held(Change::Passing), Some(Duration::from_secs(1)));
        assert_eq!(held(Change::News), None, "an error waits for nothing");
        assert_eq!(held(Change::Same), None, "it has passed");
        assert_eq!(held(Change::Passing), Some(PASSING));
        advance(PASSING).await;
        assert_eq!(held(Change::Passing), None);
        assert_eq!(held(Change::Passing), None, "until it is written");
    }
}
