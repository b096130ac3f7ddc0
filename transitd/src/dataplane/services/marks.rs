//! Which services are used, by marks that agents leave in SERVICES.

use std::path::Path;

use aya::maps::MapError;
use thuban_common::services::{ServiceEntry, ServiceKey};
use thuban_common::tables::EndpointKey;

use super::super::tables::{Hash, IS_THERE, TableError, access, hash, is_missing};
use super::own_key;

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
