//! The contents that a VPC has in use, classes or sets, and their ids.
//!
//! Invariant: an id belongs to one content for as long as it is in use, and for [`REST`] after that: a packet that
//! bears it may still be on its way. A content gets another id when a droplet knows other content under the first one.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use thuban_rows::PolicyId;

use super::sets::{ClassContent, SetContent};

/// How long a row stays after its last use, milliseconds.
pub const REST: u64 = 30_000;
/// The most salts that are tried because droplets refuse ids: a droplet that refuses all of them is wrong, or lies.
const MAX_SALT: u32 = 7;

/// What has an id that follows from it.
pub trait Content: Clone + Eq + Hash {
    /// Returns the id in a VPC where the ids of all smaller salts belong to others.
    fn id(&self, salt: u32) -> PolicyId;
    /// Whether every droplet knows it without a row.
    fn needs_no_row(&self) -> bool;
}

impl Content for ClassContent {
    fn id(&self, salt: u32) -> PolicyId {
        self.id(salt)
    }

    fn needs_no_row(&self) -> bool {
        *self == Self::default()
    }
}

impl Content for SetContent {
    fn id(&self, salt: u32) -> PolicyId {
        self.id(salt)
    }

    fn needs_no_row(&self) -> bool {
        false
    }
}

/// How far droplets know a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Spread {
    /// No droplet is sent it.
    Unsent,
    Sent,
    /// It was sent before the acks that are awaited now.
    Awaited,
    /// All droplets have it.
    Known,
}

#[derive(Debug)]
struct Entry<C> {
    content: Arc<C>,
    spread: Spread,
    salt: u32,
    /// A droplet knows other content under the id: the content has another id, and this one goes when nobody uses it.
    is_refused: bool,
    /// None: it is in use.
    unused_since: Option<u64>,
}

#[derive(Debug)]
pub struct Registry<C> {
    ids: HashMap<Arc<C>, PolicyId>,
    entries: BTreeMap<PolicyId, Entry<C>>,
}

impl<C> Default for Registry<C> {
    fn default() -> Self {
        Self {
            ids: HashMap::new(),
            entries: BTreeMap::new(),
        }
    }
}

impl<C: Content> Registry<C> {
    /// Returns the id that a content has.
    pub fn id(&self, content: &C) -> Option<PolicyId> {
        self.ids.get(content).copied()
    }

    pub fn has(&self, id: PolicyId) -> bool {
        self.entries.contains_key(&id)
    }

    /// Returns the id of a content, which gets one if it has none.
    pub fn intern(&mut self, content: &C) -> PolicyId {
        self.id(content)
            .unwrap_or_else(|| self.add(Arc::new(content.clone())))
    }

    /// Gives a content the id of the first salt that is free.
    fn add(&mut self, content: Arc<C>) -> PolicyId {
        let mut salt = 0;
        let id = loop {
            let id = content.id(salt);
            if !self.entries.contains_key(&id) {
                break id;
            }
            salt += 1;
        };
        let spread = if content.needs_no_row() {
            Spread::Known
        } else {
            Spread::Unsent
        };
        self.ids.insert(Arc::clone(&content), id);
        let entry = Entry {
            content,
            spread,
            salt,
            is_refused: false,
            unused_since: None,
        };
        self.entries.insert(id, entry);
        id
    }

    /// Notes that a droplet knows other content under the id. Returns the id that the content has from now on. None: it
    /// has one already, or too many were refused.
    pub fn refuse(&mut self, id: PolicyId) -> Option<PolicyId> {
        let entry = self.entries.get_mut(&id)?;
        if entry.is_refused || entry.salt >= MAX_SALT || entry.content.needs_no_row() {
            return None;
        }
        entry.is_refused = true;
        let content = Arc::clone(&entry.content);
        self.ids.remove(&content);
        Some(self.add(content))
    }

    pub fn is_refused(&self, id: PolicyId) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.is_refused)
    }

    /// Makes a row of it. Returns whether it had none.
    pub fn send(&mut self, id: PolicyId) -> bool {
        let entry = self.entries.get_mut(&id);
        let unsent = entry.filter(|entry| entry.spread == Spread::Unsent);
        unsent.map(|entry| entry.spread = Spread::Sent).is_some()
    }

    /// Begins to wait until all droplets have the rows that there are now. Returns whether any lacks one, as far as is
    /// known.
    pub fn await_all(&mut self) -> bool {
        let mut waits = false;
        for entry in self.entries.values_mut() {
            if matches!(entry.spread, Spread::Sent | Spread::Awaited) {
                entry.spread = Spread::Awaited;
                waits = true;
            }
        }
        waits
    }

    /// Notes that all droplets have the rows for which [`Self::await_all`] waits.
    pub fn acked(&mut self) {
        for entry in self.entries.values_mut() {
            if entry.spread == Spread::Awaited {
                entry.spread = Spread::Known;
            }
        }
    }

    pub fn is_known(&self, id: PolicyId) -> bool {
        let entry = self.entries.get(&id);
        entry.is_some_and(|entry| entry.spread == Spread::Known && !entry.is_refused)
    }

    /// Notes what is in use, and forgets what has not been for a while. Returns the rows that go.
    pub fn sweep(&mut self, is_used: impl Fn(PolicyId) -> bool, now: u64) -> Vec<PolicyId> {
        let mut gone = Vec::new();
        for (id, entry) in &mut self.entries {
            if is_used(*id) {
                entry.unused_since = None;
                continue;
            }
            let since = *entry.unused_since.get_or_insert(now);
            if entry.spread == Spread::Unsent || now.saturating_sub(since) >= REST {
                gone.push(*id);
            }
        }
        let had_row = |entry: &Entry<C>| entry.spread != Spread::Unsent && !entry.content.needs_no_row();
        gone.retain(|id| {
            let Some(entry) = self.entries.remove(id) else {
                return false;
            };
            if !entry.is_refused {
                self.ids.remove(&entry.content);
            }
            had_row(&entry)
        });
        gone
    }

    /// Whether something waits until it is forgotten.
    pub fn has_unused(&self) -> bool {
        self.entries.values().any(|entry| entry.unused_since.is_some())
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn contents(&self) -> impl Iterator<Item = &C> {
        self.entries.values().map(|entry| &*entry.content)
    }

    /// Returns the content of a row.
    pub fn row(&self, id: PolicyId) -> Option<&C> {
        let entry = self
            .entries
            .get(&id)
            .filter(|entry| entry.spread != Spread::Unsent)?;
        (!entry.content.needs_no_row()).then_some(&*entry.content)
    }

    /// Yields the ids of all rows.
    pub fn rows(&self) -> impl Iterator<Item = PolicyId> {
        let ids = self.entries.keys().copied();
        ids.filter(|id| self.row(*id).is_some())
    }
}

#[cfg(test)]
mod tests {
    use thuban_rows::PolicyId;

    use super::{ClassContent, Content, MAX_SALT, REST, Registry};

    /// All of a kind have the same ids.
    #[derive(Clone, Debug, PartialEq, Eq, Hash)]
    struct Colliding(u32);

    impl Content for Colliding {
        fn id(&self, salt: u32) -> PolicyId {
            PolicyId::new(100 + salt).unwrap()
        }

        fn needs_no_row(&self) -> bool {
            false
        }
    }

    #[test]
    fn contents_with_one_hash_get_ids_of_their_own() {
        let mut registry = Registry::default();
        let ids = [1, 2, 1].map(|number| registry.intern(&Colliding(number)).get());
        assert_eq!(ids, [100, 101, 100]);
        // The second keeps its id when the first has gone, and the first gets none that is taken.
        let second = |id: PolicyId| id.get() == 101;
        assert!(registry.sweep(second, 0).is_empty(), "it had no row");
        assert_eq!(registry.intern(&Colliding(2)).get(), 101);
        assert_eq!(registry.intern(&Colliding(3)).get(), 100);
        assert_eq!(registry.intern(&Colliding(1)).get(), 102);
    }

    #[test]
    fn a_content_whose_id_is_refused_gets_the_next_one() {
        let mut registry = Registry::default();
        let first = registry.intern(&Colliding(1));
        registry.send(first);
        registry.await_all();
        registry.acked();
        assert!(registry.is_known(first) && !registry.is_refused(first));
        let second = registry.refuse(first).unwrap();
        assert_eq!((second.get(), registry.intern(&Colliding(1))), (101, second));
        assert!(registry.is_refused(first) && !registry.is_known(first) && !registry.is_known(second));
        assert_eq!(registry.refuse(first), None, "another droplet says so");
        // Whoever still has the old id keeps its row for as long as it is in use.
        assert!(registry.row(first).is_some());
        assert!(registry.sweep(|id| id != first, 0).is_empty());
        assert_eq!(registry.sweep(|id| id != first, REST), [first]);
        assert_eq!(
            registry.intern(&Colliding(1)),
            second,
            "it isn't forgotten with the old id"
        );
        assert_eq!(registry.intern(&Colliding(2)), first);
    }

    #[test]
    fn a_droplet_that_refuses_all_ids_is_believed_for_a_while() {
        let mut registry = Registry::default();
        let mut id = registry.intern(&Colliding(1));
        let mut count = 0;
        while let Some(next) = registry.refuse(id) {
            (id, count) = (next, count + 1);
        }
        assert_eq!((id.get(), count), (100 + MAX_SALT, MAX_SALT));
        assert!(!registry.is_refused(id));
    }

    #[test]
    fn a_row_rests_before_it_goes() {
        let mut registry = Registry::default();
        let id = registry.intern(&Colliding(1));
        assert!(registry.send(id) && !registry.send(id));
        assert!(registry.sweep(|_| false, 1000).is_empty());
        assert!(
            registry.sweep(|_| true, 1000 + REST).is_empty(),
            "it is used again"
        );
        assert!(registry.sweep(|_| false, 2000 + REST).is_empty());
        assert!(registry.sweep(|_| false, 1999 + 2 * REST).is_empty());
        assert_eq!(registry.sweep(|_| false, 2000 + 2 * REST), [id]);
        assert!(registry.is_empty());
    }

    #[test]
    fn a_row_is_known_when_it_was_sent_before_the_acks() {
        let mut registry = Registry::default();
        let [early, late] = [1, 2].map(|number| registry.intern(&Colliding(number)));
        registry.send(early);
        assert!(registry.await_all());
        registry.send(late);
        registry.acked();
        assert!(registry.is_known(early) && !registry.is_known(late));
        assert!(registry.await_all());
        registry.acked();
        assert!(registry.is_known(late) && !registry.await_all());
    }

    #[test]
    fn the_plain_class_has_no_row() {
        let mut registry = Registry::default();
        let id = registry.intern(&ClassContent::default());
        assert_eq!(id, PolicyId::PLAIN);
        assert!(registry.is_known(id) && !registry.send(id) && registry.rows().next().is_none());
    }
}
