//! Rows that droplets have no room for. A droplet refuses such a row; the row is sent again after a pause, and each
//! further refusal doubles the pause. Times are milliseconds of any monotonic clock.
//!
//! Invariant: a row is in here from its refusal until the droplet has acked it, until the droplet need not have it any
//! more, or until the droplet's stream ends. A new stream brings all rows.

use std::collections::{BTreeMap, BTreeSet};

use thuban_rows::Kind;

use super::rows::Key;
use super::world::Delta;

/// The pause before a refused row is sent again for the first time, milliseconds.
const FIRST_PAUSE: u64 = 10_000;
/// The longest pause, milliseconds.
pub const LONGEST_PAUSE: u64 = 300_000;
/// How long a table counts as full after its droplet refused a row for the last time, milliseconds. Rows that are still
/// refused are sent again earlier than that.
const FULL_FOR: u64 = 2 * LONGEST_PAUSE;
/// The most rows of a droplet that are sent again in one program.
const MAX_ROWS: usize = 512;

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The row is sent again at this time.
    Waits(u64),
    /// The row was sent again in this sequence, and is neither acked nor refused.
    Sent(u64),
}

#[derive(Debug)]
struct Refused {
    pause: u64,
    state: State,
}

/// A table that is full.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Full {
    pub droplet: String,
    pub kind: Kind,
    /// How many rows of the kind the droplet has no room for.
    pub rows: usize,
}

#[derive(Debug, Default)]
pub struct FullTables {
    refused: BTreeMap<String, BTreeMap<Key, Refused>>,
    /// When each droplet last refused a row of a kind.
    last: BTreeMap<(String, Kind), u64>,
    /// Droplets that have refused something since they were last asked for.
    news: BTreeSet<String>,
}

impl FullTables {
    /// Notes that the droplet has no room for a row, which this sequence brought. Ignored if the row waits to be sent
    /// again, or was sent again since.
    pub fn refuse(&mut self, droplet: &str, key: &Key, sequence: u64, now: u64) {
        let rows = self.refused.entry(droplet.to_owned()).or_default();
        let is_old = |known: &Refused| match known.state {
            State::Waits(_) => true,
            State::Sent(sent) => sent > sequence,
        };
        if rows.get(key).is_some_and(is_old) {
            return;
        }
        let pause = rows
            .get(key)
            .map_or(FIRST_PAUSE, |known| LONGEST_PAUSE.min(known.pause * 2));
        let state = State::Waits(now + pause);
        rows.insert(key.clone(), Refused { pause, state });
        self.last.retain(|_, last| now.saturating_sub(*last) < FULL_FOR);
        self.last.insert((droplet.to_owned(), key.kind()), now);
        self.news.insert(droplet.to_owned());
    }

    /// Notes a change that is sent to a droplet.
    pub fn sent(&mut self, droplet: &str, delta: &Delta, sequence: u64) {
        let Some(rows) = self.refused.get_mut(droplet) else {
            return;
        };
        for (key, row) in delta {
            if row.is_none() {
                rows.remove(key);
            } else if let Some(refused) = rows.get_mut(key) {
                refused.state = State::Sent(sequence);
            }
        }
        self.tidy(droplet);
    }

    /// Notes that the droplet acked everything up to `sequence`: what it did not refuse before, it has.
    pub fn acked(&mut self, droplet: &str, sequence: u64) {
        let Some(rows) = self.refused.get_mut(droplet) else {
            return;
        };
        rows.retain(|_, refused| !matches!(refused.state, State::Sent(sent) if sent <= sequence));
        self.tidy(droplet);
    }

    /// Forgets a row that the droplet need not have.
    pub fn remove(&mut self, droplet: &str, key: &Key) {
        if let Some(rows) = self.refused.get_mut(droplet) {
            rows.remove(key);
        }
        self.tidy(droplet);
    }

    /// Forgets what the droplet refused, because its stream is gone. Its tables still count as full for a while.
    pub fn forget(&mut self, droplet: &str) {
        self.refused.remove(droplet);
    }

    fn tidy(&mut self, droplet: &str) {
        if self.refused.get(droplet).is_some_and(BTreeMap::is_empty) {
            self.refused.remove(droplet);
        }
    }

    /// Returns the rows to be sent again now, by droplet.
    pub fn due(&self, now: u64) -> Vec<(String, Vec<Key>)> {
        let of = |rows: &BTreeMap<Key, Refused>| -> Vec<Key> {
            let due = rows
                .iter()
                .filter(|(_, refused)| matches!(refused.state, State::Waits(until) if until <= now));
            due.map(|(key, _)| key.clone()).take(MAX_ROWS).collect()
        };
        let all = self
            .refused
            .iter()
            .map(|(droplet, rows)| (droplet.clone(), of(rows)));
        all.filter(|(_, keys)| !keys.is_empty()).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.refused.is_empty()
    }

    /// Returns how many rows droplets have no room for.
    pub fn rows(&self) -> usize {
        self.refused.values().map(BTreeMap::len).sum()
    }

    /// Whether the droplet has no room for this row.
    pub fn lacks(&self, droplet: &str, key: &Key) -> bool {
        let rows = self.refused.get(droplet);
        rows.is_some_and(|rows| rows.contains_key(key))
    }

    /// Returns the droplet's table for rows of a kind.
    pub fn full(&self, droplet: &str, kind: Kind) -> Full {
        let rows = self.refused.get(droplet).into_iter().flat_map(BTreeMap::keys);
        Full {
            droplet: droplet.to_owned(),
            kind,
            rows: rows.filter(|key| key.kind() == kind).count(),
        }
    }

    /// Whether the droplet has had no room for rows of a kind lately.
    pub fn is_full(&self, droplet: &str, kind: Kind, now: u64) -> bool {
        let last = self.last.get(&(droplet.to_owned(), kind));
        last.is_some_and(|last| now.saturating_sub(*last) < FULL_FOR)
    }

    /// Returns the droplets that have refused something since the last call.
    pub fn take_news(&mut self) -> BTreeSet<String> {
        std::mem::take(&mut self.news)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use thuban_rows::builders::VNI;

    use super::{FIRST_PAUSE, FULL_FOR, FullTables, Key, Kind, LONGEST_PAUSE, MAX_ROWS};
    use crate::model::rows::{self, PackedRow};
    use crate::model::world::Delta;

    fn key(number: u16) -> Key {
        let [third, fourth] = number.to_be_bytes();
        Key::Bouncer(VNI, IpAddr::from([10, 0, third, fourth]))
    }

    fn delta(number: u16, is_there: bool) -> Delta {
        let row = PackedRow::new(&rows::droplet([1, 1, 1, 1].into(), None));
        Delta::from([(key(number), is_there.then_some(row))])
    }

    fn is_due(tables: &FullTables, now: u64) -> bool {
        !tables.due(now).is_empty()
    }

    #[test]
    fn refused_row_is_sent_again_with_pauses_that_double() {
        let mut tables = FullTables::default();
        let (mut now, mut pauses) = (1_000, Vec::new());
        for sequence in 2..10 {
            tables.refuse("a", &key(1), sequence - 1, now);
            let refused = now;
            while !is_due(&tables, now) {
                now += 1_000;
            }
            pauses.push((now - refused) / 1_000);
            assert_eq!(tables.due(now), [("a".to_owned(), vec![key(1)])]);
            tables.sent("a", &delta(1, true), sequence);
            assert!(!is_due(&tables, now + LONGEST_PAUSE), "it is under way");
        }
        assert_eq!(pauses, [10, 20, 40, 80, 160, 300, 300, 300]);
    }

    #[test]
    fn an_ack_without_a_refusal_means_that_there_was_room() {
        let mut tables = FullTables::default();
        tables.refuse("a", &key(1), 1, 0);
        tables.acked("a", 1);
        assert!(
            tables.lacks("a", &key(1)),
            "this acks the program in which it was refused"
        );
        tables.sent("a", &delta(1, true), 2);
        tables.refuse("a", &key(1), 2, FIRST_PAUSE);
        tables.acked("a", 2);
        assert!(tables.lacks("a", &key(1)), "it was refused again");
        tables.refuse("a", &key(1), 2, LONGEST_PAUSE);
        assert!(is_due(&tables, LONGEST_PAUSE), "said twice, it waits no longer");
        tables.sent("a", &delta(1, true), 3);
        tables.acked("a", 2);
        assert!(tables.lacks("a", &key(1)), "an older ack");
        tables.refuse("a", &key(1), 2, LONGEST_PAUSE);
        assert!(
            !is_due(&tables, 2 * LONGEST_PAUSE),
            "an older refusal: it is under way"
        );
        tables.acked("a", 3);
        assert!(!tables.lacks("a", &key(1)) && tables.is_empty());
    }

    #[test]
    fn rows_that_nobody_needs_are_not_sent_again() {
        let mut tables = FullTables::default();
        for number in 1..=3 {
            tables.refuse("a", &key(number), 1, 0);
        }
        assert_eq!(tables.full("a", Kind::Bouncer).rows, 3);
        tables.sent("a", &delta(1, false), 2);
        tables.remove("a", &key(2));
        assert_eq!(tables.due(FIRST_PAUSE), [("a".to_owned(), vec![key(3)])]);
        tables.forget("a");
        assert!(tables.is_empty() && !is_due(&tables, LONGEST_PAUSE));
    }

    #[test]
    fn a_table_counts_as_full_for_a_while_by_kind_of_row() {
        let mut tables = FullTables::default();
        tables.refuse("a", &key(1), 1, 0);
        tables.forget("a");
        assert!(tables.is_full("a", Kind::Bouncer, FULL_FOR - 1));
        assert!(!tables.is_full("a", Kind::Bouncer, FULL_FOR) && !tables.is_full("a", Kind::Vpc, 0));
        assert_eq!(tables.take_news().into_iter().collect::<Vec<_>>(), ["a"]);
        assert!(tables.take_news().is_empty());
    }

    #[test]
    fn many_refused_rows_are_sent_again_in_several_programs() {
        let mut tables = FullTables::default();
        for number in 0..=MAX_ROWS as u16 {
            tables.refuse("a", &key(number), 1, 0);
        }
        assert_eq!(tables.due(FIRST_PAUSE)[0].1.len(), MAX_ROWS);
    }
}
