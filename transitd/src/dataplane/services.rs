//! SERVICES, SLOTS and BACKENDS: the services of this droplet's VPCs, with a mirror of the maps.
//!
//! Invariant: the mirror equals the maps (except the `used` word). An entry of SERVICES stands only while its slots
//! and backends do: they are written before the entry and removed after it. A service keeps its id and a backend its
//! index while they are there, also over restarts, so that connections and affinity find them again. A service that
//! finds no room changes nothing of what stands.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::Ipv6Addr;
use std::path::Path;

use aya::maps::MapError;
use thuban_common::services::{
    BackendEntry, BackendKey, CHUNK, SERVICE_LOCAL, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
};
use thuban_common::tables::EndpointKey;
use thuban_rows::{Port, Service};
use tracing::info;

use super::contract::{backend_entries, key_of, service_key};
use super::maglev;
use super::misses::Misses;
use super::quota::{Quota, TABLES, Usage};
use super::tables::{Hash, TableError, access, capacity, hash, is_missing, take};

/// Flag of an update: writes only an entry that is there (`BPF_EXIST`).
const IS_THERE: u64 = 2;

#[derive(Debug)]
pub struct Services {
    entries: Hash<ServiceKey, ServiceEntry>,
    slots: Hash<SlotsKey, SlotsEntry>,
    backends: Hash<BackendKey, BackendEntry>,
    misses: Misses,
    held: HashMap<EndpointKey, Address>,
    quota: Quota,
    /// Services that found no room. They are tried again when something has been removed.
    waiting: HashMap<EndpointKey, Service>,
    has_more_room: bool,
    ids: HashSet<u32>,
    tables: HashSet<u32>,
    last_id: u32,
    last_table: u32,
}

/// The entries of one address.
#[derive(Debug, Default)]
struct Address {
    /// The address has its own entry (port 0), which says that the address is known.
    has_own: bool,
    ports: HashMap<ServiceKey, Held>,
}

/// A port's entry and its backends by index.
#[derive(Debug)]
struct Held {
    entry: ServiceEntry,
    backends: BTreeMap<u32, BackendEntry>,
}

/// Whether services are used, by marks of agents.
#[derive(Debug)]
pub struct Marks {
    entries: Hash<ServiceKey, ServiceEntry>,
}

impl Marks {
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        let entries = hash(maps, "SERVICES")?;
        Ok(Self { entries })
    }

    /// Whether a new connection used the service since the last call; clears the mark.
    pub fn take(&mut self, key: &EndpointKey) -> Result<bool, TableError> {
        let own = own_key(key);
        let entry = match self.entries.get(&own, 0) {
            Ok(entry) => entry,
            Err(MapError::KeyNotFound) => return Ok(false),
            Err(error) => return Err(access("read", "SERVICES")(error)),
        };
        if entry.used != 0 {
            let cleared = ServiceEntry { used: 0, ..entry };
            match self.entries.insert(own, cleared, IS_THERE) {
                Err(error) if !is_missing(&error) => return Err(access("write", "SERVICES")(error)),
                // The service may have gone meanwhile.
                _ => {}
            }
        }
        Ok(entry.used != 0)
    }
}

impl Services {
    /// Opens the pinned maps, reads back their contents, and removes what no entry leads to.
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        let mut rows = Usage::default();
        for (rows, table) in rows.0.iter_mut().zip(TABLES) {
            *rows = capacity(maps, table)? as usize;
        }
        let mut services = Self {
            entries: hash(maps, "SERVICES")?,
            slots: hash(maps, "SLOTS")?,
            backends: hash(maps, "BACKENDS")?,
            misses: Misses::open(maps)?,
            held: HashMap::new(),
            quota: Quota::new(rows),
            waiting: HashMap::new(),
            has_more_room: false,
            ids: HashSet::new(),
            tables: HashSet::new(),
            last_id: 0,
            last_table: 0,
        };
        services.read_back()?;
        Ok(services)
    }

    /// Returns the addresses that have rows.
    pub fn addresses(&self) -> impl Iterator<Item = &EndpointKey> {
        self.held.keys()
    }

    /// Returns the backends of a port; no backends for a port that its address doesn't have, `None` where the address
    /// is unknown.
    pub fn backends(&self, key: &ServiceKey) -> Option<HashSet<BackendEntry>> {
        let held = self.held.get(&address_of(key)).filter(|held| held.has_own)?;
        let port = held.ports.get(key);
        Some(
            port.map(|port| port.backends.values().copied().collect())
                .unwrap_or_default(),
        )
    }

    /// Returns the VPC of each service's id.
    pub fn vnis(&self) -> HashMap<u32, u32> {
        let ports = self.held.iter().flat_map(|(key, held)| {
            let ids = held.ports.values().map(|port| port.entry.service);
            ids.map(|id| (id, key.vni))
        });
        ports.collect()
    }

    /// Returns the number of rows in each table.
    pub fn rows(&self) -> Usage {
        self.quota.total()
    }

    /// Writes a service. If that fails, what stood before stays, and the service waits for room.
    pub fn set(&mut self, service: &Service) -> Result<(), TableError> {
        let key = key_of(service);
        let held = self.held.get(&key);
        let is_new = held.is_none_or(|held| !held.has_own);
        let old = held.map(Address::rows).unwrap_or_default();
        let written = self
            .quota
            .admit(key.vni, old, Usage::of(service))
            .and_then(|()| self.write(service));
        if written.is_ok() {
            self.waiting.remove(&key);
        } else {
            if is_new {
                // The first error is the one to report.
                let _ = self.remove_rows(&key);
            }
            self.waiting.insert(key, service.clone());
        }
        written
    }

    /// Tries again the services that found no room, if something was removed since.
    pub fn retry(&mut self) {
        if self.waiting.is_empty() || !std::mem::take(&mut self.has_more_room) {
            return;
        }
        for (key, service) in std::mem::take(&mut self.waiting) {
            if self.set(&service).is_ok() {
                let address = Ipv6Addr::from(key.address).to_canonical();
                info!(vni = key.vni, %address, "a service that waited for room has it");
            }
        }
    }

    fn write(&mut self, service: &Service) -> Result<(), TableError> {
        let key = key_of(service);
        self.held.entry(key).or_default();
        for port in &service.ports {
            self.write_port(key, port)?;
        }
        // From here on packets to ports that aren't served are refused.
        let own = own_key(&key);
        let none = ServiceEntry {
            service: 0,
            table: 0,
            slots: 0,
            affinity: 0,
            used: 1,
            flags: 0,
        };
        if self.held.get(&key).is_some_and(|held| !held.has_own) {
            self.entries
                .insert(own, none, 0)
                .map_err(access("write", "SERVICES"))?;
            self.quota.add(key.vni, Usage::OWN);
            if let Some(held) = self.held.get_mut(&key) {
                held.has_own = true;
            }
            // The count starts from zero after the service has gone again. An old count would delay the announcement.
            self.misses.forget(&key)?;
        }
        let wanted = service.ports.iter().map(|port| service_key(key, port));
        let wanted: HashSet<ServiceKey> = wanted.collect();
        self.ports_of(&key)
            .into_iter()
            .filter(|port| !wanted.contains(port))
            .try_for_each(|port| self.remove_port(&key, &port))
    }

    /// Removes a service; missing is success.
    pub fn remove(&mut self, key: &EndpointKey) -> Result<(), TableError> {
        self.waiting.remove(key);
        self.remove_rows(key)
    }

    fn remove_rows(&mut self, key: &EndpointKey) -> Result<(), TableError> {
        // This entry goes first: clients then ask bouncers, who may know better.
        take(&mut self.entries, "SERVICES", &own_key(key))?;
        if let Some(held) = self.held.get_mut(key)
            && std::mem::take(&mut held.has_own)
        {
            self.quota.take(key.vni, Usage::OWN);
            self.has_more_room = true;
        }
        for port in self.ports_of(key) {
            self.remove_port(key, &port)?;
        }
        self.held.remove(key);
        Ok(())
    }

    /// Removes all services but the wanted ones.
    pub fn keep(&mut self, wanted: impl Fn(&EndpointKey) -> bool) -> Result<(), TableError> {
        let stale: Vec<EndpointKey> = self.held.keys().filter(|key| !wanted(key)).copied().collect();
        self.waiting.retain(|key, _| wanted(key));
        stale.iter().try_for_each(|key| self.remove(key))
    }

    fn ports_of(&self, key: &EndpointKey) -> Vec<ServiceKey> {
        let ports = self.held.get(key).map(|held| held.ports.keys().copied());
        ports.into_iter().flatten().collect()
    }

    fn write_port(&mut self, of: EndpointKey, port: &Port) -> Result<(), TableError> {
        let (key, backends) = (service_key(of, port), backend_entries(port));
        let old = self.held.get(&of).and_then(|held| held.ports.get(&key));
        let before: BTreeMap<BackendEntry, u32> = old.map(Held::indexes).unwrap_or_default();
        let is_same = before.keys().eq(backends.iter());
        let flags = if port.local { SERVICE_LOCAL } else { 0 };
        let asked = (port.affinity, flags);
        if old.is_some_and(|old| is_same && (old.entry.affinity, old.entry.flags) == asked) {
            return Ok(());
        }
        let old_entry = old.map(|old| old.entry);
        let service = old_entry.map_or_else(|| next(&mut self.ids, &mut self.last_id), |old| old.service);
        let table = next(&mut self.tables, &mut self.last_table);
        let indexes = indexes(&before, &backends);
        let entry = ServiceEntry {
            service,
            table,
            slots: maglev::size(indexes.len()),
            affinity: port.affinity,
            used: 0,
            flags,
        };
        if let Err(error) = self.write_rows(key, entry, &before, &indexes) {
            // Nothing leads to the slots yet. Those that can't be removed now are removed at the next start.
            let _ = self.remove_slots(table, entry.slots);
            let new = indexes
                .iter()
                .filter(|(backend, _)| !before.contains_key(backend));
            let _ = self.remove_backends(service, new.map(|(_, index)| *index));
            if old_entry.is_none() {
                self.ids.remove(&service);
            }
            return Err(error);
        }
        self.quota.add(of.vni, Usage::of_port(indexes.len()));
        let backends = indexes
            .iter()
            .map(|(backend, index)| (*index, *backend))
            .collect();
        let held = Held { entry, backends };
        self.held.entry(of).or_default().ports.insert(key, held);
        let Some(old) = old_entry else {
            return Ok(());
        };
        self.quota.take(of.vni, Usage::of_port(before.len()));
        self.has_more_room |= indexes.len() < before.len();
        self.remove_slots(old.table, old.slots)?;
        let gone = before
            .iter()
            .filter(|(backend, _)| !indexes.contains_key(backend));
        self.remove_backends(service, gone.map(|(_, index)| *index))
    }

    /// Writes new backends, the table's slots, and the entry that leads to them.
    fn write_rows(
        &mut self,
        key: ServiceKey,
        entry: ServiceEntry,
        before: &BTreeMap<BackendEntry, u32>,
        indexes: &BTreeMap<BackendEntry, u32>,
    ) -> Result<(), TableError> {
        let service = entry.service;
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
        self.write_slots(entry.table, indexes)?;
        self.entries
            .insert(key, entry, 0)
            .map_err(access("write", "SERVICES"))
    }

    fn write_slots(&mut self, table: u32, indexes: &BTreeMap<BackendEntry, u32>) -> Result<(), TableError> {
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
        Ok(())
    }

    fn remove_slots(&mut self, table: u32, slots: u32) -> Result<(), TableError> {
        for chunk in 0..slots.div_ceil(CHUNK as u32) {
            take(&mut self.slots, "SLOTS", &SlotsKey { table, chunk })?;
        }
        self.tables.remove(&table);
        Ok(())
    }

    fn remove_backends(
        &mut self,
        service: u32,
        mut indexes: impl Iterator<Item = u32>,
    ) -> Result<(), TableError> {
        indexes.try_for_each(|index| take(&mut self.backends, "BACKENDS", &BackendKey { service, index }))
    }

    fn remove_port(&mut self, of: &EndpointKey, key: &ServiceKey) -> Result<(), TableError> {
        take(&mut self.entries, "SERVICES", key)?;
        let Some(held) = self.held.get_mut(of).and_then(|held| held.ports.remove(key)) else {
            return Ok(());
        };
        self.quota.take(of.vni, Usage::of_port(held.backends.len()));
        self.has_more_room = true;
        self.remove_slots(held.entry.table, held.entry.slots)?;
        self.remove_backends(held.entry.service, held.backends.into_keys())?;
        self.ids.remove(&held.entry.service);
        Ok(())
    }

    fn read_back(&mut self) -> Result<(), TableError> {
        let mut entries: Vec<(ServiceKey, ServiceEntry)> = Vec::new();
        for entry in &self.entries {
            let (key, entry) = entry.map_err(access("read", "SERVICES"))?;
            let address = self.held.entry(address_of(&key)).or_default();
            if key.port == 0 {
                address.has_own = true;
                self.quota.add(key.vni, Usage::OWN);
            } else {
                self.ids.insert(entry.service);
                self.tables.insert(entry.table);
                entries.push((key, entry));
            }
        }
        self.last_id = self.ids.iter().max().copied().unwrap_or_default();
        self.last_table = self.tables.iter().max().copied().unwrap_or_default();
        let mut backends = self.read_backends(&entries)?;
        for (key, entry) in entries {
            let backends = backends.remove(&entry.service).unwrap_or_default();
            self.quota.add(key.vni, Usage::of_port(backends.len()));
            let held = Held { entry, backends };
            let address = self.held.entry(address_of(&key)).or_default();
            address.ports.insert(key, held);
        }
        Ok(())
    }

    /// Returns the backends of each service by index, as its slots name them. Removes slots and backends that no entry
    /// leads to: they are from a change that was cut short.
    fn read_backends(
        &mut self,
        entries: &[(ServiceKey, ServiceEntry)],
    ) -> Result<HashMap<u32, BTreeMap<u32, BackendEntry>>, TableError> {
        let tables: HashMap<u32, ServiceEntry> =
            entries.iter().map(|(_, entry)| (entry.table, *entry)).collect();
        let mut named: HashMap<u32, HashSet<u16>> = HashMap::new();
        let mut stray_slots = Vec::new();
        for entry in &self.slots {
            let (key, slots) = entry.map_err(access("read", "SLOTS"))?;
            let Some(of) = tables.get(&key.table) else {
                stray_slots.push(key);
                continue;
            };
            let rest = of.slots.saturating_sub(key.chunk * CHUNK as u32);
            let slots = slots.backends.into_iter().take(rest as usize);
            named.entry(of.service).or_default().extend(slots);
        }
        let mut backends: HashMap<u32, BTreeMap<u32, BackendEntry>> = HashMap::new();
        let mut stray_backends = Vec::new();
        for entry in &self.backends {
            let (key, backend) = entry.map_err(access("read", "BACKENDS"))?;
            let index = u16::try_from(key.index).ok();
            let is_named = |named: &HashSet<u16>| index.is_some_and(|index| named.contains(&index));
            if named.get(&key.service).is_some_and(is_named) {
                let of = backends.entry(key.service).or_default();
                of.insert(key.index, backend);
            } else {
                stray_backends.push(key);
            }
        }
        for key in stray_slots {
            take(&mut self.slots, "SLOTS", &key)?;
        }
        for key in stray_backends {
            take(&mut self.backends, "BACKENDS", &key)?;
        }
        Ok(backends)
    }
}

impl Address {
    fn rows(&self) -> Usage {
        let own = if self.has_own {
            Usage::OWN
        } else {
            Usage::default()
        };
        let ports = self
            .ports
            .values()
            .map(|held| Usage::of_port(held.backends.len()));
        ports.fold(own, Usage::plus)
    }
}

impl Held {
    fn indexes(&self) -> BTreeMap<BackendEntry, u32> {
        let pairs = self.backends.iter().map(|(index, backend)| (*backend, *index));
        pairs.collect()
    }
}

fn address_of(key: &ServiceKey) -> EndpointKey {
    EndpointKey {
        vni: key.vni,
        address: key.address,
    }
}

/// Returns the key of the entry that says that the address is known.
fn own_key(key: &EndpointKey) -> ServiceKey {
    ServiceKey {
        vni: key.vni,
        address: key.address,
        port: 0,
        protocol: 0,
        padding: 0,
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

/// Returns the index of each backend: its own, or the least that nobody had. The table that is being replaced keeps
/// its meaning.
fn indexes(
    before: &BTreeMap<BackendEntry, u32>,
    backends: &BTreeSet<BackendEntry>,
) -> BTreeMap<BackendEntry, u32> {
    let taken: HashSet<u32> = before.values().copied().collect();
    let mut free = (0..).filter(|index| !taken.contains(index));
    let own = |backend: &BackendEntry| before.get(backend).copied();
    let mut index = |backend: &BackendEntry| own(backend).or_else(|| free.next()).unwrap_or_default();
    backends
        .iter()
        .map(|backend| (*backend, index(backend)))
        .collect()
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
