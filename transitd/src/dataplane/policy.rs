//! GRANTS, BLOCKS, LISTS and POLICY: what flows are judged by.
//!
//! Invariant: changes are made in their order, and none while an earlier one could not be made. After changes the epoch
//! is another one, so that programs judge flows anew. Must not decide what entries there should be: `program::policy`
//! does.

use std::collections::VecDeque;
use std::path::Path;

use aya::maps::lpm_trie::Key as LpmKey;
use aya::maps::{Array, LpmTrie, Map, MapData};
use thuban_common::policy::{BlockKey, Grant, GrantKey, ListEntry, ListKey};

use super::tables::{Hash, TableError, access, data, hash, insert, is_missing, open, take};
use super::walk::Walk;

pub const GRANTS: &str = "GRANTS";
pub const BLOCKS: &str = "BLOCKS";
pub const LISTS: &str = "LISTS";
const POLICY: &str = "POLICY";

/// An entry that must be written, or removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    Grant(GrantKey, Option<Grant>),
    /// The prefix counts bits of the whole key.
    Block(BlockKey, u32, Option<Grant>),
    List(ListKey, Option<Box<ListEntry>>),
}

/// What the maps hold, in any order. The prefix of a block counts bits of the whole key.
#[derive(Debug, Default)]
pub struct PolicyEntries {
    pub grants: Vec<(GrantKey, Grant)>,
    pub blocks: Vec<(BlockKey, u32, Grant)>,
    pub lists: Vec<(ListKey, ListEntry)>,
}

pub struct PolicyMaps {
    grants: Hash<GrantKey, Grant>,
    blocks: LpmTrie<MapData, BlockKey, Grant>,
    lists: Hash<ListKey, ListEntry>,
    epoch: Array<MapData, u32>,
    /// Changes that are still to be made, because the first of them failed.
    waiting: VecDeque<Change>,
    /// Whether the epoch is still to be raised.
    is_stale: bool,
}

impl std::fmt::Debug for PolicyMaps {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("PolicyMaps").finish_non_exhaustive()
    }
}

impl PolicyMaps {
    /// Opens the pinned maps. Returns what they hold, too. The first change raises the epoch whatever it is: an earlier
    /// transitd may have ended between its changes and the new epoch.
    pub fn open(maps: &Path) -> Result<(Self, PolicyEntries), TableError> {
        let opened = Self {
            grants: hash(maps, GRANTS)?,
            blocks: LpmTrie::try_from(Map::LpmTrie(data(maps, BLOCKS)?)).map_err(open(BLOCKS))?,
            lists: hash(maps, LISTS)?,
            epoch: Array::try_from(Map::Array(data(maps, POLICY)?)).map_err(open(POLICY))?,
            waiting: VecDeque::new(),
            is_stale: true,
        };
        let mut held = PolicyEntries::default();
        Walk::open(maps, GRANTS)?.each(|key, grant: Grant| {
            held.grants.extend(grant.read(&key).map(|grant| (key, grant)));
            Ok(())
        })?;
        for block in &opened.blocks {
            let (key, grant) = block.map_err(access("read", BLOCKS))?;
            held.blocks.push((key.data(), key.prefix_len(), grant));
        }
        Walk::open(maps, LISTS)?.each(|key, entry| {
            held.lists.push((key, entry));
            Ok(())
        })?;
        Ok((opened, held))
    }

    /// Whether changes wait, because one of them failed.
    pub fn is_behind(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Makes the changes that wait, then these, and has flows judged anew. After an error the rest waits.
    pub fn apply(&mut self, changes: Vec<Change>) -> Result<(), TableError> {
        self.waiting.extend(changes);
        let written = self.write_waiting();
        written.and(self.raise_epoch())
    }

    /// Has flows judged anew, because the class or a set of an attachment has changed.
    pub fn judge_anew(&mut self) -> Result<(), TableError> {
        self.is_stale = true;
        self.raise_epoch()
    }

    fn write_waiting(&mut self) -> Result<(), TableError> {
        while let Some(change) = self.waiting.pop_front() {
            if let Err(error) = self.write(&change) {
                self.waiting.push_front(change);
                return Err(error);
            }
            // What a list says doesn't change while entries name it.
            self.is_stale |= !matches!(change, Change::List(..));
        }
        Ok(())
    }

    fn write(&mut self, change: &Change) -> Result<(), TableError> {
        match change {
            Change::Grant(key, Some(grant)) => insert(&mut self.grants, GRANTS, *key, grant.of(key)),
            Change::Grant(key, None) => take(&mut self.grants, GRANTS, key),
            Change::Block(key, length, Some(grant)) => self
                .blocks
                .insert(&LpmKey::new(*length, *key), *grant, 0)
                .map_err(access("write", BLOCKS)),
            Change::Block(key, length, None) => match self.blocks.remove(&LpmKey::new(*length, *key)) {
                Err(error) if !is_missing(&error) => Err(access("remove from", BLOCKS)(error)),
                _ => Ok(()),
            },
            Change::List(key, Some(entry)) => insert(&mut self.lists, LISTS, *key, **entry),
            Change::List(key, None) => take(&mut self.lists, LISTS, key),
        }
    }

    fn raise_epoch(&mut self) -> Result<(), TableError> {
        if !self.is_stale {
            return Ok(());
        }
        let epoch = self.epoch.get(&0, 0).map_err(access("read", POLICY))?;
        self.epoch
            .set(0, epoch.wrapping_add(1), 0)
            .map_err(access("write", POLICY))?;
        self.is_stale = false;
        Ok(())
    }
}
