//! What each droplet was sent and has acked. Times are milliseconds of any monotonic clock.
//!
//! Invariant: a row counts as applied (or as gone) only after the droplet acked the sequence that said so, on the
//! stream that is open now.

use std::collections::{BTreeMap, HashMap};

use super::rows::Key;
use super::world::Delta;

/// Stream gone for so long: the droplet is suspect.
pub const SUSPECT_AFTER: u64 = 10_000;
/// A new leader gives droplets that have not dialled yet so much longer.
pub const SETTLE: u64 = 50_000;

/// An open stream.
#[derive(Debug, Default)]
pub struct Session {
    /// Which stream; a droplet may dial again before the old one's end is noticed.
    pub id: u64,
    sequence: u64,
    acked: u64,
    /// Sequence that last changed the row.
    rows: BTreeMap<Key, u64>,
    /// Sequence that removed the row; forgotten once acked.
    removed: BTreeMap<Key, u64>,
}

#[derive(Debug, Default)]
pub struct Acks {
    sessions: HashMap<String, Session>,
    /// When the stream of a droplet ended.
    lost: HashMap<String, u64>,
    started: u64,
}

impl Acks {
    /// `now`: when this operator began to lead; droplets have from then on to dial.
    pub fn new(now: u64) -> Self {
        Self {
            started: now,
            ..Self::default()
        }
    }

    /// A stream opened and gets this snapshot; its sequence.
    pub fn open<'a>(&mut self, droplet: &str, id: u64, rows: impl Iterator<Item = &'a Key>) -> u64 {
        let session = Session {
            id,
            sequence: 1,
            rows: rows.map(|key| (key.clone(), 1)).collect(),
            ..Session::default()
        };
        self.sessions.insert(droplet.to_owned(), session);
        self.lost.remove(droplet);
        1
    }

    /// The stream ended; ignored if a newer one is open.
    pub fn close(&mut self, droplet: &str, id: u64, now: u64) -> bool {
        if self.sessions.get(droplet).is_none_or(|session| session.id != id) {
            return false;
        }
        self.sessions.remove(droplet);
        self.lost.insert(droplet.to_owned(), now);
        true
    }

    /// Notes a change that is about to be sent; its sequence, or none when no stream is open.
    pub fn send(&mut self, droplet: &str, delta: &Delta) -> Option<u64> {
        let session = self.sessions.get_mut(droplet)?;
        session.sequence += 1;
        for (key, row) in delta {
            if row.is_some() {
                session.removed.remove(key);
                session.rows.insert(key.clone(), session.sequence);
            } else {
                session.rows.remove(key);
                session.removed.insert(key.clone(), session.sequence);
            }
        }
        Some(session.sequence)
    }

    /// The droplet acked everything up to `sequence`; false if it's not of the open stream or beyond what was sent.
    pub fn ack(&mut self, droplet: &str, id: u64, sequence: u64) -> bool {
        let Some(session) = self.sessions.get_mut(droplet).filter(|session| session.id == id) else {
            return false;
        };
        if sequence > session.sequence {
            return false;
        }
        session.acked = session.acked.max(sequence);
        session.removed.retain(|_, removed| *removed > sequence);
        true
    }

    /// The row of this sequence could not be applied: it is not there until it is sent again. False if it was changed
    /// since, or is not of the open stream.
    pub fn nack(&mut self, droplet: &str, id: u64, sequence: u64, key: &Key) -> bool {
        let session = self.sessions.get_mut(droplet).filter(|session| session.id == id);
        let row = session
            .and_then(|session| session.rows.get_mut(key))
            .filter(|sent| **sent <= sequence);
        row.map(|sent| *sent = u64::MAX).is_some()
    }

    pub fn is_connected(&self, droplet: &str) -> bool {
        self.sessions.contains_key(droplet)
    }

    pub fn is_acked(&self, droplet: &str, key: &Key) -> bool {
        let Some(session) = self.sessions.get(droplet) else {
            return false;
        };
        session
            .rows
            .get(key)
            .is_some_and(|sequence| *sequence <= session.acked)
    }

    /// The droplet holds no such row: its program lacks it and that is acked.
    pub fn is_gone(&self, droplet: &str, key: &Key) -> bool {
        let Some(session) = self.sessions.get(droplet) else {
            return false;
        };
        session.acked > 0 && !session.rows.contains_key(key) && !session.removed.contains_key(key)
    }

    /// Droplets that hold, or may hold, a row with this key although their stream is open.
    pub fn holding<'a>(&'a self, key: &'a Key) -> impl Iterator<Item = &'a str> {
        self.sessions
            .keys()
            .map(String::as_str)
            .filter(move |droplet| !self.is_gone(droplet, key))
    }

    /// Droplets with an open stream that hold, or may hold, rows of a VPC.
    pub fn holding_vni(&self, vni: u32) -> impl Iterator<Item = &str> {
        let holds = move |session: &Session| {
            session.acked == 0
                || session
                    .rows
                    .keys()
                    .chain(session.removed.keys())
                    .any(|key| key.vni() == Some(vni))
        };
        self.sessions
            .iter()
            .filter(move |(_, session)| holds(session))
            .map(|(droplet, _)| droplet.as_str())
    }

    /// No stream for [`SUSPECT_AFTER`].
    pub fn is_suspect(&self, droplet: &str, now: u64) -> bool {
        let since = self.lost.get(droplet).copied().unwrap_or(self.started + SETTLE);
        !self.is_connected(droplet) && now.saturating_sub(since) >= SUSPECT_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::{Acks, Key, SETTLE, SUSPECT_AFTER};
    use crate::model::rows;
    use crate::model::world::Delta;

    fn key(last: u8) -> Key {
        Key::Bouncer(7, std::net::IpAddr::from([10, 0, 0, last]))
    }

    fn delta(added: &[u8], removed: &[u8]) -> Delta {
        let row = rows::droplet([1, 1, 1, 1].into()).1;
        let added = added.iter().map(|last| (key(*last), Some(row.clone())));
        added
            .chain(removed.iter().map(|last| (key(*last), None)))
            .collect()
    }

    #[test]
    fn a_row_counts_only_once_its_sequence_is_acked() {
        let mut acks = Acks::new(0);
        assert!(!acks.is_acked("a", &key(1)) && !acks.is_gone("a", &key(1)));
        assert_eq!(acks.open("a", 1, [&key(1)].into_iter()), 1);
        assert!(
            !acks.is_acked("a", &key(1)) && !acks.is_gone("a", &key(9)),
            "the snapshot isn't acked yet"
        );
        assert!(acks.ack("a", 1, 1));
        assert!(acks.is_acked("a", &key(1)) && acks.is_gone("a", &key(9)));
        assert_eq!(acks.send("a", &delta(&[1, 2], &[])), Some(2));
        assert!(!acks.is_acked("a", &key(1)), "it was changed since");
        assert!(acks.ack("a", 1, 2) && acks.is_acked("a", &key(2)));
        acks.send("a", &delta(&[], &[2]));
        assert!(!acks.is_gone("a", &key(2)) && acks.holding(&key(2)).count() == 1);
        assert!(acks.ack("a", 1, 3) && acks.is_gone("a", &key(2)));
    }

    #[test]
    fn acks_of_an_old_stream_or_of_the_future_count_for_nothing() {
        let mut acks = Acks::new(0);
        acks.open("a", 1, [].into_iter());
        acks.open("a", 2, [&key(1)].into_iter());
        assert!(!acks.ack("a", 1, 1) && !acks.ack("a", 2, 5));
        assert!(!acks.close("a", 1, 0) && acks.is_connected("a"));
        assert!(acks.ack("a", 2, 1));
        assert!(!acks.nack("a", 2, 0, &key(1)), "sent again since");
        assert!(!acks.nack("a", 2, 1, &key(5)), "never sent");
        assert!(acks.nack("a", 2, 1, &key(1)));
        assert!(!acks.is_acked("a", &key(1)));
    }

    #[test]
    fn a_droplet_is_suspect_after_a_while_without_stream() {
        let mut acks = Acks::new(100);
        assert!(
            !acks.is_suspect("a", 100 + SUSPECT_AFTER) && acks.is_suspect("a", 100 + SETTLE + SUSPECT_AFTER)
        );
        acks.open("a", 1, [].into_iter());
        assert!(!acks.is_suspect("a", 1_000_000));
        acks.close("a", 1, 1_000_000);
        assert!(!acks.is_suspect("a", 1_000_001) && acks.is_suspect("a", 1_000_000 + SUSPECT_AFTER));
    }
}
