//! The entries that an earlier transitd left in the maps.
//!
//! Invariant: a list keeps its number while an entry names it, at whatever change the earlier transitd ended.

use std::collections::BTreeMap;

use thuban_common::policy::{ListEntry, PortRange};

use super::{List, Store, Usage, vni};
use crate::dataplane::policy::PolicyEntries;
use crate::program::policy::blocks::Prefix;
use crate::program::policy::lists::{Content, tree};

/// The parts of a list in the map, by their numbers.
type Parts = BTreeMap<u32, ListEntry>;

impl Store {
    /// Begins with what the maps hold. The grace of lists that no entry names begins with the first changes.
    pub fn import(capacity: Usage, held: PolicyEntries) -> Self {
        let mut store = Self::new(capacity);
        let mut lists: BTreeMap<u32, Parts> = BTreeMap::new();
        for (key, entry) in held.lists {
            lists.entry(key.list).or_default().insert(key.part, entry);
        }
        for (number, parts) in &lists {
            store.import_list(*number, parts);
        }
        for (key, grant) in held.grants {
            store.grants.insert(key, grant);
            store.take(key.set, Usage::GRANT);
            store.import_use(key.set, grant.list);
        }
        for (key, length, grant) in held.blocks {
            let set = u64::from_be_bytes(key.set);
            let prefix = Prefix {
                address: key.address,
                length: length.saturating_sub(u64::BITS) as u8,
            };
            store.blocks.insert((set, prefix), grant.list);
            store.take(set, Usage::BLOCK);
            store.import_use(set, grant.list);
        }
        for (number, parts) in lists {
            match store.lists.get(&number) {
                Some(list) if list.uses == 0 => store.retire(number),
                // What isn't whole is no content that another entry may share.
                Some(list) if is_whole(&list.content, &parts) => {
                    let key = (vni(list.set), list.content.clone());
                    store.numbers.insert(key, number);
                }
                _ => {}
            }
        }
        store
    }

    fn import_list(&mut self, number: u32, parts: &Parts) {
        let (Some(first), Some(last)) = (parts.keys().next(), parts.keys().last()) else {
            return;
        };
        let list = List {
            // Of no VPC, until an entry names it.
            set: 0,
            content: content(parts),
            parts: *first..last + 1,
            uses: 0,
            released: 0,
        };
        self.take(list.set, Usage::of_lists(list.parts.len()));
        self.lists.insert(number, list);
    }

    /// Counts an entry of a set that names a list.
    fn import_use(&mut self, set: u64, number: u32) {
        let Some(list) = self.lists.get_mut(&number) else {
            return;
        };
        list.uses += 1;
        if list.uses == 1 {
            let usage = Usage::of_lists(list.parts.len());
            let before = std::mem::replace(&mut list.set, set);
            self.give(before, usage);
            self.take(set, usage);
        }
    }
}

/// Returns the ranges of a list's parts. The parts that say what is decided are in ascending order.
fn content(parts: &Parts) -> Content {
    let leaves = parts.values().filter(|part| part.leads == 0);
    let ranges = leaves.flat_map(|part| part.ranges.iter().take(part.count as usize).copied());
    ranges.collect::<Vec<PortRange>>().into()
}

fn is_whole(content: &Content, parts: &Parts) -> bool {
    let wanted = (0..).zip(tree(content));
    wanted.eq(parts.iter().map(|(number, part)| (*number, *part)))
}
