//! MISSES: how many packets to an endpoint took a detour. Agents count; user space only begins anew.

use std::path::Path;

use aya::maps::{Array, Map, MapData};
use thuban_common::tables::{ConfigEntry, EndpointKey, MissEntry};

use super::tables::{TableError, access, data, open};

const MISSES: &str = "MISSES";

pub struct Misses {
    map: Array<MapData, MissEntry>,
    /// That of CONFIG, which stays as long as the tables live.
    seed: u32,
}

impl std::fmt::Debug for Misses {
    fn fmt(&self, to: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        to.debug_struct("Misses").finish_non_exhaustive()
    }
}

impl Misses {
    /// Opens the pinned map. CONFIG must be written.
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        let config: Array<_, ConfigEntry> =
            Array::try_from(Map::Array(data(maps, "CONFIG")?)).map_err(open("CONFIG"))?;
        Ok(Self {
            map: Array::try_from(Map::Array(data(maps, MISSES)?)).map_err(open(MISSES))?,
            seed: config.get(&0, 0).map_err(access("read", "CONFIG"))?.seed,
        })
    }

    /// Forgets the count of an endpoint.
    pub fn forget(&mut self, of: &EndpointKey) -> Result<(), TableError> {
        let (place, tag) = MissEntry::place(of, self.seed);
        let entry = self.map.get(&place, 0).map_err(access("read", MISSES))?;
        if entry.tag != tag || entry.packets == 0 {
            return Ok(());
        }
        let nothing = MissEntry { tag: 0, packets: 0 };
        self.map.set(place, nothing, 0).map_err(access("write", MISSES))
    }
}
