//! The entries of GRANTS, BLOCKS and LISTS, and the changes that bring the maps to them.
//!
//! Invariant: the maps, after each of the changes in their order, have no entry that names a list which isn't whole, no
//! more entries than there is room for, and none of a VPC beyond its share. A quarter of each map is for the reserves
//! of VPCs ([`Shared`]), so that nobody else's rules leave a VPC without any. A list that nobody names stays until its
//! grace is over, because programs may still read it.

mod import;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use thiserror::Error;
use thuban_common::policy::{
    BLOCKS_CAPACITY, BlockKey, GRANTS_CAPACITY, Grant, GrantKey, LISTS_CAPACITY, ListKey,
};

use super::blocks::Prefix;
use super::lists::{Content, parts, tree};
use super::outside::Costs;
use crate::dataplane::policy::{BLOCKS, Change, GRANTS, LISTS};
use crate::dataplane::reserve::Shared;

/// The shares of a map: a VPC may have at most one of them.
pub const SHARES: usize = 4;

/// Why there is no room for a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NoRoom {
    #[error("the VPC has used up its share of table {0}")]
    Share(&'static str),
    #[error("table {0} is full")]
    Table(&'static str),
    /// It is so whatever others have.
    #[error("the set's rules have more ports or blocks than a set may have")]
    Set,
}

/// Lists that no entry names any more. Their grace begins when the changes that came with them are made.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Retired(Vec<Release>);

impl Retired {
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// The end of a list's use, of which each has a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Release {
    list: u32,
    release: u64,
}

/// Entries in each map. A list has an entry for each of its parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub grants: usize,
    pub blocks: usize,
    pub lists: usize,
}

impl Usage {
    pub const CAPACITY: Self = Self {
        grants: GRANTS_CAPACITY as usize,
        blocks: BLOCKS_CAPACITY as usize,
        lists: LISTS_CAPACITY as usize,
    };

    pub const GRANT: Self = Self {
        grants: 1,
        blocks: 0,
        lists: 0,
    };
    const BLOCK: Self = Self {
        grants: 0,
        blocks: 1,
        lists: 0,
    };

    #[must_use]
    pub fn plus(self, more: Self) -> Self {
        self.zip(more, usize::saturating_add)
    }

    const fn of_lists(lists: usize) -> Self {
        Self {
            grants: 0,
            blocks: 0,
            lists,
        }
    }

    fn zip(self, other: Self, by: impl Fn(usize, usize) -> usize) -> Self {
        Self {
            grants: by(self.grants, other.grants),
            blocks: by(self.blocks, other.blocks),
            lists: by(self.lists, other.lists),
        }
    }

    /// Returns the table of which there is less than this, if there is one.
    fn exceeds(self, room: Self) -> Option<&'static str> {
        let mut exceeded = TABLES.into_iter().filter(|(_, of)| of(&self) > of(&room));
        exceeded.next().map(|(name, _)| name)
    }
}

/// A table, and what a usage has of it.
type Table = (&'static str, fn(&Usage) -> usize);

const TABLES: [Table; 3] = [
    (GRANTS, |usage| usage.grants),
    (BLOCKS, |usage| usage.blocks),
    (LISTS, |usage| usage.lists),
];

#[derive(Debug)]
struct List {
    /// The set that used the list first: the list is its VPC's.
    set: u64,
    content: Content,
    /// The parts that it has in the map.
    parts: Range<u32>,
    /// Entries that name the list.
    uses: usize,
    /// The number of its last release.
    released: u64,
}

#[derive(Debug)]
pub struct Store {
    grants: BTreeMap<GrantKey, Grant>,
    /// The list of each prefix of a set.
    blocks: BTreeMap<(u64, Prefix), u32>,
    lists: HashMap<u32, List>,
    numbers: HashMap<(u32, Content), u32>,
    /// Numbers of lists that are gone.
    free: BTreeSet<u32>,
    /// The greatest number that was given.
    last: u32,
    releases: u64,
    capacity: Usage,
    total: Usage,
    of_vpcs: HashMap<u32, Usage>,
    changes: Vec<Change>,
    retired: Retired,
    /// What ingress sets cost nftables. They are not in the maps.
    pub costs: Costs,
    /// Whether entries went since this was set to false.
    pub has_freed: bool,
}

impl Store {
    pub fn new(capacity: Usage) -> Self {
        Self {
            grants: BTreeMap::new(),
            blocks: BTreeMap::new(),
            lists: HashMap::new(),
            numbers: HashMap::new(),
            free: BTreeSet::new(),
            last: 0,
            releases: 0,
            capacity,
            total: Usage::default(),
            of_vpcs: HashMap::new(),
            changes: Vec::new(),
            retired: Retired::default(),
            costs: Costs::default(),
            has_freed: false,
        }
    }

    /// Returns what a VPC may have of each map.
    pub fn share(&self) -> Usage {
        let share = |capacity| capacity / SHARES;
        Usage {
            grants: share(self.capacity.grants),
            blocks: share(self.capacity.blocks),
            lists: share(self.capacity.lists),
        }
    }

    /// Returns the entries that there are.
    pub const fn usage(&self) -> Usage {
        self.total
    }

    /// Returns an error unless the VPC of a set may have so many more entries.
    pub fn admit(&self, set: u64, more: Usage) -> Result<(), NoRoom> {
        let own = self.of_vpcs.get(&vni(set)).copied().unwrap_or_default();
        let room = |limit: Usage, used| limit.zip(used, usize::saturating_sub);
        if let Some(table) = more.exceeds(room(self.share(), own)) {
            return Err(NoRoom::Share(table));
        }
        if let Some(table) = more.exceeds(room(self.capacity, self.total)) {
            return Err(NoRoom::Table(table));
        }
        let (own, total) = (own.plus(more), self.total.plus(more));
        let newcomer = (!self.of_vpcs.contains_key(&vni(set))).then_some(0_usize);
        for (table, of) in TABLES.into_iter().filter(|(_, of)| of(&more) > 0) {
            let held = || self.of_vpcs.values().map(of).chain(newcomer).collect();
            let shared = Shared::quarter_reserved(of(&self.capacity));
            if !shared.admits(of(&own), of(&total), held, of(&self.total)) {
                return Err(NoRoom::Share(table));
            }
        }
        Ok(())
    }

    /// Returns the sets that have entries.
    pub fn sets(&self) -> BTreeSet<u64> {
        let grants = self.grants.keys().map(|key| key.set);
        grants.chain(self.blocks.keys().map(|(set, _)| *set)).collect()
    }

    /// Returns the entries of LISTS that a set must write for a list.
    pub fn parts_of(&self, set: u64, content: &Content) -> usize {
        let is_there = self.numbers.contains_key(&(vni(set), content.clone()));
        if is_there { 0 } else { parts(content.len()) }
    }

    pub fn grant(&self, key: &GrantKey) -> Option<Grant> {
        self.grants.get(key).copied()
    }

    /// Returns the ranges of a list.
    pub fn content(&self, list: u32) -> Content {
        let list = self.lists.get(&list);
        list.map_or_else(|| Content::from([]), |list| list.content.clone())
    }

    /// Returns the peers that a set has grants for, in ascending order.
    pub fn peers(&self, set: u64) -> Vec<u64> {
        let key = |peer| GrantKey { set, peer };
        let grants = self.grants.range(key(0)..=key(u64::MAX));
        grants.map(|(key, _)| key.peer).collect()
    }

    /// Returns the list of a set's prefix.
    pub fn block(&self, set: u64, prefix: Prefix) -> Option<u32> {
        self.blocks.get(&(set, prefix)).copied()
    }

    /// Returns the prefixes of a set from one on, with their lists.
    pub fn blocks(&self, set: u64, from: Prefix) -> impl Iterator<Item = (Prefix, u32)> {
        let blocks = self.blocks.range((set, from)..);
        let blocks = blocks.take_while(move |((of, _), _)| *of == set);
        blocks.map(|((_, prefix), list)| (*prefix, *list))
    }

    pub fn put_grant(&mut self, key: GrantKey, content: &Content, flags: u32) {
        let list = self.intern(key.set, content);
        let grant = Grant { list, flags };
        let old = self.grants.insert(key, grant);
        if old != Some(grant) {
            self.changes.push(Change::Grant(key, Some(grant)));
        }
        match old {
            Some(old) => self.release(old.list),
            None => self.take(key.set, Usage::GRANT),
        }
    }

    pub fn put_flags(&mut self, key: GrantKey, flags: u32) {
        if let Some(grant) = self.grants.get_mut(&key).filter(|grant| grant.flags != flags) {
            grant.flags = flags;
            self.changes.push(Change::Grant(key, Some(*grant)));
        }
    }

    pub fn remove_grant(&mut self, key: GrantKey) {
        if let Some(old) = self.grants.remove(&key) {
            self.changes.push(Change::Grant(key, None));
            self.release(old.list);
            self.give(key.set, Usage::GRANT);
        }
    }

    pub fn put_block(&mut self, set: u64, prefix: Prefix, content: &Content) {
        let list = self.intern(set, content);
        let old = self.blocks.insert((set, prefix), list);
        if old != Some(list) {
            let (key, length) = block_key(set, prefix);
            let grant = Grant { list, flags: 0 };
            self.changes.push(Change::Block(key, length, Some(grant)));
        }
        match old {
            Some(old) => self.release(old),
            None => self.take(set, Usage::BLOCK),
        }
    }

    pub fn remove_block(&mut self, set: u64, prefix: Prefix) {
        if let Some(list) = self.blocks.remove(&(set, prefix)) {
            let (key, length) = block_key(set, prefix);
            self.changes.push(Change::Block(key, length, None));
            self.release(list);
            self.give(set, Usage::BLOCK);
        }
    }

    pub fn remove_blocks(&mut self, set: u64) {
        let blocks: Vec<_> = self.blocks(set, Prefix::ALL).collect();
        for (prefix, _) in blocks {
            self.remove_block(set, prefix);
        }
    }

    /// Returns the number of a list for one more entry of a set.
    fn intern(&mut self, set: u64, content: &Content) -> u32 {
        if content.is_empty() {
            return 0;
        }
        let key = (vni(set), content.clone());
        if let Some(number) = self.numbers.get(&key) {
            if let Some(list) = self.lists.get_mut(number) {
                list.uses += 1;
            }
            return *number;
        }
        let number = self.next_number();
        let entries = tree(content);
        let parts = 0..entries.len() as u32;
        self.take(set, Usage::of_lists(parts.len()));
        for (part, entry) in (0..).zip(entries) {
            let key = ListKey { list: number, part };
            self.changes.push(Change::List(key, Some(Box::new(entry))));
        }
        let list = List {
            set,
            content: content.clone(),
            parts,
            uses: 1,
            released: 0,
        };
        self.lists.insert(number, list);
        self.numbers.insert(key, number);
        number
    }

    /// Returns a number that no list has.
    fn next_number(&mut self) -> u32 {
        self.free.pop_first().unwrap_or_else(|| {
            self.last += 1;
            while self.lists.contains_key(&self.last) {
                self.last += 1;
            }
            self.last
        })
    }

    /// Ends one use of a list.
    fn release(&mut self, number: u32) {
        let Some(list) = self.lists.get_mut(&number) else {
            return;
        };
        list.uses -= 1;
        if list.uses == 0 {
            self.retire(number);
        }
    }

    /// Ends the use of a list that no entry names.
    fn retire(&mut self, number: u32) {
        if let Some(list) = self.lists.get_mut(&number) {
            self.releases += 1;
            list.released = self.releases;
            self.retired.0.push(Release {
                list: number,
                release: self.releases,
            });
        }
    }

    /// Removes the lists that are out of use since their release.
    pub fn expire(&mut self, retired: Retired) {
        for Release {
            list: number,
            release,
        } in retired.0
        {
            let Entry::Occupied(entry) = self.lists.entry(number) else {
                continue;
            };
            if entry.get().uses > 0 || entry.get().released != release {
                continue;
            }
            let List {
                set, content, parts, ..
            } = entry.remove();
            self.give(set, Usage::of_lists(parts.len()));
            let keys = parts.map(|part| ListKey { list: number, part });
            self.changes.extend(keys.map(|key| Change::List(key, None)));
            self.numbers.remove(&(vni(set), content));
            self.free.insert(number);
        }
    }

    fn take(&mut self, set: u64, more: Usage) {
        self.total = self.total.zip(more, |used, more| used + more);
        let own = self.of_vpcs.entry(vni(set)).or_default();
        *own = own.zip(more, |used, more| used + more);
    }

    fn give(&mut self, set: u64, fewer: Usage) {
        self.has_freed = true;
        self.total = self.total.zip(fewer, usize::saturating_sub);
        let own = self.of_vpcs.entry(vni(set)).or_default();
        *own = own.zip(fewer, usize::saturating_sub);
        if *own == Usage::default() {
            self.of_vpcs.remove(&vni(set));
        }
    }

    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.lists.is_empty()
            && self.numbers.is_empty()
            && self.of_vpcs.is_empty()
            && self.total == Usage::default()
    }

    pub fn take_changes(&mut self) -> (Vec<Change>, Retired) {
        (
            std::mem::take(&mut self.changes),
            std::mem::take(&mut self.retired),
        )
    }
}

pub const fn vni(set: u64) -> u32 {
    (set >> 24) as u32
}

fn block_key(set: u64, prefix: Prefix) -> (BlockKey, u32) {
    let key = BlockKey {
        set: set.to_be_bytes(),
        address: prefix.address,
    };
    (key, 64 + u32::from(prefix.length))
}
