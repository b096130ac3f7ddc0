//! The maps in memory, as programs find them.

use std::collections::{BTreeMap, HashMap};

use thuban_common::policy::{BlockKey, Grant, GrantKey, ListEntry, ListKey, Lookups, PortRange, judge};

use super::super::{Change, Usage};
use crate::dataplane::policy::PolicyEntries;

#[derive(Clone, Default)]
pub struct Maps {
    pub grants: HashMap<GrantKey, Grant>,
    /// The entries of each length of prefixes.
    pub blocks: BTreeMap<u32, HashMap<BlockKey, Grant>>,
    pub lists: HashMap<ListKey, ListEntry>,
}

/// What the maps say, whatever numbers the lists have.
#[derive(Debug, PartialEq, Eq)]
pub struct Meaning {
    grants: BTreeMap<GrantKey, (u32, Vec<PortRange>)>,
    blocks: BTreeMap<(BlockKey, u32), Vec<PortRange>>,
}

impl Lookups for Maps {
    fn grant(&self, key: &GrantKey) -> Option<Grant> {
        self.grants.get(key).copied()
    }

    fn block(&self, key: &BlockKey) -> Option<Grant> {
        let mut of_lengths = self.blocks.iter().rev();
        of_lengths.find_map(|(length, of_length)| of_length.get(&first(*key, *length)).copied())
    }

    fn part(&self, key: &ListKey) -> Option<&ListEntry> {
        Some(self.lists.get(key).unwrap_or_else(|| panic!("no {key:?}")))
    }
}

/// Returns the key with zeros behind the prefix.
fn first(key: BlockKey, length: u32) -> BlockKey {
    let kept = u128::MAX.checked_shl(192 - length).unwrap_or(0);
    BlockKey {
        address: (u128::from_be_bytes(key.address) & kept).to_be_bytes(),
        ..key
    }
}

impl Maps {
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Grant(key, Some(grant)) => drop(self.grants.insert(*key, *grant)),
            Change::Grant(key, None) => drop(self.grants.remove(key).expect("a grant")),
            Change::Block(key, length, Some(grant)) => {
                assert_eq!(*key, first(*key, *length), "host bits");
                self.blocks.entry(*length).or_default().insert(*key, *grant);
            }
            Change::Block(key, length, None) => {
                let of_length = self.blocks.get_mut(length).expect("a block");
                of_length.remove(key).expect("a block");
            }
            Change::List(key, Some(entry)) => {
                assert!(self.lists.insert(*key, **entry).is_none(), "lists never change");
            }
            Change::List(key, None) => drop(self.lists.remove(key).expect("a part")),
        }
    }

    pub fn apply_all(&mut self, changes: &[Change]) {
        for change in changes {
            self.apply(change);
        }
    }

    pub fn judge(&self, set: u64, peer: u64, address: [u8; 16], point: u32) -> (bool, u16) {
        judge(self, set, peer, &address, point)
    }

    /// Returns all entries, as the next transitd reads them.
    pub fn entries(&self) -> PolicyEntries {
        let blocks = self.blocks.iter().flat_map(|(length, of_length)| {
            let of_length = of_length.iter();
            of_length.map(|(key, block)| (*key, *length, *block))
        });
        PolicyEntries {
            grants: self.grants.iter().map(|(key, grant)| (*key, *grant)).collect(),
            blocks: blocks.collect(),
            lists: self.lists.iter().map(|(key, entry)| (*key, *entry)).collect(),
        }
    }

    /// Returns the number of entries.
    pub fn usage(&self) -> Usage {
        Usage {
            grants: self.grants.len(),
            blocks: self.blocks.values().map(HashMap::len).sum(),
            lists: self.lists.len(),
        }
    }

    /// Returns what the maps say. Every list must be in order and whole.
    pub fn meaning(&self) -> Meaning {
        let grant = |(key, grant): (&GrantKey, &Grant)| (*key, (grant.flags, self.ranges(grant.list)));
        let blocks = self.blocks.iter().flat_map(|(length, of_length)| {
            let of_length = of_length.iter();
            of_length.map(|(key, block)| ((*key, *length), self.ranges(block.list)))
        });
        Meaning {
            grants: self.grants.iter().map(grant).collect(),
            blocks: blocks.collect(),
        }
    }

    /// Returns the ranges of a list.
    pub fn ranges(&self, list: u32) -> Vec<PortRange> {
        if list == 0 {
            return vec![];
        }
        let mut ranges = vec![];
        let root = self.lists[&ListKey { list, part: 0 }];
        self.walk(list, &root, (0, u32::MAX), &mut ranges);
        for pair in ranges.windows(2) {
            assert!(pair[0].last < pair[1].first, "{pair:?}");
            let is_one = pair[0].last + 1 == pair[1].first && pair[0].decision == pair[1].decision;
            assert!(!is_one, "{pair:?}");
        }
        ranges
    }

    fn walk(&self, list: u32, part: &ListEntry, within: (u32, u32), ranges: &mut Vec<PortRange>) {
        assert!(part.count > 0 && part.count as usize <= part.ranges.len());
        for range in &part.ranges[..part.count as usize] {
            assert!(within.0 <= range.first && range.first <= range.last && range.last <= within.1);
            if part.leads == 0 {
                ranges.push(*range);
                continue;
            }
            let part = self.lists[&ListKey {
                list,
                part: range.decision,
            }];
            self.walk(list, &part, (range.first, range.last), ranges);
        }
    }
}
