//! SERVICES, SLOTS, BACKENDS and HOMES: the services of this droplet's VPCs, and fronts, with a mirror of the maps.
//!
//! Invariant: the mirror equals the maps (except the `used` word). An entry of SERVICES stands only while its slots
//! and backends do: they are written before the entry and removed after it. A service keeps its id and a backend its
//! index while they are there, also over restarts, so that connections and affinity find them again. A service that
//! finds no room changes nothing of what stands. A front has a former table, too: by it connections go on that began
//! before a change of its backends.

mod held;
mod marks;
mod port;
mod read_back;
mod wanted;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use thuban_common::services::{
    BackendEntry, BackendKey, FRONTS, HomeEntry, ServiceEntry, ServiceKey, SlotsEntry, SlotsKey,
};
use thuban_common::tables::EndpointKey;
use tracing::info;

use self::held::Address;
pub use self::marks::Marks;
use self::wanted::Target;
pub use self::wanted::Wanted;
use super::misses::Misses;
use super::quota::{Quota, TABLES, Usage};
use super::tables::{Hash, TableError, capacity, hash, insert, take, write_fronted};

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
        if let Some(held) = self.held.get_mut(key) {
            held.service.clone_from(service);
        }
        // From here on packets to ports that aren't served are refused.
        self.write_own(wanted)?;
        self.tell_of_fronts()?;
        let wanted: HashSet<ServiceKey> = ports.iter().map(|port| port.key).collect();
        self.ports_of(key)
            .into_iter()
            .filter(|port| !wanted.contains(port))
            .try_for_each(|port| self.remove_port(key, &port))
    }

    /// Writes the address's own entry, if it is missing or says something else of a front's ports.
    fn write_own(&mut self, wanted: &Wanted) -> Result<(), TableError> {
        let (key, fronted) = (&wanted.key, wanted.fronted_ports());
        let Some(held) = self.held.get_mut(key) else {
            return Ok(());
        };
        if held.has_own && held.fronted_ports == fronted {
            return Ok(());
        }
        let vni = if key.vni == FRONTS { wanted.payer } else { 0 };
        let entry = ServiceEntry::own(vni, fronted);
        insert(&mut self.entries, "SERVICES", own_key(key), entry)?;
        held.fronted_ports = fronted;
        if !std::mem::replace(&mut held.has_own, true) {
            self.quota.add(wanted.payer, Usage::OWN);
            // The count starts from zero after the service has gone again. An old count would delay the announcement.
            self.misses.forget(key)?;
        }
        Ok(())
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
