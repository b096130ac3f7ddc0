//! What the rows of classes and sets mean in GRANTS, BLOCKS and LISTS.
//!
//! Invariant: each call's changes come in an order in which every packet is judged as before the call or as after it,
//! whatever part of them is made. A set without room denies all. Pure: must not touch maps.

mod blocks;
mod compile;
mod entries;
mod lists;
mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use thiserror::Error;
use thuban_api::identifiers::Vni;
use thuban_common::policy::{GRANT_DENIES, GrantKey, PEER_OTHER, PEER_OUTSIDE};
use thuban_rows::{Class, PolicyId, PolicySet};

use blocks::Prefix;
use compile::Set;
use entries::{Entries, key, plain};
use lists::Content;
use store::Store;
pub use store::{Change, Retired, Usage};

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
    full: BTreeSet<(Vni, PolicyId)>,
}

#[derive(Debug, Default)]
struct Vpc {
    classes: BTreeMap<PolicyId, Class>,
    sets: BTreeMap<PolicyId, Set>,
    /// `None`: not known, so that blocks may be anywhere.
    ranges: Option<Vec<Prefix>>,
}

impl Default for PolicyTables {
    fn default() -> Self {
        Self::new(Usage::CAPACITY)
    }
}

impl PolicyTables {
    /// Begins with empty maps that have room for so many entries.
    pub fn new(capacity: Usage) -> Self {
        Self {
            vpcs: BTreeMap::new(),
            store: Store::new(capacity),
            full: BTreeSet::new(),
        }
    }

    /// Puts a class, whose content never changes.
    pub fn put_class(&mut self, class: Class) -> Result<(), PolicyError> {
        let (vni, id) = (class.vni, class.id);
        let result = |is_same: bool| is_same.then_some(()).ok_or(PolicyError::Class { vni, id });
        if id == PolicyId::PLAIN {
            return result(class == plain(vni));
        }
        let vpc = self.vpcs.entry(vni).or_default();
        if let Some(known) = vpc.classes.get(&id) {
            return result(*known == class);
        }
        let is_full = |id| self.full.contains(&(vni, id));
        let sets = vpc.sets.iter().filter(|(id, _)| !is_full(**id));
        let lacking = sets.filter(|(_, set)| entries::add_class(&mut self.store, set, &class).is_err());
        let lacking: Vec<PolicyId> = lacking.map(|(id, _)| *id).collect();
        vpc.classes.insert(id, class);
        for id in lacking {
            self.deny_all(vni, id);
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
        // Sets without room need less now.
        self.store.has_freed = true;
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
            let is_same = *known.row() == row;
            return is_same.then_some(()).ok_or(PolicyError::Set { vni, id });
        }
        vpc.sets.insert(id, Set::new(row));
        self.install(vni, id);
        Ok(())
    }

    /// Removes a set, by which nothing is judged any more.
    pub fn remove_set(&mut self, vni: Vni, id: PolicyId) {
        let Some(vpc) = self.vpcs.get_mut(&vni) else {
            return;
        };
        vpc.sets.remove(&id);
        self.full.remove(&(vni, id));
        let set = key(vni, id);
        for peer in self.store.peers(set) {
            self.store.remove_grant(GrantKey { set, peer });
        }
        self.store.remove_blocks(set);
        self.forget_empty(vni);
    }

    /// Sets the ranges of a VPC; `None` if they aren't known.
    pub fn set_ranges(&mut self, vni: Vni, ranges: Option<&[IpNet]>) {
        let vpc = self.vpcs.entry(vni).or_default();
        vpc.ranges = ranges.map(|ranges| ranges.iter().map(|range| Prefix::from(*range)).collect());
        let is_full = |id| self.full.contains(&(vni, id));
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

    /// Returns the sets that deny all, because a map or their VPC's share of it has no room for them.
    pub fn full(&self) -> impl Iterator<Item = (Vni, PolicyId)> {
        self.full.iter().copied()
    }

    /// Returns the changes that the maps need, in their order, and the lists that are out of use once they are made.
    /// Each call has changes of its own. So packets are judged by what was between two calls, too.
    pub fn flush(&mut self) -> (Vec<Change>, Retired) {
        if std::mem::take(&mut self.store.has_freed) {
            for (vni, id) in self.full.clone() {
                self.install(vni, id);
            }
        }
        self.store.take_changes()
    }

    /// Removes lists whose grace is over: no program that began before the changes runs any more. The next flush has
    /// the changes for it.
    pub fn expire(&mut self, retired: Retired) {
        self.store.expire(retired);
    }

    /// Writes all entries of a set that has none, or that denies all.
    fn install(&mut self, vni: Vni, id: PolicyId) {
        let Some(vpc) = self.vpcs.get(&vni) else {
            return;
        };
        let Some(set) = vpc.sets.get(&id) else {
            return;
        };
        match Entries::new(&self.store, set, &vpc.classes) {
            Ok(entries) => {
                entries.write(&mut self.store, set, vpc.ranges.as_deref());
                self.full.remove(&(vni, id));
            }
            Err(_) => self.deny_all(vni, id),
        }
    }

    /// Makes a set deny all that comes, by the entry of [`PEER_OTHER`] alone.
    fn deny_all(&mut self, vni: Vni, id: PolicyId) {
        self.full.insert((vni, id));
        let set = key(vni, id);
        let key = |peer| GrantKey { set, peer };
        // Without any entry it denies all, too.
        if self.store.grant(&key(PEER_OTHER)).is_some() || self.store.has_room(set, Usage::GRANT) {
            self.store
                .put_grant(key(PEER_OTHER), &Content::from([]), GRANT_DENIES);
        }
        for peer in self.store.peers(set) {
            if peer != PEER_OTHER {
                self.store.remove_grant(key(peer));
            }
        }
        self.store.remove_blocks(set);
    }

    fn forget_empty(&mut self, vni: Vni) {
        let is_empty = |vpc: &Vpc| vpc.classes.is_empty() && vpc.sets.is_empty() && vpc.ranges.is_none();
        if self.vpcs.get(&vni).is_some_and(is_empty) {
            self.vpcs.remove(&vni);
        }
    }
}
