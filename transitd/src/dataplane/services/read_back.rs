//! Reads the maps back at a start, and removes what a change that was cut short has left.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use thuban_common::services::{BackendKey, CHUNK, ServiceEntry, ServiceKey};

use super::super::quota::Usage;
use super::super::tables::{TableError, access, take};
use super::held::{Held, Table};
use super::wanted::Target;
use super::{Services, address_of, former_key, now_key};

impl Services {
    pub(super) fn read_back(&mut self) -> Result<(), TableError> {
        let mut entries: HashMap<ServiceKey, ServiceEntry> = HashMap::new();
        for entry in &self.entries {
            let (key, entry) = entry.map_err(access("read", "SERVICES"))?;
            if key.port == 0 {
                let held = self.held.entry(address_of(&key)).or_default();
                held.has_own = true;
                held.fronted_ports = entry.slots;
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
