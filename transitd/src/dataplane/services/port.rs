//! Writes and removes the tables of one port: backends and slots before the entry that leads to them, and the other way
//! round.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use thuban_common::services::{
    BackendEntry, BackendKey, CHUNK, FRONTS, HomeEntry, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
};
use thuban_common::tables::{DropletAddress, EndpointKey};

use super::super::maglev;
use super::super::tables::{TableError, access, insert, take};
use super::held::{Held, Table, slots};
use super::wanted::{Target, WantedPort};
use super::{Services, former_key};

impl Services {
    pub(super) fn write_port(&mut self, of: EndpointKey, port: &WantedPort) -> Result<(), TableError> {
        let old = self.held.get(&of).and_then(|held| held.ports.get(&port.key));
        let is_same = old.is_some_and(|old| old.now.leads_as(port));
        let asked = (port.affinity, port.flags);
        if is_same && old.is_some_and(|old| (old.now.entry.affinity, old.now.entry.flags) == asked) {
            return Ok(());
        }
        let known: BTreeMap<Target, u32> = old.map(Held::indexes).unwrap_or_default();
        let (before, mut former) =
            old.map_or((None, None), |old| (Some(old.now.clone()), old.former.clone()));
        let service = before
            .as_ref()
            .map_or_else(|| next(&mut self.ids, &mut self.last_id), |old| old.entry.service);
        let indexes = indexes(&known, &port.targets);
        let new = Table {
            entry: ServiceEntry {
                service,
                table: next(&mut self.tables, &mut self.last_table),
                slots: maglev::size(indexes.len()),
                affinity: port.affinity,
                used: 0,
                flags: port.flags,
            },
            targets: indexes.iter().map(|(target, index)| (*index, *target)).collect(),
            resting: port.resting.clone(),
        };
        let slots = slots(&new);
        let mut stale: Vec<ServiceEntry> = before.iter().map(|old| old.entry).collect();
        let old_former = former.clone();
        let mut former_slots = Vec::new();
        if of.vni == FRONTS
            && let Some(before) = before.as_ref()
            && !(is_same && before.hashes_as(&new))
        {
            stale.extend(old_former.iter().map(|old| old.entry));
            former_slots = self.former_slots(before, old_former.as_ref(), &new, &slots)?;
            let used: BTreeSet<u32> = former_slots.iter().map(|index| u32::from(*index)).collect();
            let targets = known.iter().filter(|(_, index)| used.contains(index));
            // A table without backends led nowhere.
            former = (!used.is_empty()).then(|| Table {
                entry: ServiceEntry {
                    table: next(&mut self.tables, &mut self.last_table),
                    ..before.entry
                },
                targets: targets.map(|(target, index)| (*index, *target)).collect(),
                resting: BTreeSet::new(),
            });
        }
        let written = self
            .write_targets(port.key, &new, &known)
            .and_then(|()| self.write_slots(&new.entry, &slots))
            .and_then(|()| match &former {
                Some(former) if !former_slots.is_empty() => {
                    self.write_slots(&former.entry, &former_slots)?;
                    insert(&mut self.entries, "SERVICES", former_key(&port.key), former.entry)
                }
                None if old_former.is_some() => take(&mut self.entries, "SERVICES", &former_key(&port.key)),
                _ => Ok(()),
            })
            .and_then(|()| insert(&mut self.entries, "SERVICES", port.key, new.entry));
        if let Err(error) = written {
            // Nothing leads to the slots yet. What can't be removed now is removed at the next start.
            let _ = self.restore_former(port.key, old_former.as_ref());
            let _ = self.remove_slots(&new.entry);
            if let Some(former) = former.filter(|_| !former_slots.is_empty()) {
                let _ = self.remove_slots(&former.entry);
            }
            let added = new
                .targets
                .iter()
                .filter(|(_, target)| !known.contains_key(target));
            let _ = self.remove_targets(service, added.map(|(index, _)| *index));
            if before.is_none() {
                self.ids.remove(&service);
            }
            return Err(error);
        }
        let address = self.held.entry(of).or_default();
        let payer = address.payer;
        let used: HashSet<u32> = former
            .iter()
            .flat_map(Table::indexes)
            .chain(new.indexes())
            .collect();
        let held = Held { now: new, former };
        self.quota.add(payer, held.rows(of.vni));
        let Some(old) = address.ports.insert(port.key, held) else {
            return Ok(());
        };
        self.quota.take(payer, old.rows(of.vni));
        self.has_more_room = true;
        stale.iter().try_for_each(|entry| self.remove_slots(entry))?;
        let gone = known.into_values().filter(|index| !used.contains(index));
        self.remove_targets(service, gone)
    }

    /// Returns the slots by which connections go on that began before the change of a table to `new`. A slot that does
    /// not change keeps the backend that it had before an earlier change, as long as the front has that backend.
    fn former_slots(
        &self,
        before: &Table,
        former: Option<&Table>,
        new: &Table,
        slots: &[u16],
    ) -> Result<Vec<u16>, TableError> {
        let mut made = self.read_slots(&before.entry)?;
        let former = former.filter(|former| former.hashes_as(before));
        let former = former.map(|former| self.read_slots(&former.entry)).transpose()?;
        let former = former.filter(|former| former.len() == made.len());
        if made.len() == slots.len()
            && before.hashes_as(new)
            && let Some(former) = former
        {
            for ((slot, now), former) in made.iter_mut().zip(slots).zip(former) {
                if slot == now && new.targets.contains_key(&former.into()) {
                    *slot = former;
                }
            }
        }
        Ok(made)
    }

    fn read_slots(&self, of: &ServiceEntry) -> Result<Vec<u16>, TableError> {
        let mut slots = Vec::with_capacity(of.slots as usize);
        for chunk in 0..of.slots.div_ceil(CHUNK as u32) {
            let key = SlotsKey {
                table: of.table,
                chunk,
            };
            let entry = self.slots.get(&key, 0).map_err(access("read", "SLOTS"))?;
            slots.extend(entry.backends);
        }
        slots.truncate(of.slots as usize);
        Ok(slots)
    }

    /// Has the former table of a port be this one, after a change that failed.
    fn restore_former(&mut self, key: ServiceKey, former: Option<&Table>) -> Result<(), TableError> {
        match former {
            Some(former) => insert(&mut self.entries, "SERVICES", former_key(&key), former.entry),
            None => take(&mut self.entries, "SERVICES", &former_key(&key)),
        }
    }

    /// Writes the backends of a table that are not there.
    fn write_targets(
        &mut self,
        key: ServiceKey,
        table: &Table,
        known: &BTreeMap<Target, u32>,
    ) -> Result<(), TableError> {
        let service = table.entry.service;
        for (index, target) in &table.targets {
            if !known.contains_key(target) {
                let at = BackendKey {
                    service,
                    index: *index,
                };
                insert(&mut self.backends, "BACKENDS", at, target.backend)?;
                if let Some(home) = target.home {
                    let entry = home_entry(at, key, target.backend, home);
                    insert(&mut self.homes, "HOMES", at, entry)?;
                }
            }
        }
        Ok(())
    }

    fn write_slots(&mut self, of: &ServiceEntry, slots: &[u16]) -> Result<(), TableError> {
        let table = of.table;
        for (chunk, slots) in (0..).zip(slots.chunks(CHUNK)) {
            let mut entry = SlotsEntry { backends: [0; CHUNK] };
            for (to, slot) in entry.backends.iter_mut().zip(slots) {
                *to = *slot;
            }
            insert(&mut self.slots, "SLOTS", SlotsKey { table, chunk }, entry)?;
        }
        Ok(())
    }

    fn remove_slots(&mut self, of: &ServiceEntry) -> Result<(), TableError> {
        let table = of.table;
        for chunk in 0..of.slots.div_ceil(CHUNK as u32) {
            take(&mut self.slots, "SLOTS", &SlotsKey { table, chunk })?;
        }
        self.tables.remove(&table);
        Ok(())
    }

    fn remove_targets(
        &mut self,
        service: u32,
        mut indexes: impl Iterator<Item = u32>,
    ) -> Result<(), TableError> {
        indexes.try_for_each(|index| {
            let key = BackendKey { service, index };
            take(&mut self.backends, "BACKENDS", &key)?;
            take(&mut self.homes, "HOMES", &key)
        })
    }

    pub(super) fn remove_port(&mut self, of: &EndpointKey, key: &ServiceKey) -> Result<(), TableError> {
        take(&mut self.entries, "SERVICES", key)?;
        take(&mut self.entries, "SERVICES", &former_key(key))?;
        let Some(address) = self.held.get_mut(of) else {
            return Ok(());
        };
        let payer = address.payer;
        let Some(held) = address.ports.remove(key) else {
            return Ok(());
        };
        self.has_more_room = true;
        let service = held.now.entry.service;
        let indexes = held.indexes();
        self.quota.take(payer, held.rows(of.vni));
        for table in held.tables() {
            self.remove_slots(&table.entry)?;
        }
        self.remove_targets(service, indexes.into_values())?;
        self.ids.remove(&service);
        Ok(())
    }
}

fn home_entry(
    at: BackendKey,
    of: ServiceKey,
    backend: BackendEntry,
    (vni, droplet): (u32, DropletAddress),
) -> HomeEntry {
    HomeEntry {
        service: at.service,
        index: at.index,
        vni,
        droplet,
        address: of.address,
        port: of.port,
        protocol: of.protocol,
        padding: 0,
        backend,
    }
}

/// Returns a number that nobody has, and the next one at the next call, so that a removed service isn't taken for a
/// new one.
fn next(taken: &mut HashSet<u32>, last: &mut u32) -> u32 {
    loop {
        *last = last.wrapping_add(1);
        if taken.insert(*last) {
            return *last;
        }
    }
}

/// Returns the index of each backend: its own, or the least that nobody had. The tables that stay, and the one that is
/// being replaced, keep their meaning.
fn indexes(known: &BTreeMap<Target, u32>, targets: &BTreeSet<Target>) -> BTreeMap<Target, u32> {
    let taken: HashSet<u32> = known.values().copied().collect();
    let mut free = (0..).filter(|index| !taken.contains(index));
    let own = |target: &Target| known.get(target).copied();
    let mut index = |target: &Target| own(target).or_else(|| free.next()).unwrap_or_default();
    targets.iter().map(|target| (*target, index(target))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(n: u8) -> Target {
        let backend = BackendEntry {
            address: [n; 16],
            port: 80,
            padding: 0,
        };
        Target { backend, home: None }
    }

    #[test]
    fn backends_keep_indexes_and_new_ones_get_unused_indexes() {
        let first: BTreeSet<_> = [5, 7, 9].map(backend).into();
        let before = indexes(&BTreeMap::new(), &first);
        assert_eq!(before.values().copied().collect::<Vec<_>>(), [0, 1, 2]);
        let after = indexes(&before, &[1, 5, 9, 11].map(backend).into());
        let index = |n| after.get(&backend(n)).copied();
        assert_eq!((index(5), index(9)), (Some(0), Some(2)));
        assert_eq!((index(1), index(11)), (Some(3), Some(4)));
    }

    #[test]
    fn numbers_are_not_given_again_at_once() {
        let (mut taken, mut last) = (HashSet::from([2]), 0);
        assert_eq!(next(&mut taken, &mut last), 1);
        taken.remove(&1);
        assert_eq!(next(&mut taken, &mut last), 3);
    }
}
