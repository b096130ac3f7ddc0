//! Classes and sets of network policy: from rows to the maps.
//!
//! Invariant: a set's entries are in the maps before an attachment names the set, and go after that. A list that was
//! in use goes only when no program that may still read it runs. What a snapshot doesn't name stays for a while,
//! because other droplets get theirs later: their packets still name classes and sets that an earlier operator told of.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use thuban_api::identifiers::Vni;
use thuban_rows::{Kept, PolicyId, Row, RowKey};

use super::State;
use super::apply::{Applying, Upsert};
use crate::dataplane::policy::{BLOCKS, GRANTS, LISTS, PolicyMaps};
use crate::dataplane::tables::{TableError, capacity};
use crate::metrics;
use crate::program::policy::{Denier, NoRoom, Outside, PolicyError, PolicyTables, Retired, Usage};

/// How long a list that no entry names any more stays. A program that found the entry before runs for far less.
const GRACE: Duration = Duration::from_secs(1);
/// How long classes and sets stay that a snapshot doesn't name, from the time when no attachment keeps any.
pub const LINGER: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub struct Policies {
    tables: PolicyTables,
    maps: PolicyMaps,
    /// Lists that are out of use, and since when no entry in the maps names them.
    retired: Vec<(Instant, Retired)>,
    /// Sets that lack room of which the operator was told.
    refused: BTreeSet<RowKey>,
    /// Rows that no snapshot named, and since when.
    lingering: BTreeMap<RowKey, Instant>,
    /// When the sets of an earlier transitd were to go.
    strangers: Option<Instant>,
}

impl Policies {
    /// Opens the pinned maps. What they hold stays until the first snapshot.
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        let entries = |name| capacity(maps, name).map(|entries| entries as usize);
        let room = Usage {
            grants: entries(GRANTS)?,
            blocks: entries(BLOCKS)?,
            lists: entries(LISTS)?,
        };
        let (maps, held) = PolicyMaps::open(maps)?;
        let mut opened = Self {
            tables: PolicyTables::import(room, held),
            maps,
            retired: Vec::new(),
            refused: BTreeSet::new(),
            lingering: BTreeMap::new(),
            strangers: None,
        };
        opened.write()?;
        Ok(opened)
    }

    /// Puts a class or a set; other rows are none of these tables.
    pub fn set(&mut self, row: Row) -> Result<(), PolicyError> {
        let key = row.key();
        match row {
            Row::Class(class) => self.tables.put_class(class),
            Row::PolicySet(set) => self.tables.put_set(set),
            _ => Ok(()),
        }?;
        // What is refused has other content than what lingers, which goes in its time.
        self.lingering.remove(&key);
        Ok(())
    }

    /// Removes a class or a set. With a VPC's row its ranges go.
    pub fn remove(&mut self, key: &RowKey) {
        self.lingering.remove(key);
        match key {
            RowKey::Class(vni, id) => self.tables.remove_class(*vni, *id),
            RowKey::PolicySet(vni, id) => self.tables.remove_set(*vni, *id),
            RowKey::Vpc(vni) => self.tables.set_ranges(*vni, None),
            _ => {}
        }
    }

    /// Takes note of classes and sets that a snapshot doesn't name, which are removed after a while. Returns the other
    /// keys.
    pub fn linger<'a>(&mut self, unnamed: &'a [RowKey]) -> Vec<&'a RowKey> {
        let now = Instant::now();
        let mut others = Vec::new();
        let mut of_vpcs: BTreeMap<Vni, [BTreeSet<PolicyId>; 2]> = BTreeMap::new();
        for key in unnamed {
            let (vni, kind, id) = match key {
                RowKey::Class(vni, id) => (*vni, 0, *id),
                RowKey::PolicySet(vni, id) => (*vni, 1, *id),
                _ => {
                    others.push(key);
                    continue;
                }
            };
            of_vpcs.entry(vni).or_default()[kind].insert(id);
            self.lingering.entry(key.clone()).or_insert(now);
        }
        for (vni, [classes, sets]) in of_vpcs {
            self.tables.linger(vni, classes, sets);
        }
        self.strangers.get_or_insert(now);
        others
    }

    /// Removes what has lingered for long enough. `is_kept`: attachments keep what an earlier operator told of.
    pub fn end_lingering(&mut self, is_kept: bool, now: Instant) {
        if is_kept {
            self.lingering.values_mut().for_each(|since| *since = now);
            self.strangers = self.strangers.map(|_| now);
            return;
        }
        let is_over = |since: &mut Instant| now.saturating_duration_since(*since) >= LINGER;
        let over = self.lingering.extract_if(.., |_, since| is_over(since));
        let over: Vec<RowKey> = over.map(|(key, _)| key).collect();
        for key in over {
            self.remove(&key);
        }
        if self.strangers.take_if(is_over).is_some() {
            self.remove_strangers();
        }
    }

    /// Removes the sets of an earlier transitd that are not here.
    pub fn remove_strangers(&mut self) {
        self.tables.remove_strangers();
    }

    pub fn set_ranges(&mut self, vni: Vni, ranges: &[IpNet]) {
        self.tables.set_ranges(vni, Some(ranges));
    }

    /// Returns the keys of the rows of classes and sets that are here.
    pub fn keys(&self) -> impl Iterator<Item = RowKey> {
        self.tables.keys()
    }

    /// Returns what denies a packet that a set denies by the rule of a rank, or by none.
    pub fn denier(&self, vni: Vni, set: PolicyId, rank: u16) -> Denier {
        self.tables.denier(vni, set, rank)
    }

    /// Returns what a set accepts of addresses outside of its VPC; `None`: nothing, because it denies all.
    pub fn outside(&self, vni: Vni, set: PolicyId) -> Option<Arc<Outside>> {
        self.tables.outside(vni, set)
    }

    /// Returns the entries of GRANTS, BLOCKS and LISTS.
    pub fn usage(&self) -> Usage {
        self.tables.usage()
    }

    /// Writes what has changed since the last call, and what could not be written then.
    pub fn write(&mut self) -> Result<(), TableError> {
        let was_behind = self.maps.is_behind();
        let (changes, retired) = self.tables.flush();
        let written = self.maps.apply(changes);
        let now = Instant::now();
        if was_behind {
            // Until now entries may have named these lists.
            self.retired.iter_mut().for_each(|(since, _)| *since = now);
        }
        if !retired.is_empty() {
            self.retired.push((now, retired));
        }
        written
    }

    /// Has flows judged anew, because the class or a set of an attachment has changed.
    pub fn judge_anew(&mut self) -> Result<(), TableError> {
        self.maps.judge_anew()
    }

    /// Removes lists whose grace is over, and writes what could not be written before.
    pub fn expire(&mut self) -> Result<(), TableError> {
        if !self.maps.is_behind() {
            let is_over = |(since, _): &mut (Instant, Retired)| since.elapsed() >= GRACE;
            for (_, retired) in self.retired.extract_if(.., is_over) {
                self.tables.expire(retired);
            }
        }
        self.write()
    }

    /// Returns the sets that lack room of which the operator is to be told: those that it has just sent, and those that
    /// had room before.
    pub fn refused(&mut self, sent: &BTreeSet<RowKey>) -> Vec<(RowKey, NoRoom)> {
        let full: Vec<_> = self
            .tables
            .full()
            .chain(self.tables.lacking())
            .map(|((vni, id), why)| (RowKey::PolicySet(vni, id), why))
            .collect();
        let now = full.iter().map(|(key, _)| key.clone()).collect();
        let before = std::mem::replace(&mut self.refused, now);
        let is_untold = |(key, _): &(RowKey, NoRoom)| sent.contains(key) || !before.contains(key);
        full.into_iter().filter(is_untold).collect()
    }
}

impl State {
    /// Takes the rows of classes and sets out of `rows` and writes them, with the ranges of VPCs. Returns the keys of
    /// all of these rows, and those of `deletes` to remove. What a snapshot doesn't name begins to linger instead.
    pub(super) fn put_policies<'a>(
        &mut self,
        rows: &mut Vec<Upsert>,
        deletes: &'a [RowKey],
        applying: &mut Applying,
    ) -> (BTreeSet<RowKey>, Vec<&'a RowKey>) {
        let removed = if applying.changes.is_all {
            self.policies.linger(deletes)
        } else {
            deletes.iter().collect()
        };
        let began = Instant::now();
        let mut sent = BTreeSet::new();
        for (_, row) in rows.iter() {
            if let Row::Vpc(vpc) = row {
                self.policies.set_ranges(vpc.vni, &vpc.cidrs);
                sent.insert(row.key());
            }
        }
        // A set without the classes that it judges would take their endpoints for unknown ones.
        let classes = rows.extract_if(.., |(_, row)| matches!(row, Row::Class(_)));
        let mut policies: Vec<Upsert> = classes.collect();
        policies.extend(rows.extract_if(.., |(_, row)| matches!(row, Row::PolicySet(_))));
        let has_policies = !policies.is_empty();
        for (key, row) in policies {
            sent.insert(row.key());
            if let Err(error) = self.policies.set(row) {
                applying.refuse(key, error);
            }
        }
        self.write_policies(applying);
        if has_policies {
            metrics::policies_compiled(began.elapsed());
        }
        (sent, removed)
    }

    /// Removes the rows of classes and sets that [`Self::put_policies`] returned, now that no attachment names them.
    /// Refuses sets without room. `sent`: the rows that came.
    pub(super) fn remove_policies(
        &mut self,
        removed: &[&RowKey],
        sent: &BTreeSet<RowKey>,
        applying: &mut Applying,
    ) {
        for key in removed.iter().filter(|key| !sent.contains(**key)) {
            self.policies.remove(key);
        }
        self.write_policies(applying);
        for (key, why) in self.policies.refused(sent) {
            applying.refuse(Some((&key).into()), why);
        }
    }

    /// Does what [`Policies::expire`] does, and ends what lingers. The rules are due if a set finds room.
    pub fn expire_policies(&mut self) -> Result<(), TableError> {
        let is_kept = self.program.vpcs().any(|vpc| vpc.kept != Kept::Nothing);
        self.policies.end_lingering(is_kept, Instant::now());
        self.note_full_sets(Policies::expire)
    }

    /// The rules of the node's stack say what sets accept, but nothing of those that deny all.
    fn note_full_sets<T>(&mut self, write: impl FnOnce(&mut Policies) -> T) -> T {
        let before = self.policies.tables.full_changes();
        let written = write(&mut self.policies);
        if self.policies.tables.full_changes() != before {
            self.rules.change();
        }
        written
    }

    fn write_policies(&mut self, applying: &mut Applying) {
        if let Err(error) = self.note_full_sets(Policies::write) {
            // The nack has no key: nobody knows which rows are in the maps.
            applying.refuse(None, error);
        }
    }
}
