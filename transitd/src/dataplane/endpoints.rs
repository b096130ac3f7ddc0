//! ENDPOINTS: rows of five kinds, of which those with the same address share an entry.
//!
//! Invariant: no kind has more rows than its part of the table, so that no kind takes another one's room.

use std::collections::HashMap;
use std::path::Path;

use thuban_common::tables::{
    self, DropletAddress, EndpointEntry, EndpointKey, LocalEntry, NO_DROPLET, RemoteRow,
};

use super::tables::{Hash, TableError, access, hash, lookup, take};

const ENDPOINTS: &str = "ENDPOINTS";

/// A kind of row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    Local,
    Remote(RemoteRow),
}

/// Every kind of row.
const KINDS: [Kind; 5] = [
    Kind::Local,
    Kind::Remote(RemoteRow::Direct),
    Kind::Remote(RemoteRow::Bouncer),
    Kind::Remote(RemoteRow::Forward),
    Kind::Remote(RemoteRow::Forwarder),
];

/// The map, and how many rows of each kind it holds.
#[derive(Debug)]
pub struct Endpoints {
    map: Hash<EndpointKey, EndpointEntry>,
    held: HashMap<Kind, u32>,
}

impl Kind {
    /// Returns the name by which people know the rows.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "LOCAL_ENDPOINTS",
            Self::Remote(RemoteRow::Direct) => "DIRECT_ROWS",
            Self::Remote(RemoteRow::Bouncer) => "BOUNCER_ROWS",
            Self::Remote(RemoteRow::Forward) => "FORWARD_ROWS",
            Self::Remote(RemoteRow::Forwarder) => "FORWARDERS",
        }
    }

    /// Returns the most rows of the kind.
    pub const fn capacity(self) -> u32 {
        match self {
            Self::Local => tables::LOCAL_ROWS,
            Self::Remote(RemoteRow::Direct) => tables::DIRECT_ROWS,
            Self::Remote(RemoteRow::Bouncer) => tables::BOUNCER_ROWS,
            Self::Remote(RemoteRow::Forward) => tables::FORWARD_ROWS,
            Self::Remote(RemoteRow::Forwarder) => tables::FORWARDER_ROWS,
        }
    }

    /// Returns the most rows of the kind of that name.
    pub fn capacity_of(name: &str) -> Option<u32> {
        let kind = KINDS.into_iter().find(|kind| kind.name() == name);
        kind.map(Self::capacity)
    }

    fn is_in(self, mut entry: EndpointEntry) -> bool {
        match self {
            Self::Local => entry.is_here(),
            Self::Remote(row) => *entry.remote(row) != NO_DROPLET,
        }
    }
}

impl Endpoints {
    /// Opens the pinned map. Returns what it holds, too.
    pub fn open(maps: &Path) -> Result<(Self, Vec<(EndpointKey, EndpointEntry)>), TableError> {
        let map: Hash<EndpointKey, EndpointEntry> = hash(maps, ENDPOINTS)?;
        let entries: Result<Vec<_>, _> = map.iter().collect();
        let entries = entries.map_err(access("read", ENDPOINTS))?;
        let count = |kind: Kind| entries.iter().filter(|(_, entry)| kind.is_in(*entry)).count() as u32;
        let held = KINDS.map(|kind| (kind, count(kind))).into();
        Ok((Self { map, held }, entries))
    }

    /// Returns where the kernel has the endpoint on this droplet.
    pub fn local(&self, key: &EndpointKey) -> Result<Option<LocalEntry>, TableError> {
        let entry = self.get(key)?.filter(|entry| Kind::Local.is_in(*entry));
        Ok(entry.map(|entry| entry.local))
    }

    pub fn set_local(&mut self, key: EndpointKey, local: LocalEntry) -> Result<(), TableError> {
        self.change(Kind::Local, key, |entry| entry.local = local)
    }

    pub fn set_remote(
        &mut self,
        row: RemoteRow,
        key: EndpointKey,
        droplet: DropletAddress,
    ) -> Result<(), TableError> {
        self.change(Kind::Remote(row), key, |entry| *entry.remote(row) = droplet)
    }

    /// Removes a row. A missing row is success.
    pub fn remove(&mut self, kind: Kind, key: EndpointKey) -> Result<(), TableError> {
        self.change(kind, key, |entry| {
            let without = EndpointEntry::new(key.vni);
            match kind {
                Kind::Local => entry.local = without.local,
                Kind::Remote(row) => *entry.remote(row) = NO_DROPLET,
            }
        })
    }

    /// Whether a direct row was used since the last call; clears the mark.
    pub fn take_used(&mut self, key: &EndpointKey) -> Result<bool, TableError> {
        let Some(entry) = self.get(key)?.filter(|entry| entry.used != 0) else {
            return Ok(false);
        };
        self.write(*key, EndpointEntry { used: 0, ..entry })?;
        Ok(true)
    }

    fn get(&self, key: &EndpointKey) -> Result<Option<EndpointEntry>, TableError> {
        lookup(ENDPOINTS, self.map.get(key, 0))
    }

    fn write(&mut self, key: EndpointKey, entry: EndpointEntry) -> Result<(), TableError> {
        self.map.insert(key, entry, 0).map_err(access("write", ENDPOINTS))
    }

    /// Changes the part of a kind. The other parts stay as the kernel has them.
    fn change(
        &mut self,
        kind: Kind,
        key: EndpointKey,
        change: impl FnOnce(&mut EndpointEntry),
    ) -> Result<(), TableError> {
        let found = self.get(&key)?;
        let old = found.unwrap_or(EndpointEntry::new(key.vni));
        let mut new = old;
        change(&mut new);
        if new.direct == NO_DROPLET {
            new.used = 0;
        }
        if new == old {
            return Ok(());
        }
        let (before, after) = (kind.is_in(old), kind.is_in(new));
        let held = self.held.entry(kind).or_default();
        if after && !before && *held >= kind.capacity() {
            return Err(TableError::Full { name: kind.name() });
        }
        let now = *held + u32::from(after) - u32::from(before);
        if new.is_empty() {
            take(&mut self.map, ENDPOINTS, &key)?;
        } else {
            self.write(key, new)?;
        }
        self.held.insert(kind, now);
        Ok(())
    }
}
