//! SERVICES, SLOTS, BACKENDS and HOMES: the services of this droplet's VPCs, and fronts, with a mirror of the maps.
//!
//! Invariant: the mirror equals the maps (except the `used` word). An entry of SERVICES stands only while its slots
//! and backends do: they are written before the entry and removed after it. A service keeps its id and a backend its
//! index while they are there, also over restarts, so that connections and affinity find them again. A service that
//! finds no room changes nothing of what stands. A front has a former table, too: by it connections go on that began
//! before a change of its backends.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use aya::maps::MapError;
use thuban_common::services::{
    BackendEntry, BackendKey, CHUNK, FRONTS, HomeEntry, SERVICE_LOCAL, ServiceEntry, ServiceKey, SlotsEntry,
    SlotsKey,
};
use thuban_common::tables::{DropletAddress, EndpointKey};
use thuban_rows::{Front, FrontPort, Port, Service};
use tracing::info;

use super::contract::{backend_entry, front_key, key_of, service_key};
use super::maglev;
use super::misses::Misses;
use super::quota::{Quota, TABLES, Usage};
use super::tables::{Hash, TableError, access, capacity, hash, is_missing, put, take, write_fronted};

/// Flag of an update: writes only an entry that is there (`BPF_EXIST`).
const IS_THERE: u64 = 2;

#[derive(Debug)]
pub struct Services {
    entries: Hash<ServiceKey, ServiceEntry>,
    slots: Hash<SlotsKey, SlotsEntry>,
    backends: Hash<BackendKey, BackendEntry>,
    homes: Hash<BackendKey, HomeEntry>,
    /// The folder of the pinned maps.
    maps: PathBuf,
    /// Whether programs look for fronts.
    has_fronts: Option<bool>,
    misses: Misses,
    held: HashMap<EndpointKey, Address>,
    quota: Quota,
    /// Services that found no room. They are tried again when something has been removed.
    waiting: HashMap<EndpointKey, Wanted>,
    has_more_room: bool,
    ids: HashSet<u32>,
    tables: HashSet<u32>,
    last_id: u32,
    last_table: u32,
}

/// What the tables are to say of an address of a service or a front.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub key: EndpointKey,
    /// The VNI of the VPC in whose share the rows count.
    payer: u32,
    ports: Vec<WantedPort>,
    /// Of a front: its service, as `namespace/name`; empty: nobody is told that it is served.
    service: String,
}

#[derive(Clone, Debug)]
struct WantedPort {
    key: ServiceKey,
    affinity: u32,
    flags: u32,
    targets: BTreeSet<Target>,
    /// Those of them that get no new connections.
    resting: BTreeSet<BackendEntry>,
}

/// A backend: in the order of [`BackendEntry`], because a table has each of these once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Target {
    backend: BackendEntry,
    /// Of a front's backend: the VNI of its VPC, and its droplet.
    home: Option<(u32, DropletAddress)>,
}

impl From<&Service> for Wanted {
    fn from(service: &Service) -> Self {
        let key = key_of(service);
        let port = |port: &Port| WantedPort {
            key: service_key(key, port.protocol, port.port),
            affinity: port.affinity,
            flags: if port.local { SERVICE_LOCAL } else { 0 },
            targets: port
                .backends
                .iter()
                .map(|backend| Target {
                    backend: backend_entry(backend),
                    home: None,
                })
                .collect(),
            resting: BTreeSet::new(),
        };
        Self {
            key,
            payer: key.vni,
            ports: service.ports.iter().map(port).collect(),
            service: String::new(),
        }
    }
}

impl From<&Front> for Wanted {
    fn from(front: &Front) -> Self {
        let (key, vni) = (front_key(front.address), front.vni.get());
        let port = |port: &FrontPort| WantedPort {
            key: service_key(key, port.protocol, port.port),
            affinity: port.affinity,
            flags: 0,
            targets: port
                .backends
                .iter()
                .map(|(backend, droplet)| Target {
                    backend: backend_entry(backend),
                    home: Some((vni, droplet.octets())),
                })
                .collect(),
            resting: port
                .backends
                .keys()
                .filter(|backend| port.resting.contains(&backend.address))
                .map(backend_entry)
                .collect(),
        };
        Self {
            key,
            payer: vni,
            ports: front.ports.iter().map(port).collect(),
            service: front.service.clone(),
        }
    }
}

/// The entries of one address.
#[derive(Debug, Default)]
struct Address {
    /// The address has its own entry (port 0), which says that the address is known.
    has_own: bool,
    payer: u32,
    /// See [`Wanted::service`]; empty after a start, until the front is written.
    service: String,
    ports: HashMap<ServiceKey, Held>,
}

/// The tables of a port: the one in use, and of a front the one before the last change of its backends.
#[derive(Debug)]
struct Held {
    now: Table,
    former: Option<Table>,
}

/// A table's entry and its backends by index.
#[derive(Clone, Debug)]
struct Table {
    entry: ServiceEntry,
    targets: BTreeMap<u32, Target>,
    /// Those of them that have no slots, but are still the former backends of some. After a start they are forgotten.
    resting: BTreeSet<BackendEntry>,
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
            homes: hash(maps, "HOMES")?,
            maps: maps.to_owned(),
            has_fronts: None,
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
        services.tell_of_fronts()?;
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
        let targets = held.ports.get(key).map(|port| port.now.targets.values());
        Some(
            targets
                .into_iter()
                .flatten()
                .map(|target| target.backend)
                .collect(),
        )
    }

    /// Returns the addresses of fronts that lead a port to backends, each with its service.
    pub fn fronted(&self) -> BTreeSet<(IpAddr, String)> {
        // What waits for room leads by the table before, as long as a backend of it is wanted.
        let is_wanted = |of: &EndpointKey, key: &ServiceKey, target: &Target| {
            self.waiting.get(of).is_none_or(|wanted| {
                let mut ports = wanted.ports.iter();
                ports.any(|port| port.key == *key && port.targets.contains(target))
            })
        };
        let leads = |of: &EndpointKey, held: &Address| {
            let mut ports = held.ports.iter();
            held.has_own
                && !held.service.is_empty()
                && ports.any(|(key, port)| port.now.targets.values().any(|target| is_wanted(of, key, target)))
        };
        let fronts = self
            .held
            .iter()
            .filter(|(key, held)| key.vni == FRONTS && leads(key, held));
        fronts
            .map(|(key, held)| (Ipv6Addr::from(key.address).to_canonical(), held.service.clone()))
            .collect()
    }

    /// Returns the VPC of each service's id.
    pub fn vnis(&self) -> HashMap<u32, u32> {
        let ports = self.held.iter().flat_map(|(key, held)| {
            let ids = held.ports.values().map(|port| port.now.entry.service);
            ids.map(|id| (id, key.vni))
        });
        ports.collect()
    }

    /// Returns the number of rows in each table.
    pub fn rows(&self) -> Usage {
        self.quota.total()
    }

    /// Writes a service or a front. If that fails, what stood before stays, and the service waits for room.
    pub fn set(&mut self, wanted: impl Into<Wanted>) -> Result<(), TableError> {
        let wanted = wanted.into();
        let key = wanted.key;
        if self.held.get(&key).is_some_and(|held| held.payer != wanted.payer) {
            // The address passes to another VPC.
            self.remove_rows(&key)?;
        }
        let held = self.held.get(&key);
        let is_new = held.is_none_or(|held| !held.has_own);
        let old = held.map(Address::rows).unwrap_or_default();
        let new = wanted.rows(held);
        let written = self
            .quota
            .admit(wanted.payer, old, new)
            .and_then(|()| self.write(&wanted));
        if written.is_ok() {
            self.waiting.remove(&key);
        } else {
            if is_new {
                // The first error is the one to report.
                let _ = self.remove_rows(&key);
            }
            self.waiting.insert(key, wanted);
        }
        written
    }

    /// Tries again the services that found no room, if something was removed since.
    pub fn retry(&mut self) {
        if self.waiting.is_empty() || !std::mem::take(&mut self.has_more_room) {
            return;
        }
        for (key, wanted) in std::mem::take(&mut self.waiting) {
            if self.set(wanted).is_ok() {
                let address = Ipv6Addr::from(key.address).to_canonical();
                info!(vni = key.vni, %address, "a service that waited for room has it");
            }
        }
    }

    fn write(&mut self, wanted: &Wanted) -> Result<(), TableError> {
        let Wanted {
            key,
            payer,
            ports,
            service,
        } = wanted;
        let held = self.held.entry(*key).or_default();
        held.payer = *payer;
        if held.service != *service {
            // Until all ports are the new service's.
            held.service.clear();
        }
        for port in ports {
            self.write_port(*key, port)?;
        }
        // From here on packets to ports that aren't served are refused.
        let own = own_key(key);
        let none = ServiceEntry {
            service: 0,
            table: 0,
            slots: 0,
            affinity: 0,
            used: 1,
            flags: 0,
        };
        if let Some(held) = self.held.get_mut(key) {
            held.service.clone_from(service);
        }
        if self.held.get(key).is_some_and(|held| !held.has_own) {
            put(&mut self.entries, "SERVICES", own, none)?;
            self.quota.add(*payer, Usage::OWN);
            if let Some(held) = self.held.get_mut(key) {
                held.has_own = true;
            }
            // The count starts from zero after the service has gone again. An old count would delay the announcement.
            self.misses.forget(key)?;
        }
        self.tell_of_fronts()?;
        let wanted: HashSet<ServiceKey> = ports.iter().map(|port| port.key).collect();
        self.ports_of(key)
            .into_iter()
            .filter(|port| !wanted.contains(port))
            .try_for_each(|port| self.remove_port(key, &port))
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
            self.quota.take(held.payer, Usage::OWN);
            self.has_more_room = true;
        }
        for port in self.ports_of(key) {
            self.remove_port(key, &port)?;
        }
        self.held.remove(key);
        self.tell_of_fronts()
    }

    /// Removes all services but the wanted ones.
    pub fn keep(&mut self, wanted: impl Fn(&EndpointKey) -> bool) -> Result<(), TableError> {
        let stale: Vec<EndpointKey> = self.held.keys().filter(|key| !wanted(key)).copied().collect();
        self.waiting.retain(|key, _| wanted(key));
        stale.iter().try_for_each(|key| self.remove(key))
    }

    /// Has programs look for fronts, if there are any.
    fn tell_of_fronts(&mut self) -> Result<(), TableError> {
        let has_any = Some(self.held.keys().any(|key| key.vni == FRONTS));
        if self.has_fronts != has_any {
            write_fronted(&self.maps, has_any == Some(true))?;
            self.has_fronts = has_any;
        }
        Ok(())
    }

    fn ports_of(&self, key: &EndpointKey) -> Vec<ServiceKey> {
        let ports = self.held.get(key).map(|held| held.ports.keys().copied());
        ports.into_iter().flatten().collect()
    }

    fn write_port(&mut self, of: EndpointKey, port: &WantedPort) -> Result<(), TableError> {
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
                    put(&mut self.entries, "SERVICES", former_key(&port.key), former.entry)
                }
                None if old_former.is_some() => take(&mut self.entries, "SERVICES", &former_key(&port.key)),
                _ => Ok(()),
            })
            .and_then(|()| put(&mut self.entries, "SERVICES", port.key, new.entry));
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
            Some(former) => put(&mut self.entries, "SERVICES", former_key(&key), former.entry),
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
                put(&mut self.backends, "BACKENDS", at, target.backend)?;
                if let Some(home) = target.home {
                    put(&mut self.homes, "HOMES", at, home_entry(at, key, home))?;
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
            put(&mut self.slots, "SLOTS", SlotsKey { table, chunk }, entry)?;
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

    fn remove_port(&mut self, of: &EndpointKey, key: &ServiceKey) -> Result<(), TableError> {
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

    fn read_back(&mut self) -> Result<(), TableError> {
        let mut entries: HashMap<ServiceKey, ServiceEntry> = HashMap::new();
        for entry in &self.entries {
            let (key, entry) = entry.map_err(access("read", "SERVICES"))?;
            if key.port == 0 {
                self.held.entry(address_of(&key)).or_default().has_own = true;
            } else {
                entries.insert(key, entry);
            }
        }
        // A change that was cut short may have left a former table alone, or have begun with the table in use.
        let is_stray = |key: &ServiceKey| {
            let now = entries.get(&now_key(key));
            key.former != 0
                && now.is_none_or(|now| entries.get(key).is_some_and(|own| own.table == now.table))
        };
        let stray: Vec<ServiceKey> = entries.keys().filter(|key| is_stray(key)).copied().collect();
        for key in stray {
            take(&mut self.entries, "SERVICES", &key)?;
            entries.remove(&key);
        }
        self.ids = entries.values().map(|entry| entry.service).collect();
        self.tables = entries.values().map(|entry| entry.table).collect();
        self.last_id = self.ids.iter().max().copied().unwrap_or_default();
        self.last_table = self.tables.iter().max().copied().unwrap_or_default();
        let mut tables = self.read_tables(&entries)?;
        for key in entries.keys().filter(|key| key.former == 0) {
            let Some(now) = tables.remove(key) else { continue };
            let former = tables.remove(&former_key(key));
            let address = self.held.entry(address_of(key)).or_default();
            address.ports.insert(*key, Held { now, former });
        }
        for (key, address) in &mut self.held {
            address.payer = address.vni().unwrap_or(key.vni);
            let mut rows = if address.has_own {
                Usage::OWN
            } else {
                Usage::default()
            };
            for held in address.ports.values() {
                rows = rows.plus(held.rows(key.vni));
            }
            self.quota.add(address.payer, rows);
        }
        Ok(())
    }

    /// Returns the table of each entry, with the backends that its slots name. Removes slots, backends and homes that
    /// no entry leads to: they are from a change that was cut short.
    fn read_tables(
        &mut self,
        entries: &HashMap<ServiceKey, ServiceEntry>,
    ) -> Result<HashMap<ServiceKey, Table>, TableError> {
        let by_table: HashMap<u32, (&ServiceKey, &ServiceEntry)> = entries
            .iter()
            .map(|(key, entry)| (entry.table, (key, entry)))
            .collect();
        let mut named: HashMap<BackendKey, BTreeSet<u32>> = HashMap::new();
        let mut stray_slots = Vec::new();
        for entry in &self.slots {
            let (key, slots) = entry.map_err(access("read", "SLOTS"))?;
            let Some((_, of)) = by_table.get(&key.table) else {
                stray_slots.push(key);
                continue;
            };
            let rest = of.slots.saturating_sub(key.chunk * CHUNK as u32);
            for index in slots.backends.into_iter().take(rest as usize) {
                let backend = BackendKey {
                    service: of.service,
                    index: index.into(),
                };
                named.entry(backend).or_default().insert(key.table);
            }
        }
        let mut homes = HashMap::new();
        let mut stray = Vec::new();
        for entry in &self.homes {
            let (key, home) = entry.map_err(access("read", "HOMES"))?;
            if named.contains_key(&key) {
                homes.insert(key, (home.vni, home.droplet));
            } else {
                stray.push(key);
            }
        }
        let mut tables: HashMap<ServiceKey, Table> = HashMap::new();
        for (key, entry) in entries {
            let table = Table {
                entry: *entry,
                targets: BTreeMap::new(),
                resting: BTreeSet::new(),
            };
            tables.insert(*key, table);
        }
        for entry in &self.backends {
            let (key, backend) = entry.map_err(access("read", "BACKENDS"))?;
            let target = Target {
                backend,
                home: homes.get(&key).copied(),
            };
            let Some(of) = named.get(&key) else {
                stray.push(key);
                continue;
            };
            for (of, _) in of.iter().filter_map(|table| by_table.get(table)) {
                if let Some(table) = tables.get_mut(*of) {
                    table.targets.insert(key.index, target);
                }
            }
        }
        for key in stray_slots {
            take(&mut self.slots, "SLOTS", &key)?;
        }
        for key in stray {
            take(&mut self.backends, "BACKENDS", &key)?;
            take(&mut self.homes, "HOMES", &key)?;
        }
        Ok(tables)
    }
}

impl Wanted {
    /// Returns the rows that the address is to have, where it has those of `held` now.
    fn rows(&self, held: Option<&Address>) -> Usage {
        let vni = self.key.vni;
        let ports = self.ports.iter().map(|port| {
            let old = held.and_then(|held| held.ports.get(&port.key));
            let former = old.and_then(|old| {
                if old.now.leads_as(port) {
                    old.former.as_ref()
                } else {
                    Some(&old.now)
                }
            });
            rows(vni, port.targets.len(), former.map(|former| former.targets.len()))
        });
        ports.fold(Usage::OWN, Usage::plus)
    }
}

impl From<&Self> for Wanted {
    fn from(wanted: &Self) -> Self {
        wanted.clone()
    }
}

impl Address {
    fn rows(&self) -> Usage {
        let own = if self.has_own {
            Usage::OWN
        } else {
            Usage::default()
        };
        let ports = self.ports.iter().map(|(key, held)| held.rows(key.vni));
        ports.fold(own, Usage::plus)
    }

    /// Returns the VNI of a front's backends.
    fn vni(&self) -> Option<u32> {
        let tables = self.ports.values().flat_map(Held::tables);
        let mut homes = tables.flat_map(|table| table.targets.values().filter_map(|target| target.home));
        homes.next().map(|(vni, _)| vni)
    }
}

impl Held {
    fn tables(&self) -> impl Iterator<Item = &Table> {
        std::iter::once(&self.now).chain(&self.former)
    }

    /// Returns the rows of the tables, of an address in a VPC or of a front.
    fn rows(&self, vni: u32) -> Usage {
        let former = self.former.as_ref().map(|former| former.targets.len());
        rows(vni, self.now.targets.len(), former)
    }

    /// Returns the index of each backend of both tables.
    fn indexes(&self) -> BTreeMap<Target, u32> {
        let both = self.tables().flat_map(|table| &table.targets);
        both.map(|(index, target)| (*target, *index)).collect()
    }
}

impl Table {
    fn targets(&self) -> BTreeSet<Target> {
        self.targets.values().copied().collect()
    }

    /// Whether the table has the backends that a port is to have, and the same of them get no new connections.
    fn leads_as(&self, port: &WantedPort) -> bool {
        self.targets() == port.targets && self.resting == port.resting
    }

    fn indexes(&self) -> impl Iterator<Item = u32> {
        self.targets.keys().copied()
    }

    /// Whether a packet has the same slot of both tables, if they have as many.
    fn hashes_as(&self, other: &Self) -> bool {
        (self.entry.affinity == 0) == (other.entry.affinity == 0)
    }
}

/// Returns the index of the backend of each slot of a table.
fn slots(of: &Table) -> Vec<u16> {
    let places = of.targets.iter();
    let places = places.map(|(index, target)| (target.backend, *index));
    let mut places: Vec<(BackendEntry, u32)> = places
        .filter(|(backend, _)| !of.resting.contains(backend))
        .collect();
    places.sort_unstable();
    let backends: Vec<BackendEntry> = places.iter().map(|(backend, _)| *backend).collect();
    let slots = maglev::table(&backends, of.entry.slots).into_iter();
    let index = |slot: u32| places.get(slot as usize).map_or(0, |(_, index)| *index as u16);
    slots.map(index).collect()
}

/// Returns the rows of a port with so many backends. A front's port has the table before the last change, too. Both
/// count as large as the larger one, so that a change of backends never lacks room.
fn rows(vni: u32, backends: usize, former: Option<usize>) -> Usage {
    if vni == FRONTS {
        let most = Usage::of_front(backends.max(former.unwrap_or_default()));
        most.plus(most)
    } else {
        Usage::of_port(backends)
    }
}

fn home_entry(at: BackendKey, of: ServiceKey, (vni, droplet): (u32, DropletAddress)) -> HomeEntry {
    HomeEntry {
        service: at.service,
        index: at.index,
        vni,
        droplet,
        address: of.address,
        port: of.port,
        protocol: of.protocol,
        padding: [0; 5],
    }
}

fn address_of(key: &ServiceKey) -> EndpointKey {
    EndpointKey {
        vni: key.vni,
        address: key.address,
    }
}

/// Returns the key of the table before the last change.
fn former_key(key: &ServiceKey) -> ServiceKey {
    ServiceKey { former: 1, ..*key }
}

fn now_key(key: &ServiceKey) -> ServiceKey {
    ServiceKey { former: 0, ..*key }
}

/// Returns the key of the entry that says that the address is known.
fn own_key(key: &EndpointKey) -> ServiceKey {
    ServiceKey {
        vni: key.vni,
        address: key.address,
        port: 0,
        protocol: 0,
        former: 0,
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
