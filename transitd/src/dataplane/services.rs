//! SERVICES, SLOTS and BACKENDS: what services of this droplet's VPCs are, with a mirror of what they hold.
//!
//! Invariant: the mirror equals the maps (the `used` word aside). An entry of SERVICES stands only while the slots and
//! backends that it leads to do: they are written before it and taken away after it. A service keeps its id and a backend
//! its index while they are there, also over restarts, so that connections and affinity know them.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::Path;

use aya::maps::MapError;
use thuban_common::services::{
    BackendEntry, BackendKey, CHUNK, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
};
use thuban_common::tables::EndpointKey;

use super::tables::{Hash, TableError, access, hash, take};
use crate::program::maglev;
use crate::program::service::{Port, Service};

#[derive(Debug)]
pub struct Services {
    entries: Hash<ServiceKey, ServiceEntry>,
    slots: Hash<SlotsKey, SlotsEntry>,
    backends: Hash<BackendKey, BackendEntry>,
    /// Ports of each address; the address's own entry is there as long as this one.
    held: HashMap<EndpointKey, HashMap<ServiceKey, Held>>,
    ids: HashSet<u32>,
    tables: HashSet<u32>,
    last_id: u32,
    last_table: u32,
}

/// A port's entry and its backends by index.
#[derive(Debug)]
struct Held {
    entry: ServiceEntry,
    backends: BTreeMap<u32, BackendEntry>,
}

impl Services {
    /// Opens the pinned maps, reads back what they hold, and takes away what nothing leads to.
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        let mut services = Self {
            entries: hash(maps, "SERVICES")?,
            slots: hash(maps, "SLOTS")?,
            backends: hash(maps, "BACKENDS")?,
            held: HashMap::new(),
            ids: HashSet::new(),
            tables: HashSet::new(),
            last_id: 0,
            last_table: 0,
        };
        services.read_back()?;
        Ok(services)
    }

    /// Addresses that have rows.
    pub fn addresses(&self) -> impl Iterator<Item = &EndpointKey> {
        self.held.keys()
    }

    pub fn len(&self) -> usize {
        self.held.values().map(HashMap::len).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Writes a service; if that fails, nothing of it stays.
    pub fn set(&mut self, service: &Service) -> Result<(), TableError> {
        let written = self.write(service);
        if written.is_err() {
            // The first error is the one to tell.
            let _ = self.remove(&service.key);
        }
        written
    }

    fn write(&mut self, service: &Service) -> Result<(), TableError> {
        self.held.entry(service.key).or_default();
        for port in &service.ports {
            self.write_port(service.key, port)?;
        }
        let wanted: HashSet<ServiceKey> = service.ports.iter().map(|port| port.key).collect();
        let gone: Vec<ServiceKey> = self
            .held
            .get(&service.key)
            .map(|ports| {
                ports
                    .keys()
                    .filter(|key| !wanted.contains(key))
                    .copied()
                    .collect()
            })
            .unwrap_or_default();
        // From here on what isn't served is refused.
        let own = own_key(&service.key);
        let none = ServiceEntry {
            service: 0,
            table: 0,
            slots: 0,
            affinity: 0,
            used: 1,
        };
        if matches!(self.entries.get(&own, 0), Err(MapError::KeyNotFound)) {
            self.entries
                .insert(own, none, 0)
                .map_err(access("write", "SERVICES"))?;
        }
        gone.into_iter()
            .try_for_each(|key| self.remove_port(&service.key, &key))
    }

    /// Removes a service; missing is success.
    pub fn remove(&mut self, key: &EndpointKey) -> Result<(), TableError> {
        // First: clients then ask bouncers, who may know better.
        take(&mut self.entries, "SERVICES", &own_key(key))?;
        let ports: Vec<ServiceKey> = self
            .held
            .get(key)
            .map(|ports| ports.keys().copied().collect())
            .unwrap_or_default();
        for port in ports {
            self.remove_port(key, &port)?;
        }
        self.held.remove(key);
        Ok(())
    }

    /// Removes all but these.
    pub fn keep(&mut self, wanted: impl Fn(&EndpointKey) -> bool) -> Result<(), TableError> {
        let stale: Vec<EndpointKey> = self.held.keys().filter(|key| !wanted(key)).copied().collect();
        stale.iter().try_for_each(|key| self.remove(key))
    }

    /// Whether a new connection used the service since the last call; clears the mark.
    pub fn take_used(&mut self, key: &EndpointKey) -> Result<bool, TableError> {
        let own = own_key(key);
        let entry = match self.entries.get(&own, 0) {
            Ok(entry) => entry,
            Err(MapError::KeyNotFound) => return Ok(false),
            Err(error) => return Err(access("read", "SERVICES")(error)),
        };
        if entry.used != 0 {
            let cleared = ServiceEntry { used: 0, ..entry };
            self.entries
                .insert(own, cleared, 0)
                .map_err(access("write", "SERVICES"))?;
        }
        Ok(entry.used != 0)
    }

    fn write_port(&mut self, of: EndpointKey, port: &Port) -> Result<(), TableError> {
        let old = self.held.get(&of).and_then(|ports| ports.get(&port.key));
        let before: BTreeMap<BackendEntry, u32> = old
            .map(|held| {
                held.backends
                    .iter()
                    .map(|(index, backend)| (*backend, *index))
                    .collect()
            })
            .unwrap_or_default();
        let is_same = before.keys().eq(port.backends.iter());
        if old.is_some_and(|old| is_same && old.entry.affinity == port.affinity) {
            return Ok(());
        }
        let (old_entry, service) = (old.map(|old| old.entry), old.map(|old| old.entry.service));
        let service = service.unwrap_or_else(|| next(&mut self.ids, &mut self.last_id));
        let indexes = indexes(&before, &port.backends);
        for (backend, index) in indexes
            .iter()
            .filter(|(backend, _)| !before.contains_key(backend))
        {
            let key = BackendKey {
                service,
                index: *index,
            };
            self.backends
                .insert(key, *backend, 0)
                .map_err(access("write", "BACKENDS"))?;
        }
        let table = next(&mut self.tables, &mut self.last_table);
        let entry = ServiceEntry {
            service,
            table,
            slots: self.write_slots(table, &indexes)?,
            affinity: port.affinity,
            used: 0,
        };
        self.entries
            .insert(port.key, entry, 0)
            .map_err(access("write", "SERVICES"))?;
        let backends = indexes
            .iter()
            .map(|(backend, index)| (*index, *backend))
            .collect();
        let held = Held { entry, backends };
        self.held.entry(of).or_default().insert(port.key, held);
        if let Some(old) = old_entry {
            self.remove_slots(old.table, old.slots)?;
        }
        for (backend, index) in before {
            if !port.backends.contains(&backend) && !indexes.values().any(|taken| *taken == index) {
                take(&mut self.backends, "BACKENDS", &BackendKey { service, index })?;
            }
        }
        Ok(())
    }

    /// Writes the slots of a table; how many.
    fn write_slots(&mut self, table: u32, indexes: &BTreeMap<BackendEntry, u32>) -> Result<u32, TableError> {
        let backends: Vec<BackendEntry> = indexes.keys().copied().collect();
        let places: Vec<u32> = indexes.values().copied().collect();
        let slots = maglev::table(&backends);
        for (chunk, slots) in (0..).zip(slots.chunks(CHUNK)) {
            let mut entry = SlotsEntry { backends: [0; CHUNK] };
            for (to, slot) in entry.backends.iter_mut().zip(slots) {
                *to = places.get(*slot as usize).copied().unwrap_or_default() as u16;
            }
            self.slots
                .insert(SlotsKey { table, chunk }, entry, 0)
                .map_err(access("write", "SLOTS"))?;
        }
        Ok(slots.len() as u32)
    }

    fn remove_slots(&mut self, table: u32, slots: u32) -> Result<(), TableError> {
        for chunk in 0..slots.div_ceil(CHUNK as u32) {
            take(&mut self.slots, "SLOTS", &SlotsKey { table, chunk })?;
        }
        self.tables.remove(&table);
        Ok(())
    }

    fn remove_port(&mut self, of: &EndpointKey, key: &ServiceKey) -> Result<(), TableError> {
        take(&mut self.entries, "SERVICES", key)?;
        let Some(held) = self.held.get_mut(of).and_then(|ports| ports.remove(key)) else {
            return Ok(());
        };
        self.remove_slots(held.entry.table, held.entry.slots)?;
        let service = held.entry.service;
        for index in held.backends.into_keys() {
            take(&mut self.backends, "BACKENDS", &BackendKey { service, index })?;
        }
        self.ids.remove(&service);
        Ok(())
    }

    fn read_back(&mut self) -> Result<(), TableError> {
        let mut backends: HashMap<u32, BTreeMap<u32, BackendEntry>> = HashMap::new();
        for entry in &self.backends {
            let (key, backend) = entry.map_err(access("read", "BACKENDS"))?;
            backends
                .entry(key.service)
                .or_default()
                .insert(key.index, backend);
        }
        for entry in &self.entries {
            let (key, entry) = entry.map_err(access("read", "SERVICES"))?;
            let of = EndpointKey {
                vni: key.vni,
                address: key.address,
            };
            let ports = self.held.entry(of).or_default();
            if key.port == 0 {
                continue;
            }
            self.ids.insert(entry.service);
            self.tables.insert(entry.table);
            let backends = backends.remove(&entry.service).unwrap_or_default();
            ports.insert(key, Held { entry, backends });
        }
        self.last_id = self.ids.iter().max().copied().unwrap_or_default();
        self.last_table = self.tables.iter().max().copied().unwrap_or_default();
        let keys: Result<BTreeSet<_>, _> = self
            .slots
            .keys()
            .map(|key| key.map(|key| (key.table, key.chunk)))
            .collect();
        for (table, chunk) in keys.map_err(access("read", "SLOTS"))? {
            if !self.tables.contains(&table) {
                take(&mut self.slots, "SLOTS", &SlotsKey { table, chunk })?;
            }
        }
        for (service, backends) in backends {
            for index in backends.into_keys() {
                take(&mut self.backends, "BACKENDS", &BackendKey { service, index })?;
            }
        }
        Ok(())
    }
}

/// The entry that says that the address is known.
fn own_key(key: &EndpointKey) -> ServiceKey {
    ServiceKey {
        vni: key.vni,
        address: key.address,
        port: 0,
        protocol: 0,
        padding: 0,
    }
}

/// A number that nobody has, and the next one when asked again, so that what is gone isn't taken for what comes.
fn next(taken: &mut HashSet<u32>, last: &mut u32) -> u32 {
    loop {
        *last = last.wrapping_add(1);
        if taken.insert(*last) {
            return *last;
        }
    }
}

/// The index of each backend: its own, or the least that is free.
fn indexes(
    before: &BTreeMap<BackendEntry, u32>,
    backends: &BTreeSet<BackendEntry>,
) -> BTreeMap<BackendEntry, u32> {
    let kept = backends
        .iter()
        .filter_map(|backend| Some((*backend, *before.get(backend)?)));
    let mut indexes: BTreeMap<BackendEntry, u32> = kept.collect();
    let taken: HashSet<u32> = indexes.values().copied().collect();
    let mut free = (0..).filter(|index| !taken.contains(index));
    for backend in backends {
        indexes
            .entry(*backend)
            .or_insert_with(|| free.next().unwrap_or_default());
    }
    indexes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backend(n: u8) -> BackendEntry {
        BackendEntry {
            address: [n; 16],
            port: 80,
            padding: 0,
        }
    }

    #[test]
    fn backends_keep_their_indexes_and_new_ones_take_what_is_free() {
        let first: BTreeSet<_> = [5, 7, 9].map(backend).into();
        let before = indexes(&BTreeMap::new(), &first);
        assert_eq!(before.values().copied().collect::<Vec<_>>(), [0, 1, 2]);
        let after = indexes(&before, &[1, 5, 9, 11].map(backend).into());
        let index = |n| after.get(&backend(n)).copied();
        assert_eq!((index(5), index(9)), (Some(0), Some(2)));
        assert_eq!((index(1), index(11)), (Some(1), Some(3)));
    }

    #[test]
    fn numbers_are_not_given_again_at_once() {
        let (mut taken, mut last) = (HashSet::from([2]), 0);
        assert_eq!(next(&mut taken, &mut last), 1);
        taken.remove(&1);
        assert_eq!(next(&mut taken, &mut last), 3);
    }
}
