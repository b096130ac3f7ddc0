//! DENIALS and FOLLOWED: what network policy denied, and whether each denied packet is told. Programs count; user space
//! says for how long somebody reads.

use std::path::Path;

use aya::maps::{Array, Map, MapData};
use thuban_common::policy::{DenialEntry, DenialKey, DenialRecord};

use super::tables::{TableError, access, data, open};
use super::walk::Walk;

const FOLLOWED: &str = "FOLLOWED";

/// Reads what was denied, one record for each rule and endpoint, the oldest first.
pub fn read(maps: &Path) -> Result<Vec<DenialRecord>, TableError> {
    let mut records = Vec::new();
    Walk::open(maps, "DENIALS")?.each(|key: DenialKey, entry: DenialEntry| {
        records.push(DenialRecord { key, entry });
        Ok(())
    })?;
    records.sort_by_key(|record| record.entry.time);
    Ok(records)
}

pub struct Followed(Array<MapData, u64>);

impl Followed {
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        Array::try_from(Map::Array(data(maps, FOLLOWED)?))
            .map(Self)
            .map_err(open(FOLLOWED))
    }

    /// Has denied packets told until a time, ns since boot.
    pub fn set(&mut self, until: u64) -> Result<(), TableError> {
        self.0.set(0, until, 0).map_err(access("write", FOLLOWED))
    }
}
