//! What the rows of classes and sets mean in GRANTS, BLOCKS and LISTS.
//!
//! Invariant: each call's changes come in an order in which every packet is judged as before the call or as after it,
//! whatever part of them is made. A set without room denies all. If there is room for the set but not for all classes,
//! the classes without an entry are judged as unknown, of which a set accepts no more than of others. Pure: must not
//! touch maps.

mod blocks;
mod compile;
mod denier;
mod entries;
mod former;
mod lists;
mod outside;
mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Bound;
use std::sync::Arc;

use ipnet::IpNet;
use thiserror::Error;
use thuban_api::identifiers::Vni;
use thuban_common::policy::{GrantKey, PEER_OUTSIDE};
use thuban_rows::{Class, PolicyId, PolicySet, RowKey};

pub use crate::dataplane::policy::Change;
use crate::dataplane::policy::PolicyEntries;
use blocks::Prefix;
use compile::{Named, Set};
pub use denier::Denier;
use entries::{Entries, key, plain, shared_service};
use former::Former;
use lists::Contents;
pub use outside::{Outside, Points};
use store::Store;
pub use store::{NoRoom, Retired, Usage};

/// Ranges and rules that a flush looks at for sets that wait for room, so that no VPC keeps the node busy. The set with
/// which it comes to so many is the last one.
const MAX_WORK: usize = 1 << 17;

#[derive(Debug, Error)]
pub enum PolicyError {
    #[error("class {id} of VPC {vni} has other groups or names already; give these another id")]
    Class { vni: Vni, id: PolicyId },
    #[error("set {id} of VPC {vni} has other rules already; give these another id")]
    Set { vni: Vni, id: PolicyId },
}

/// Classes and sets, and the entries that judge by them.
#[derive(Debug)]
pub struct PolicyTables {
    vpcs: BTreeMap<Vni, Vpc>,
    store: Store,
    /// Sets that deny all, because there is no room for them.
    full: BTreeMap<(Vni, PolicyId), NoRoom>,
    /// How often a set came into `full`, or left it.
    full_changes: u64,
    /// Other sets without room for the entries of some classes.
    lacking: BTreeMap<(Vni, PolicyId), NoRoom>,
    /// Sets of both for which there may be room now.
    untried: BTreeSet<(Vni, PolicyId)>,
    /// The last of them that was tried: it is the turn of the next one.
    tried: Option<(Vni, PolicyId)>,
}

#[derive(Debug, Default)]
struct Vpc {
    classes: BTreeMap<PolicyId, Class>,
    sets: BTreeMap<PolicyId, Set>,
    /// `None`: not known, so that blocks may be anywhere.
    ranges: Option<Vec<Prefix>>,
    /// Those of the classes and sets that linger.
    former: Option<Former>,
}

impl Vpc {
    /// Returns what sets name that don't linger.
    fn named(&self) -> Named {
        let lingers = |id: &PolicyId| {
            self.former
                .as_ref()
                .is_some_and(|former| former.sets.contains(id))
        };
        Named::of(
            self.sets
                .iter()
                .filter(|(id, _)| !lingers(id))
                .map(|(_, set)| set),
        )
    }

    /// Takes note that other sets linger than before. Returns those that do: they ask classes otherwise now.
    fn renew_former(&mut self) -> Vec<PolicyId> {
        let is_over = self.former.as_ref().is_none_or(Former::is_over);
        if is_over {
            self.former = None;
            return Vec::new();
        }
        let named = self.named();
        let Some(former) = &mut self.former else {
            return Vec::new();
        };
        former.named_now = named;
        former.sets.iter().copied().collect()
    }

    /// Takes note that a set has come, or lingers no more. Returns the sets that linger, if they ask classes otherwise
    /// now.
    fn note_named(&mut self, id: PolicyId) -> Vec<PolicyId> {
        let (Some(former), Some(set)) = (&mut self.former, self.sets.get(&id)) else {
            return Vec::new();
        };
        let has_more = former.named_now.add(set);
        let lingering = former.sets.iter().copied();
        let lingering: Vec<PolicyId> = lingering.filter(|_| has_more).collect();
        self.end_former();
        lingering
    }

    /// Forgets that something lingered if nothing does any more.
    fn end_former(&mut self) {
        self.former.take_if(|former| former.is_over());
    }
}

impl Default for PolicyTables {
    fn default() -> Self {
        Self::new(Usage::CAPACITY)
    }
}

impl PolicyTables {
    /// Begins with empty maps that have room for so many entries.
    pub fn new(capacity: Usage) -> Self {
        Self::import(capacity, PolicyEntries::default())
    }

    /// Begins with maps that an earlier transitd has filled. Its entries stay until the first rows are here, and those
    /// that the rows ask for stay after that. Ranges and classes must be put before the sets of their VPC, or peers are
    /// unknown for a moment. [`Self::remove_strangers`] ends it.
    pub fn import(capacity: Usage, held: PolicyEntries) -> Self {
        Self {
            vpcs: BTreeMap::new(),
            store: Store::import(capacity, held),
            full: BTreeMap::new(),
            full_changes: 0,
            lacking: BTreeMap::new(),
            untried: BTreeSet::new(),
            tried: None,
        }
    }

    /// Puts a class, whose content never changes.
    pub fn put_class(&mut self, class: Class) -> Result<(), PolicyError> {
        let (vni, id) = (class.vni, class.id);
        let result = |is_same: bool| is_same.then_some(()).ok_or(PolicyError::Class { vni, id });
        let mut rowless = [plain(vni), shared_service(vni)].into_iter();
        if let Some(known) = rowless.find(|rowless| rowless.id == id) {
            return result(class == known);
        }
        let vpc = self.vpcs.entry(vni).or_default();
        if let Some(known) = vpc.classes.get(&id) {
            let is_same = *known == class;
            let former = vpc.former.as_mut().filter(|_| is_same);
            if former.is_some_and(|former| former.classes.remove(&id)) {
                // Sets ask it otherwise now.
                vpc.end_former();
                let sets = vpc.sets.keys();
                self.untried.extend(sets.map(|set| (vni, *set)));
            }
            return result(is_same);
        }
        let is_full = |id| self.full.contains_key(&(vni, id));
        let sets = vpc.sets.iter().filter(|(id, _)| !is_full(**id));
        let lacking = sets.filter_map(|(id, set)| {
            let added = entries::add_class(&mut self.store, set, &class, vpc.former.as_ref());
            Some((*id, added.err()?))
        });
        let lacking: Vec<(PolicyId, NoRoom)> = lacking.collect();
        vpc.classes.insert(id, class);
        for (id, why) in lacking {
            self.lack((vni, id), why);
        }
        Ok(())
    }

    /// Removes a class, which is judged as unknown from then on.
    pub fn remove_class(&mut self, vni: Vni, id: PolicyId) {
        let Some(vpc) = self.vpcs.get_mut(&vni) else {
            return;
        };
        if vpc.classes.remove(&id).is_none() {
            return;
        }
        if let Some(former) = &mut vpc.former {
            former.classes.remove(&id);
            vpc.end_former();
        }
        // They may lack no other class. Full sets need as much as before.
        let lacking = self.lacking.keys().filter(|(of, _)| *of == vni);
        self.untried.extend(lacking.copied());
        for set in vpc.sets.keys() {
            self.store.remove_grant(GrantKey {
                set: key(vni, *set),
                peer: key(vni, id),
            });
        }
        self.forget_empty(vni);
    }

    /// Puts a set, whose content never changes. If there is no room for the set, it denies all: see [`Self::full`].
    pub fn put_set(&mut self, row: PolicySet) -> Result<(), PolicyError> {
        let (vni, id) = (row.vni, row.id);
        let vpc = self.vpcs.entry(vni).or_default();
        if let Some(known) = vpc.sets.get(&id) {
            if *known.row() != row {
                return Err(PolicyError::Set { vni, id });
            }
            let former = vpc.former.as_mut();
            if former.is_some_and(|former| former.sets.remove(&id)) {
                self.untried.insert((vni, id));
                let lingering = vpc.note_named(id);
                self.untried.extend(lingering.into_iter().map(|set| (vni, set)));
            }
            return Ok(());
        }
        vpc.sets.insert(id, Set::new(row));
        let lingering = vpc.note_named(id);
        self.untried.extend(lingering.into_iter().map(|set| (vni, set)));
        self.install(vni, id);
        Ok(())
    }

    /// Takes note of rows that a snapshot doesn't name, before its rows are put. Until they are put again or removed,
    /// packets are judged by them, but never by what a class of one operator does not say to a set of another one.
    pub fn linger(&mut self, vni: Vni, classes: BTreeSet<PolicyId>, sets: BTreeSet<PolicyId>) {
        let Some(vpc) = self.vpcs.get_mut(&vni) else {
            return;
        };
        let has_all = |former: &Former| classes.is_subset(&former.classes) && sets.is_subset(&former.sets);
        if vpc.former.as_ref().is_some_and(has_all) {
            // The same program comes again: what lingers is still of one operator.
            return;
        }
        let named = vpc.named();
        let former = vpc.former.get_or_insert_default();
        former.are_of_several = !former.is_over();
        former.named = if former.are_of_several {
            former.named.intersection(&named)
        } else {
            named
        };
        former.classes.extend(classes);
        former.sets.extend(sets);
        let lingering = vpc.renew_former();
        self.untried.extend(lingering.into_iter().map(|set| (vni, set)));
    }

    /// Removes a set, by which nothing is judged any more.
    pub fn remove_set(&mut self, vni: Vni, id: PolicyId) {
        let Some(vpc) = self.vpcs.get_mut(&vni) else {
            return;
        };
        vpc.sets.remove(&id);
        if let Some(former) = &mut vpc.former {
            if former.sets.remove(&id) {
                vpc.end_former();
            } else {
                vpc.renew_former();
            }
        }
        self.leave_full((vni, id));
        self.lacking.remove(&(vni, id));
        self.untried.remove(&(vni, id));
        entries::remove_all(&mut self.store, key(vni, id));
        self.forget_empty(vni);
    }

    /// Removes the entries of sets that no row is of, because an earlier transitd left them.
    pub fn remove_strangers(&mut self) {
        let vpcs = self.vpcs.iter();
        let known = vpcs.flat_map(|(vni, vpc)| vpc.sets.keys().map(|id| key(*vni, *id)));
        let known: HashSet<u64> = known.collect();
        for set in self.store.sets() {
            if !known.contains(&set) {
                entries::remove_all(&mut self.store, set);
            }
        }
    }

    /// Sets the ranges of a VPC; `None` if they aren't known.
    pub fn set_ranges(&mut self, vni: Vni, ranges: Option<&[IpNet]>) {
        let vpc = self.vpcs.entry(vni).or_default();
        vpc.ranges = ranges.map(|ranges| ranges.iter().map(|range| Prefix::from(*range)).collect());
        let is_full = |id| self.full.contains_key(&(vni, id));
        for (id, set) in vpc.sets.iter().filter(|(id, _)| !is_full(**id)) {
            let own = key(vni, *id);
            let flags = entries::flags_inside(&self.store, set.row(), vpc.ranges.as_deref());
            for peer in self.store.peers(own) {
                if peer != PEER_OUTSIDE {
                    self.store.put_flags(GrantKey { set: own, peer }, flags);
                }
            }
        }
        self.forget_empty(vni);
    }

    /// Returns the sets that deny all, because there is no room for them, and why.
    pub fn full(&self) -> impl Iterator<Item = ((Vni, PolicyId), NoRoom)> {
        self.full.iter().map(|(set, why)| (*set, *why))
    }

    /// Returns a number that is another one whenever other sets are full.
    pub const fn full_changes(&self) -> u64 {
        self.full_changes
    }

    /// Returns the other sets that judge some classes as unknown, because there is no room for their entries, and why.
    pub fn lacking(&self) -> impl Iterator<Item = ((Vni, PolicyId), NoRoom)> {
        self.lacking.iter().map(|(set, why)| (*set, *why))
    }

    /// Returns what denies a packet that a set denies by the rule of a rank, or by none (`NO_RULE`).
    pub fn denier(&self, vni: Vni, id: PolicyId, rank: u16) -> Denier {
        let vpc = self.vpcs.get(&vni);
        match vpc.and_then(|vpc| vpc.sets.get(&id)) {
            Some(set) => Denier::of(set.row(), rank, self.full.contains_key(&(vni, id))),
            None => Denier::Unknown,
        }
    }

    /// Returns what a set accepts of addresses outside of its VPC; `None`: nothing, because it denies all.
    pub fn outside(&self, vni: Vni, id: PolicyId) -> Option<Arc<Outside>> {
        let set = self.vpcs.get(&vni)?.sets.get(&id)?;
        let is_full = self.full.contains_key(&(vni, id));
        (!is_full).then(|| set.outside(self.store.share().lists))?
    }

    /// Returns the keys of the rows of classes and sets that are here.
    pub fn keys(&self) -> impl Iterator<Item = RowKey> {
        self.vpcs.iter().flat_map(|(vni, vpc)| {
            let classes = vpc.classes.keys().map(|id| RowKey::Class(*vni, *id));
            classes.chain(vpc.sets.keys().map(|id| RowKey::PolicySet(*vni, *id)))
        })
    }

    /// Returns the entries that the maps have once all changes are made.
    pub const fn usage(&self) -> Usage {
        self.store.usage()
    }

    /// Tries sets that wait for room, a bounded number of them in turn.
    ///
    /// Returns the changes that the maps need, in their order, and the lists that are out of use once they are made.
    /// Each call has changes of its own. So packets are judged by what was between two calls, too.
    pub fn flush(&mut self) -> (Vec<Change>, Retired) {
        if std::mem::take(&mut self.store.has_freed) {
            let waiting = self.full.iter().chain(&self.lacking);
            // Each of them needs a grant at least.
            let may_fit = |(vni, id)| self.store.admit(key(vni, id), Usage::GRANT).is_ok();
            let waiting = waiting.filter(|(set, why)| **why != NoRoom::Set && may_fit(**set));
            self.untried.extend(waiting.map(|(set, _)| *set));
        }
        let mut work = 0;
        while work < MAX_WORK
            && let Some((vni, id)) = self.next_untried()
        {
            work += self.install(vni, id);
        }
        self.store.take_changes()
    }

    fn next_untried(&mut self) -> Option<(Vni, PolicyId)> {
        let from = self.tried.map_or(Bound::Unbounded, Bound::Excluded);
        let mut behind = self.untried.range((from, Bound::Unbounded));
        let next = behind.next().or_else(|| self.untried.first()).copied()?;
        self.untried.remove(&next);
        self.tried = Some(next);
        Some(next)
    }

    /// Removes lists whose grace is over: no program that began before the changes runs any more. The next flush has
    /// the changes for it.
    pub fn expire(&mut self, retired: Retired) {
        self.store.expire(retired);
    }

    /// Writes all entries of a set that lacks some, that denies all, or that an earlier transitd had. Returns the
    /// ranges and rules that were looked at.
    fn install(&mut self, vni: Vni, id: PolicyId) -> usize {
        let Some(vpc) = self.vpcs.get(&vni) else {
            return 0;
        };
        let Some(set) = vpc.sets.get(&id) else {
            return 0;
        };
        let store = &mut self.store;
        let mut contents = Contents::new(store.share().lists);
        contents.work = set.row().rules.len() + vpc.classes.len();
        let entries = Entries::new(store, set, &vpc.classes, vpc.former.as_ref(), &mut contents);
        let written = entries.and_then(|mut entries| {
            if entries.would_mix(store) {
                entries::deny_all(store, key(vni, id));
            }
            let lacking = entries.admit(store)?;
            entries.write(store, set, vpc.ranges.as_deref());
            Ok(lacking)
        });
        self.lacking.remove(&(vni, id));
        match written {
            Ok(lacking) => {
                self.leave_full((vni, id));
                if let Some(why) = lacking {
                    self.lack((vni, id), why);
                }
            }
            Err(why) => self.deny_all(vni, id, why),
        }
        contents.work
    }

    fn deny_all(&mut self, vni: Vni, id: PolicyId, why: NoRoom) {
        let is_new = self.full.insert((vni, id), why).is_none();
        self.full_changes += u64::from(is_new);
        entries::deny_all(&mut self.store, key(vni, id));
    }

    fn leave_full(&mut self, set: (Vni, PolicyId)) {
        let was_full = self.full.remove(&set).is_some();
        self.full_changes += u64::from(was_full);
    }

    /// Notes that a set has no room for a class. What others free may be enough for one class, if not for each.
    fn lack(&mut self, set: (Vni, PolicyId), why: NoRoom) {
        let known = self.lacking.entry(set).or_insert(why);
        if *known == NoRoom::Set {
            *known = why;
        }
    }

    fn forget_empty(&mut self, vni: Vni) {
        let is_empty = |vpc: &Vpc| vpc.classes.is_empty() && vpc.sets.is_empty() && vpc.ranges.is_none();
        if self.vpcs.get(&vni).is_some_and(is_empty) {
            self.vpcs.remove(&vni);
        }
    }
}
