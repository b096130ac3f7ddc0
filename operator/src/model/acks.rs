//! What each droplet was sent and has acked. Times are milliseconds of any monotonic clock.
//!
//! Invariant: a row counts as applied (or as gone) only after the droplet acked the sequence that said so, on the
//! stream that is open now.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use thuban_api::identifiers::Vni;
use thuban_rows::{Kind, Kinds};

use super::rows::Key;
use super::world::Delta;

/// Stream gone for so long: the droplet is suspect.
pub const SUSPECT_AFTER: u64 = 10_000;
/// A droplet that owes an ack for so long is taken for lost, whatever else it acks and however often it dials.
pub const ACK_TIMEOUT: u64 = 60_000;
/// A new leader judges nobody for so long.
pub const JUDGING_DELAY: u64 = 60_000;
/// Percent of the droplets that may be missing while the others are still judged.
const MAX_MISSING_PERCENT: usize = 30;

/// An open stream.
#[derive(Debug)]
struct Session {
    /// The droplet's, shared by all rows that it holds.
    name: Arc<str>,
    /// Which stream; a droplet may dial again before the old one's end is noticed.
    id: u64,
    /// When it opened.
    opened: u64,
    /// The kinds of rows that the droplet understands: it is sent no others.
    kinds: Kinds,
    sequence: u64,
    acked: u64,
    /// Sequences that are not acked, and since when the droplet owes their acks; the oldest first.
    owed: VecDeque<(u64, u64)>,
    /// Sequence that last changed the row.
    rows: BTreeMap<Key, u64>,
    /// Sequence that removed the row; forgotten once acked.
    removed: BTreeMap<Key, u64>,
    /// Sequence that introduced another droplet; forgotten once acked.
    introduced: BTreeMap<Key, u64>,
}

/// Sorted; grown by one at a time, for nearly every row has one holder or as many as its network has bouncers.
type Names = Vec<Arc<str>>;

/// Who may hold a row: so that asking costs nothing for those that never had it.
#[derive(Debug, Default)]
struct Holders {
    /// Droplets by the keys of their sessions' `rows` and `removed`.
    of: HashMap<Key, Names>,
    /// Droplets that have acked nothing of their stream.
    unknown: BTreeSet<Arc<str>>,
    /// Droplets by the keys of their sessions' `introduced`.
    unaware: HashMap<Key, Names>,
}

fn place(names: &Names, droplet: &str) -> Result<usize, usize> {
    names.binary_search_by(|name| (**name).cmp(droplet))
}

fn add_holder(holders: &mut HashMap<Key, Names>, droplet: &Arc<str>, key: &Key) {
    let Some(droplets) = holders.get_mut(key) else {
        holders.insert(key.clone(), vec![droplet.clone()]);
        return;
    };
    if let Err(place) = place(droplets, droplet) {
        droplets.reserve_exact(1);
        droplets.insert(place, droplet.clone());
    }
}

fn drop_holder(holders: &mut HashMap<Key, Names>, droplet: &str, key: &Key) {
    if let Some(droplets) = holders.get_mut(key) {
        if let Ok(place) = place(droplets, droplet) {
            droplets.remove(place);
        }
        if droplets.is_empty() {
            holders.remove(key);
        }
    }
}

impl Holders {
    fn add(&mut self, droplet: &Arc<str>, key: &Key) {
        add_holder(&mut self.of, droplet, key);
    }

    fn remove(&mut self, droplet: &str, key: &Key) {
        drop_holder(&mut self.of, droplet, key);
    }

    fn forget(&mut self, droplet: &str, session: &Session) {
        for key in session.rows.keys().chain(session.removed.keys()) {
            self.remove(droplet, key);
        }
        for key in session.introduced.keys() {
            drop_holder(&mut self.unaware, droplet, key);
        }
        self.unknown.remove(droplet);
    }
}

#[derive(Debug, Default)]
pub struct Acks {
    sessions: HashMap<String, Session>,
    holders: Holders,
    /// When the stream of a droplet ended.
    lost: HashMap<String, u64>,
    /// Since when droplets without a stream owe acks of their last one: a new stream begins with that debt.
    debts: HashMap<String, u64>,
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

    /// A stream opened of a droplet that understands these kinds, and gets this snapshot; its sequence.
    pub fn open<'a>(
        &mut self,
        droplet: &str,
        (id, kinds): (u64, Kinds),
        rows: impl Iterator<Item = &'a Key>,
        now: u64,
    ) -> u64 {
        let name: Arc<str> = droplet.into();
        // Its ack settles what the droplet owes of earlier streams, and nothing else does: not that it dials again.
        let since = self.owes_since(droplet).unwrap_or(now);
        self.debts.remove(droplet);
        let session = Session {
            name: name.clone(),
            id,
            opened: now,
            kinds,
            sequence: 1,
            acked: 0,
            owed: VecDeque::from([(1, since)]),
            rows: rows
                .filter(|key| is_tracked(key))
                .map(|key| (key.clone(), 1))
                .collect(),
            removed: BTreeMap::new(),
            introduced: BTreeMap::new(),
        };
        if let Some(old) = self.sessions.remove(droplet) {
            self.holders.forget(droplet, &old);
        }
        for key in session.rows.keys() {
            self.holders.add(&name, key);
        }
        self.holders.unknown.insert(name);
        self.sessions.insert(droplet.to_owned(), session);
        self.lost.remove(droplet);
        1
    }

    /// The stream ended; ignored if a newer one is open.
    pub fn close(&mut self, droplet: &str, id: u64, now: u64) -> bool {
        if self.sessions.get(droplet).is_none_or(|session| session.id != id) {
            return false;
        }
        if let Some(session) = self.sessions.remove(droplet) {
            self.holders.forget(droplet, &session);
            if let Some((_, since)) = session.owed.front() {
                self.debts.insert(droplet.to_owned(), *since);
            }
        }
        self.lost.insert(droplet.to_owned(), now);
        true
    }

    /// Notes a change that is about to be sent; its sequence, or none when no stream is open.
    pub fn send(&mut self, droplet: &str, delta: &Delta, now: u64) -> Option<u64> {
        let session = self.sessions.get_mut(droplet)?;
        session.sequence += 1;
        session.owed.push_back((session.sequence, now));
        let name = session.name.clone();
        for (key, row) in delta {
            if row.is_none() {
                session.rows.remove(key);
                session.removed.insert(key.clone(), session.sequence);
                self.holders.add(&name, key);
                if session.introduced.remove(key).is_some() {
                    drop_holder(&mut self.holders.unaware, droplet, key);
                }
                continue;
            }
            session.removed.remove(key);
            if is_tracked(key) {
                session.rows.insert(key.clone(), session.sequence);
                self.holders.add(&name, key);
            } else {
                self.holders.remove(droplet, key);
                session.introduced.insert(key.clone(), session.sequence);
                add_holder(&mut self.holders.unaware, &name, key);
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
        if sequence > session.acked {
            session.acked = sequence;
            let unacked = session.owed.partition_point(|(sent, _)| *sent <= sequence);
            session.owed.drain(..unacked);
        }
        let holders = &mut self.holders;
        session.removed.retain(|key, removed| {
            let is_gone = *removed <= sequence;
            if is_gone {
                holders.remove(droplet, key);
            }
            !is_gone
        });
        session.introduced.retain(|key, introduced| {
            let is_known = *introduced <= sequence;
            if is_known {
                drop_holder(&mut holders.unaware, droplet, key);
            }
            !is_known
        });
        if session.acked > 0 {
            holders.unknown.remove(droplet);
        }
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

    /// Whether the droplet may be sent rows of a kind, as far as it is known.
    pub fn understands(&self, droplet: &str, kind: Kind) -> bool {
        let session = self.sessions.get(droplet);
        session.is_none_or(|session| session.kinds.contains(kind))
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

    /// Droplets that hold, or may hold, a row with this key although their stream is open. One that owes acks for too
    /// long counts as if it had no stream.
    pub fn holding<'a>(&'a self, key: &'a Key, now: u64) -> impl Iterator<Item = &'a str> {
        let holders = self.holders.of.get(key);
        let unknown = self.holders.unknown.iter();
        unknown
            .filter(move |droplet| holders.is_none_or(|holders| place(holders, droplet).is_err()))
            .chain(holders.into_iter().flatten())
            .map(AsRef::as_ref)
            .filter(move |droplet| !self.is_overdue(droplet, now))
    }

    /// Whether the droplet may hold a row with this key, by all that it has acked itself: it has no stream, has acked
    /// nothing on it, or was sent the row, or its removal, and has not acked that it is gone.
    pub fn may_hold(&self, droplet: &str, key: &Key) -> bool {
        self.sessions.get(droplet).is_none_or(|session| {
            session.acked == 0 || session.rows.contains_key(key) || session.removed.contains_key(key)
        })
    }

    /// Droplets with an open stream that were told of a droplet and have not acked it.
    pub fn unaware(&self, droplet: &Key) -> impl Iterator<Item = &str> {
        let unaware = self.holders.unaware.get(droplet);
        unaware.into_iter().flatten().map(AsRef::as_ref)
    }

    /// Whether the droplet has acked the snapshot of its stream.
    pub fn is_synced(&self, droplet: &str) -> bool {
        self.sessions
            .get(droplet)
            .is_some_and(|session| session.acked > 0)
    }

    /// What it holds is not known; of one that owes acks for too long, that is as if it had no stream.
    fn is_unknown(&self, droplet: &str, session: &Session, now: u64) -> bool {
        session.acked == 0 && !self.is_overdue(droplet, now)
    }

    /// Droplets with an open stream that hold, or may hold, rows of a VPC.
    pub fn holding_vni(&self, vni: Vni, now: u64) -> impl Iterator<Item = &str> {
        let holds = move |droplet: &str, session: &Session| {
            self.is_unknown(droplet, session, now)
                || session
                    .rows
                    .keys()
                    .chain(session.removed.keys())
                    .any(|key| key.vni() == Some(vni))
        };
        self.sessions
            .iter()
            .filter(move |(droplet, session)| holds(droplet, session))
            .map(|(droplet, _)| droplet.as_str())
    }

    /// Droplets with an open stream that may not know yet that another droplet is gone. One that owes acks for too long
    /// counts as if it had no stream.
    pub fn forgetting(&self, now: u64) -> impl Iterator<Item = &str> {
        let forgets = |session: &Session| {
            session.acked == 0 || session.removed.keys().any(|key| matches!(key, Key::Droplet(_)))
        };
        self.sessions
            .iter()
            .filter(move |(droplet, session)| forgets(session) && !self.is_overdue(droplet, now))
            .map(|(droplet, _)| droplet.as_str())
    }

    /// The droplet acked all that was sent to it, on a stream that is open.
    pub fn is_settled(&self, droplet: &str) -> bool {
        let session = self.sessions.get(droplet);
        session.is_some_and(|session| session.acked == session.sequence)
    }

    /// Since when the droplet owes an ack, of this stream or an earlier one.
    fn owes_since(&self, droplet: &str) -> Option<u64> {
        match self.sessions.get(droplet) {
            Some(session) => session.owed.front().map(|(_, since)| *since),
            None => self.debts.get(droplet).copied(),
        }
    }

    /// Whether the droplet owes an ack for [`ACK_TIMEOUT`]: it is taken for lost until it has acked that.
    pub fn is_overdue(&self, droplet: &str, now: u64) -> bool {
        let since = self.owes_since(droplet);
        since.is_some_and(|since| now.saturating_sub(since) >= ACK_TIMEOUT)
    }

    /// Whether the stream is to end, for the droplet has left something unacked on it for [`ACK_TIMEOUT`]. One that
    /// dialled again has the time anew to ack its snapshot.
    pub fn is_silent(&self, droplet: &str, id: u64, now: u64) -> bool {
        let session = self.sessions.get(droplet).filter(|session| session.id == id);
        session.is_some_and(|session| {
            let oldest = session.owed.front();
            oldest.is_some_and(|(_, since)| now.saturating_sub(session.opened.max(*since)) >= ACK_TIMEOUT)
        })
    }

    /// For how long the droplet has had no stream on which it acks in time; none while it has one.
    pub fn lost_for(&self, droplet: &str, now: u64) -> Option<u64> {
        if self.is_overdue(droplet, now) {
            return self.owes_since(droplet).map(|since| now.saturating_sub(since));
        }
        let since = self.lost.get(droplet).copied().unwrap_or(self.started);
        (!self.is_connected(droplet)).then(|| now.saturating_sub(since))
    }

    /// When droplets may be judged at all: some time after this operator began to lead, and not while so many of them
    /// are missing that the fault is likely to be elsewhere. One missing droplet is never too many.
    pub fn is_judging<'a>(&self, droplets: impl Iterator<Item = &'a String>, now: u64) -> bool {
        let (mut total, mut missing) = (0, 0);
        for droplet in droplets {
            total += 1;
            missing += usize::from(self.lost_for(droplet, now).is_some());
        }
        now.saturating_sub(self.started) >= JUDGING_DELAY
            && (missing <= 1 || missing * 100 <= total * MAX_MISSING_PERCENT)
    }
}

/// Every droplet knows every other: only the removal of these rows is waited for, and so kept.
fn is_tracked(key: &Key) -> bool {
    !matches!(key, Key::Droplet(_))
}

#[cfg(test)]
mod tests {
    use thuban_rows::Kinds;
    use thuban_rows::builders::VNI;

    use super::{ACK_TIMEOUT, Acks, JUDGING_DELAY, Key};
    use crate::model::rows::{self, PackedRow};
    use crate::model::world::Delta;

    fn key(last: u8) -> Key {
        Key::Bouncer(VNI, std::net::IpAddr::from([10, 0, 0, last]))
    }

    fn delta(added: &[u8], removed: &[u8]) -> Delta {
        let row = rows::droplet([1, 1, 1, 1].into());
        let added = added.iter().map(|last| (key(*last), Some(PackedRow::new(&row))));
        added
            .chain(removed.iter().map(|last| (key(*last), None)))
            .collect()
    }

    fn is_gone(acks: &Acks, key: &Key) -> bool {
        acks.holding(key, 0).next().is_none()
    }

    /// As `holding`, by going through all sessions.
    fn holding_by_session(acks: &Acks, key: &Key) -> Vec<String> {
        let droplets = acks.sessions.keys().filter(|droplet| acks.may_hold(droplet, key));
        let mut names: Vec<String> = droplets.cloned().collect();
        names.sort();
        names
    }

    #[test]
    fn who_holds_a_row_is_known_without_asking_all() {
        let mut acks = Acks::new(0);
        let gone = Key::Droplet([1, 1, 1, 1].into());
        let mut seed: u32 = 1;
        let mut random = |below: u32| {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 16) % below
        };
        for step in 0..5000_u64 {
            let droplet = ["a", "b", "c"][random(3) as usize];
            let (one, two) = (random(4) as u8, random(4) as u8);
            let session = acks.sessions.get(droplet);
            let (id, sequence) = session.map_or((0, 0), |session| (session.id, session.sequence));
            match random(12) {
                0 => drop(acks.open(
                    droplet,
                    (step, Kinds::all()),
                    [&key(one), &key(two)].into_iter(),
                    0,
                )),
                1 => drop(acks.close(droplet, id, step)),
                2..5 => drop(acks.send(droplet, &delta(&[one], &[two]), 0)),
                5 => drop(acks.send(droplet, &delta(&[], &[one, two]), 0)),
                6 => drop(acks.send(droplet, &Delta::from([(gone.clone(), None)]), 0)),
                7 => {
                    let row = rows::droplet([1, 1, 1, 1].into());
                    acks.send(
                        droplet,
                        &Delta::from([(gone.clone(), Some(PackedRow::new(&row)))]),
                        0,
                    );
                }
                8 => drop(acks.nack(droplet, id, sequence, &key(one))),
                _ => drop(acks.ack(droplet, id, sequence.saturating_sub(random(3).into()))),
            }
            for key in (0..4).map(key).chain([gone.clone()]) {
                let mut holding: Vec<&str> = acks.holding(&key, 0).collect();
                holding.sort_unstable();
                assert_eq!(holding, holding_by_session(&acks, &key), "step {step}");
            }
        }
        for droplet in ["a", "b", "c"] {
            let id = acks.sessions.get(droplet).map_or(0, |session| session.id);
            acks.close(droplet, id, 0);
        }
        let holders = &acks.holders;
        assert!(holders.of.is_empty() && holders.unknown.is_empty() && holders.unaware.is_empty());
    }

    #[test]
    fn a_row_counts_only_once_its_sequence_is_acked() {
        let mut acks = Acks::new(0);
        assert!(!acks.is_acked("a", &key(1)));
        assert_eq!(acks.open("a", (1, Kinds::all()), [&key(1)].into_iter(), 0), 1);
        assert!(
            !acks.is_acked("a", &key(1)) && !is_gone(&acks, &key(9)),
            "the snapshot isn't acked yet"
        );
        assert!(acks.ack("a", 1, 1));
        assert!(acks.is_acked("a", &key(1)) && is_gone(&acks, &key(9)));
        assert_eq!(acks.send("a", &delta(&[1, 2], &[]), 0), Some(2));
        assert!(!acks.is_acked("a", &key(1)), "it was changed since");
        assert!(acks.ack("a", 1, 2) && acks.is_acked("a", &key(2)));
        acks.send("a", &delta(&[], &[2]), 0);
        assert_eq!(acks.holding(&key(2), 0).collect::<Vec<_>>(), ["a"]);
        assert!(acks.ack("a", 1, 3) && is_gone(&acks, &key(2)));
    }

    #[test]
    fn acks_of_an_old_stream_or_of_the_future_count_for_nothing() {
        let mut acks = Acks::new(0);
        acks.open("a", (1, Kinds::all()), [].into_iter(), 0);
        acks.open("a", (2, Kinds::all()), [&key(1)].into_iter(), 0);
        assert!(!acks.ack("a", 1, 1) && !acks.ack("a", 2, 5));
        assert!(!acks.close("a", 1, 0) && acks.is_connected("a"));
        assert!(acks.ack("a", 2, 1));
        assert!(!acks.nack("a", 2, 0, &key(1)), "sent again since");
        assert!(!acks.nack("a", 2, 1, &key(5)), "never sent");
        assert!(acks.nack("a", 2, 1, &key(1)));
        assert!(!acks.is_acked("a", &key(1)));
    }

    #[test]
    fn nobody_is_judged_too_early_or_while_too_many_are_missing() {
        let mut acks = Acks::new(100);
        let names: Vec<String> = (0..10).map(|number| format!("d{number}")).collect();
        for (id, name) in names.iter().enumerate() {
            acks.open(name, (id as u64, Kinds::all()), [].into_iter(), 0);
            acks.ack(name, id as u64, 1);
        }
        assert!(!acks.is_judging(names.iter(), 99 + JUDGING_DELAY));
        assert!(acks.is_judging(names.iter(), 100 + JUDGING_DELAY));
        for (id, name) in names.iter().enumerate().take(3) {
            acks.close(name, id as u64, 50);
        }
        assert!(acks.is_judging(names.iter(), 100 + JUDGING_DELAY), "3 of 10");
        acks.close("d3", 3, 50);
        assert!(!acks.is_judging(names.iter(), 100 + JUDGING_DELAY), "4 of 10");
        let two = [String::from("d0"), String::from("d9")];
        assert!(acks.is_judging(two.iter(), 100 + JUDGING_DELAY), "one of two");
        assert_eq!(acks.lost_for("d0", 60), Some(10));
        assert_eq!(acks.lost_for("d9", 60), None);
        assert_eq!(acks.lost_for("never seen", 160), Some(60));
    }

    /// One that acks a row now and then, and always too few.
    #[test]
    fn a_droplet_is_judged_by_the_oldest_row_that_it_has_not_acked() {
        let mut acks = Acks::new(0);
        acks.open("a", (1, Kinds::all()), [].into_iter(), 0);
        acks.ack("a", 1, 1);
        for (number, sent) in [(1, 1_000), (2, 2_000), (3, 3_000)] {
            acks.send("a", &delta(&[number], &[]), sent);
        }
        acks.ack("a", 1, 2);
        assert!(!acks.is_overdue("a", 1_999 + ACK_TIMEOUT) && !is_gone(&acks, &key(2)));
        let late = 2_000 + ACK_TIMEOUT;
        assert!(acks.is_overdue("a", late) && acks.is_silent("a", 1, late));
        assert_eq!(acks.lost_for("a", late), Some(ACK_TIMEOUT));
        assert_eq!(acks.holding(&key(2), late).count(), 0, "nobody waits for it");
        assert!(acks.may_hold("a", &key(2)), "it has the row all the same");
        acks.ack("a", 1, 3);
        assert!(!acks.is_overdue("a", late), "the next is a second younger");
        acks.ack("a", 1, 4);
        assert!(!acks.is_overdue("a", late + 2 * ACK_TIMEOUT) && acks.lost_for("a", late).is_none());
    }

    /// One that dials again before anybody finds it silent.
    #[test]
    fn what_a_droplet_owes_is_older_than_its_stream() {
        let mut acks = Acks::new(0);
        let dial = |acks: &mut Acks, id: u64, now: u64| {
            acks.open("a", (id, Kinds::all()), [&key(1)].into_iter(), now);
        };
        dial(&mut acks, 1, 0);
        for (id, now) in [(2, 20_000), (3, 40_000)] {
            acks.close("a", id - 1, now - 1_000);
            dial(&mut acks, id, now);
        }
        dial(&mut acks, 4, 50_000);
        assert!(!acks.is_overdue("a", ACK_TIMEOUT - 1) && !is_gone(&acks, &key(1)));
        assert!(acks.is_overdue("a", ACK_TIMEOUT) && acks.holding(&key(1), ACK_TIMEOUT).next().is_none());
        assert!(
            !acks.is_silent("a", 4, 50_000 + ACK_TIMEOUT - 1),
            "its stream is young"
        );
        assert!(acks.is_silent("a", 4, 50_000 + ACK_TIMEOUT));
        acks.close("a", 4, ACK_TIMEOUT);
        assert!(acks.is_overdue("a", ACK_TIMEOUT), "without a stream too");
        dial(&mut acks, 5, 90_000);
        acks.ack("a", 5, 1);
        assert!(!acks.is_overdue("a", 90_000) && acks.lost_for("a", 90_000).is_none());
        acks.close("a", 5, 91_000);
        assert_eq!(acks.lost_for("a", 95_000), Some(4_000), "it owes nothing");
    }

    #[test]
    fn a_droplet_is_known_once_its_introduction_is_acked() {
        let mut acks = Acks::new(0);
        let new = Key::Droplet([1, 1, 1, 1].into());
        let row = rows::droplet([1, 1, 1, 1].into());
        acks.open("a", (1, Kinds::all()), [&new].into_iter(), 0);
        assert!(!acks.is_synced("a"));
        acks.ack("a", 1, 1);
        assert!(acks.is_synced("a") && acks.unaware(&new).next().is_none());
        acks.send("a", &Delta::from([(new.clone(), Some(PackedRow::new(&row)))]), 0);
        assert_eq!(acks.unaware(&new).collect::<Vec<_>>(), ["a"]);
        acks.ack("a", 1, 1);
        assert!(acks.unaware(&new).next().is_some(), "an older ack");
        acks.ack("a", 1, 2);
        assert!(acks.unaware(&new).next().is_none());
        acks.send("a", &Delta::from([(new.clone(), Some(PackedRow::new(&row)))]), 0);
        acks.send("a", &Delta::from([(new.clone(), None)]), 0);
        assert!(acks.unaware(&new).next().is_none(), "it left again");
    }

    #[test]
    fn the_removal_of_a_known_droplet_is_pending_until_it_is_acked() {
        let mut acks = Acks::new(0);
        let gone = Key::Droplet([1, 1, 1, 1].into());
        acks.open("a", (1, Kinds::all()), [&gone].into_iter(), 0);
        assert_eq!(acks.forgetting(0).count(), 1, "its snapshot is not acked");
        acks.ack("a", 1, 1);
        assert!(acks.forgetting(0).count() == 0 && acks.is_settled("a"));
        acks.send("a", &Delta::from([(gone.clone(), None)]), 0);
        assert!(acks.forgetting(0).count() == 1 && !acks.is_settled("a"));
        acks.ack("a", 1, 2);
        assert!(acks.forgetting(0).count() == 0 && acks.is_settled("a"));
    }
}
