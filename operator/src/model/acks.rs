//! Tracks what each droplet was sent and has acked. Times are milliseconds of any monotonic clock.
//!
//! Invariant: a row counts as applied (or as gone) only after the droplet acked the sequence with that change, on the
//! stream that is open now.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use thuban_api::identifiers::Vni;
use thuban_rows::{Kind, Kinds};

use super::rows::Key;
use super::world::Delta;

/// How long a stream is gone before the droplet is suspect, milliseconds.
pub const SUSPECT_AFTER: u64 = 10_000;
/// How long a droplet may owe an ack before it counts as lost, milliseconds, whatever else it acks and however often it
/// dials.
pub const ACK_TIMEOUT: u64 = 60_000;
/// How long a new leader judges no droplet, milliseconds.
pub const JUDGING_DELAY: u64 = 60_000;
/// The percentage of droplets that may be missing while the others are still judged.
const MAX_MISSING_PERCENT: usize = 30;

/// An open stream.
#[derive(Debug)]
struct Session {
    /// The droplet's name, shared by all rows that it holds.
    name: Arc<str>,
    /// The id of the stream; a droplet may dial again before the end of its old stream is noticed.
    id: u64,
    /// The time when the stream opened.
    opened: u64,
    /// The kinds of rows that the droplet understands: it is sent no others.
    kinds: Kinds,
    sequence: u64,
    /// The last sequence with a change that the droplet did not ask for.
    unasked: u64,
    acked: u64,
    /// Sequences that are not acked, and since when the droplet owes their acks; the oldest is first.
    owed: VecDeque<(u64, u64)>,
    /// The sequence that last changed each row.
    rows: BTreeMap<Key, u64>,
    /// The sequence that removed each row; forgotten once acked.
    removed: BTreeMap<Key, u64>,
    /// The sequence that introduced each other droplet; forgotten once acked.
    introduced: BTreeMap<Key, u64>,
}

/// How late a droplet's acks were, at most [`ACK_TIMEOUT`]. The lateness wears off: a second of it for each second that
/// passes.
#[derive(Clone, Copy, Debug)]
struct Lateness {
    by: u64,
    at: u64,
}

impl Lateness {
    fn left(self, now: u64) -> u64 {
        self.by.saturating_sub(now.saturating_sub(self.at))
    }
}

/// Names of droplets, sorted. The list grows by one element at a time: nearly every row has one holder, or as many as
/// its network has bouncers.
type Names = Vec<Arc<str>>;

/// The droplets that may hold a row, so that a query costs nothing for droplets that never had it.
#[derive(Debug, Default)]
struct Holders {
    /// Droplets by the keys of their sessions' `rows` and `removed`.
    of: HashMap<Key, Names>,
    /// Droplets that have acked nothing of their stream.
    unknown: BTreeSet<Arc<str>>,
    /// Droplets by the keys of their sessions' `introduced`.
    unaware: HashMap<Key, Names>,
    /// How many rows of each VPC a droplet holds or may hold, of those in `of`.
    numbers: HashMap<Vni, HashMap<Arc<str>, usize>>,
}

fn place(names: &Names, droplet: &str) -> Result<usize, usize> {
    names.binary_search_by(|name| (**name).cmp(droplet))
}

/// Adds a holder of a row. Returns whether it is new.
fn add_holder(holders: &mut HashMap<Key, Names>, droplet: &Arc<str>, key: &Key) -> bool {
    let Some(droplets) = holders.get_mut(key) else {
        holders.insert(key.clone(), vec![droplet.clone()]);
        return true;
    };
    let Err(place) = place(droplets, droplet) else {
        return false;
    };
    droplets.reserve_exact(1);
    droplets.insert(place, droplet.clone());
    true
}

/// Removes a holder of a row. Returns whether there was one.
fn drop_holder(holders: &mut HashMap<Key, Names>, droplet: &str, key: &Key) -> bool {
    let Some(droplets) = holders.get_mut(key) else {
        return false;
    };
    let place = place(droplets, droplet);
    if let Ok(place) = place {
        droplets.remove(place);
    }
    if droplets.is_empty() {
        holders.remove(key);
    }
    place.is_ok()
}

impl Holders {
    fn add(&mut self, droplet: &Arc<str>, key: &Key) {
        if add_holder(&mut self.of, droplet, key)
            && let Some(vni) = key.vni()
        {
            let rows = self.numbers.entry(vni).or_default();
            *rows.entry(droplet.clone()).or_default() += 1;
        }
    }

    fn remove(&mut self, droplet: &str, key: &Key) {
        if !drop_holder(&mut self.of, droplet, key) {
            return;
        }
        let Some((vni, rows)) = key.vni().and_then(|vni| Some((vni, self.numbers.get_mut(&vni)?))) else {
            return;
        };
        if let Some(number) = rows.get_mut(droplet) {
            *number -= 1;
            if *number == 0 {
                rows.remove(droplet);
            }
        }
        if rows.is_empty() {
            self.numbers.remove(&vni);
        }
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

/// A moment on all open streams.
#[derive(Debug)]
pub struct Marks(HashMap<Arc<str>, (u64, u64)>);

#[derive(Debug, Default)]
pub struct Acks {
    sessions: HashMap<String, Session>,
    holders: Holders,
    /// The time when each droplet's stream ended.
    lost: HashMap<String, u64>,
    /// Since when droplets without a stream owe acks of their last one: a new stream begins with that debt.
    debts: HashMap<String, u64>,
    /// The lateness of each droplet: a new stream begins with it, so that a droplet which acks at the last moment and
    /// dials again is not waited for anew.
    late: HashMap<String, Lateness>,
    started: u64,
}

impl Acks {
    /// Makes an empty set. `now` is the time when this operator began to lead: droplets have from then on to dial.
    pub fn new(now: u64) -> Self {
        Self {
            started: now,
            ..Self::default()
        }
    }

    /// Notes that a droplet that understands these kinds opened a stream and gets this snapshot. Returns the sequence.
    pub fn open<'a>(
        &mut self,
        droplet: &str,
        (id, kinds): (u64, Kinds),
        rows: impl Iterator<Item = &'a Key>,
        now: u64,
    ) -> u64 {
        let name: Arc<str> = droplet.into();
        // The ack of the snapshot settles all that the droplet owes of earlier streams. Nothing else does, not even
        // that it dials again.
        let since = self.owes_since(droplet).unwrap_or(now);
        let since = since.min(now.saturating_sub(self.lateness(droplet, now)));
        self.debts.remove(droplet);
        let session = Session {
            name: name.clone(),
            id,
            opened: now,
            kinds,
            sequence: 1,
            unasked: 1,
            acked: 0,
            owed: VecDeque::from([(1, since)]),
            rows: rows
                .filter(|key| tracking(key) == Tracking::Full)
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

    /// Notes that the stream ended; ignored if a newer one is open.
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

    /// Notes a change that is about to be sent. Returns its sequence, or none when no stream is open.
    pub fn send(&mut self, droplet: &str, delta: &Delta, now: u64) -> Option<u64> {
        let session = self.sessions.get_mut(droplet)?;
        session.sequence += 1;
        if !delta.keys().all(is_asked_for) {
            session.unasked = session.sequence;
        }
        session.owed.push_back((session.sequence, now));
        let name = session.name.clone();
        for (key, row) in delta {
            let tracking = tracking(key);
            if tracking == Tracking::None {
                continue;
            }
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
            if tracking == Tracking::Full {
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

    /// Notes that the droplet acked everything up to `sequence`. Returns false if the sequence is not of the open
    /// stream or is beyond the last one sent.
    pub fn ack(&mut self, droplet: &str, id: u64, sequence: u64, now: u64) -> bool {
        let lateness = self.lateness(droplet, now);
        let Some(session) = self.sessions.get_mut(droplet).filter(|session| session.id == id) else {
            return false;
        };
        if sequence > session.sequence {
            return false;
        }
        if sequence > session.acked {
            session.acked = sequence;
            let oldest = session.owed.front().map_or(now, |(_, since)| *since);
            let by = now.saturating_sub(oldest).min(ACK_TIMEOUT);
            if by > lateness {
                note(&mut self.late, droplet, Lateness { by, at: now });
            }
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

    /// Notes that the row of this sequence could not be applied: the droplet lacks it until it is sent again. Returns
    /// false if the row was changed since, if it was never sent, or if the sequence is not of the open stream. Of rows
    /// whose changes aren't tracked only the stream is known.
    pub fn nack(&mut self, droplet: &str, id: u64, sequence: u64, key: &Key) -> bool {
        let session = self.sessions.get_mut(droplet).filter(|session| session.id == id);
        let Some(session) = session else {
            return false;
        };
        let sent = match tracking(key) {
            Tracking::Full => session.rows.get_mut(key),
            Tracking::Unacked => session.introduced.get_mut(key),
            Tracking::None => return sequence <= session.sequence,
        };
        let row = sent.filter(|sent| **sent <= sequence);
        row.map(|sent| *sent = u64::MAX).is_some()
    }

    /// Returns how far each open stream has been sent.
    pub fn marks(&self) -> Marks {
        let sessions = self.sessions.values();
        let marks = sessions.map(|session| (session.name.clone(), (session.id, session.sequence)));
        Marks(marks.collect())
    }

    /// Whether the droplet itself has acked everything that was sent when the marks were made, or the snapshot of a
    /// later stream.
    pub fn has_passed(&self, droplet: &str, marks: &Marks) -> bool {
        let Some(session) = self.sessions.get(droplet) else {
            return false;
        };
        match marks.0.get(droplet) {
            Some((id, sequence)) if *id == session.id => session.acked >= *sequence,
            _ => self.is_synced(droplet),
        }
    }

    pub fn is_connected(&self, droplet: &str) -> bool {
        self.sessions.contains_key(droplet)
    }

    /// Whether the droplet may be sent rows of a kind, as far as that is known.
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

    /// Yields the droplets that hold, or may hold, a row with this key although their stream is open. A droplet that
    /// owes acks for too long counts as if it had no stream.
    pub fn holding<'a>(&'a self, key: &'a Key, now: u64) -> impl Iterator<Item = &'a str> {
        let holders = self.holders.of.get(key);
        let unknown = self.holders.unknown.iter();
        unknown
            .filter(move |droplet| holders.is_none_or(|holders| place(holders, droplet).is_err()))
            .chain(holders.into_iter().flatten())
            .map(AsRef::as_ref)
            .filter(move |droplet| !self.is_overdue(droplet, now))
    }

    /// Whether the droplet may hold a row with this key, by all that it has acked itself. It may if it has no stream,
    /// has acked nothing on its stream, or was sent the row or the row's removal and has not acked that the row is
    /// gone.
    pub fn may_hold(&self, droplet: &str, key: &Key) -> bool {
        self.sessions.get(droplet).is_none_or(|session| {
            session.acked == 0 || session.rows.contains_key(key) || session.removed.contains_key(key)
        })
    }

    /// Yields the droplets with an open stream that were told of a droplet and have not acked it.
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

    /// Yields the droplets with an open stream that hold, or may hold, rows of a VPC. A droplet that has acked nothing
    /// and owes acks for too long counts as if it had no stream.
    pub fn holding_vni(&self, vni: Vni, now: u64) -> impl Iterator<Item = &str> {
        let holders = self.holders.numbers.get(&vni);
        let unknown = self.holders.unknown.iter().filter(move |droplet| {
            let is_holder = holders.is_some_and(|holders| holders.contains_key(*droplet));
            !is_holder && !self.is_overdue(droplet, now)
        });
        let holders = holders.into_iter().flat_map(HashMap::keys);
        holders.chain(unknown).map(AsRef::as_ref)
    }

    /// Yields the droplets with an open stream that may not know yet that another droplet is gone. A droplet that owes
    /// acks for too long counts as if it had no stream.
    pub fn forgetting(&self, now: u64) -> impl Iterator<Item = &str> {
        let forgets = |session: &Session| {
            session.acked == 0 || session.removed.keys().any(|key| matches!(key, Key::Droplet(_)))
        };
        self.sessions
            .iter()
            .filter(move |(droplet, session)| forgets(session) && !self.is_overdue(droplet, now))
            .map(|(droplet, _)| droplet.as_str())
    }

    /// Whether the droplet acked all that was sent to it, on a stream that is open. Rows that it asked for don't count:
    /// it could ask for them without end.
    pub fn has_acked_all(&self, droplet: &str) -> bool {
        let session = self.sessions.get(droplet);
        session.is_some_and(|session| session.acked >= session.unasked)
    }

    fn lateness(&self, droplet: &str, now: u64) -> u64 {
        self.late.get(droplet).map_or(0, |late| late.left(now))
    }

    /// Returns since when the droplet owes an ack, of this stream or an earlier one.
    fn owes_since(&self, droplet: &str) -> Option<u64> {
        match self.sessions.get(droplet) {
            Some(session) => session.owed.front().map(|(_, since)| *since),
            None => self.debts.get(droplet).copied(),
        }
    }

    /// Whether the droplet owes an ack for [`ACK_TIMEOUT`]: it counts as lost until it has acked that.
    pub fn is_overdue(&self, droplet: &str, now: u64) -> bool {
        let since = self.owes_since(droplet);
        since.is_some_and(|since| now.saturating_sub(since) >= ACK_TIMEOUT)
    }

    /// Whether the stream must end, because the droplet has left something unacked on it for [`ACK_TIMEOUT`]. A droplet
    /// that dialled again has the whole time again to ack its snapshot.
    pub fn is_silent(&self, droplet: &str, id: u64, now: u64) -> bool {
        let session = self.sessions.get(droplet).filter(|session| session.id == id);
        session.is_some_and(|session| {
            let oldest = session.owed.front();
            oldest.is_some_and(|(_, since)| now.saturating_sub(session.opened.max(*since)) >= ACK_TIMEOUT)
        })
    }

    /// Returns how long the droplet has had no stream on which it acks in time; none while it has one.
    pub fn lost_for(&self, droplet: &str, now: u64) -> Option<u64> {
        if self.is_overdue(droplet, now) {
            return self.owes_since(droplet).map(|since| now.saturating_sub(since));
        }
        let since = self.lost.get(droplet).copied().unwrap_or(self.started);
        (!self.is_connected(droplet)).then(|| now.saturating_sub(since))
    }

    /// Whether droplets may be judged at all: only some time after this operator began to lead, and not while so many
    /// droplets are missing that the fault is likely to be elsewhere. One missing droplet is never too many.
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

fn note(late: &mut HashMap<String, Lateness>, droplet: &str, lateness: Lateness) {
    if let Some(known) = late.get_mut(droplet) {
        *known = lateness;
    } else {
        late.insert(droplet.to_owned(), lateness);
    }
}

/// Whether droplets get the row because they ask for it. Bouncers get a service's row without asking, and always with
/// or after other rows of theirs.
fn is_asked_for(key: &Key) -> bool {
    matches!(key, Key::Direct(..) | Key::Service(..))
}

/// What is remembered of the changes of a row on a stream.
#[derive(PartialEq, Eq)]
enum Tracking {
    /// Its last change for as long as the droplet has it, and its removal until that is acked.
    Full,
    /// Its last change and its removal until they are acked. Every droplet knows every other droplet.
    Unacked,
    /// Nothing. Every droplet of a VPC has all classes and sets of the VPC. The steps of policies wait for all that was
    /// sent before, not for single rows. A droplet that has them also has the row of their VPC for as long.
    None,
}

const fn tracking(key: &Key) -> Tracking {
    match key {
        Key::Droplet(_) => Tracking::Unacked,
        Key::Class(..) | Key::PolicySet(..) => Tracking::None,
        _ => Tracking::Full,
    }
}

#[cfg(test)]
mod tests;
