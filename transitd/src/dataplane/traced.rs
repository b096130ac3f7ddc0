//! TRACED, and its flag in CONFIG: the endpoints that programs trace, and until when. Programs read; user space writes.
//!
//! Invariant: the flag is set as long as an endpoint is traced. Without it tracing costs the programs a test of a word.

use std::path::Path;

use aya::maps::{Array, Map, MapData};
use thuban_common::tables::{CONFIG_TRACE, ConfigEntry, EndpointKey};

use super::tables::{Hash, TableError, access, data, hash, insert, open, take};

const TRACED: &str = "TRACED";
const CONFIG: &str = "CONFIG";

pub struct Traced {
    endpoints: Hash<EndpointKey, u64>,
    config: Array<MapData, ConfigEntry>,
}

impl Traced {
    pub fn open(maps: &Path) -> Result<Self, TableError> {
        Ok(Self {
            endpoints: hash(maps, TRACED)?,
            config: Array::try_from(Map::Array(data(maps, CONFIG)?)).map_err(open(CONFIG))?,
        })
    }

    /// Has these endpoints and no others traced until a time, ns since boot.
    pub fn set(&mut self, wanted: &[EndpointKey], until: u64) -> Result<(), TableError> {
        let held: Result<Vec<EndpointKey>, _> = self.endpoints.keys().collect();
        for key in held.map_err(access("read", TRACED))? {
            if !wanted.contains(&key) {
                take(&mut self.endpoints, TRACED, &key)?;
            }
        }
        for key in wanted {
            insert(&mut self.endpoints, TRACED, *key, until)?;
        }
        self.set_flag(!wanted.is_empty())
    }

    fn set_flag(&mut self, on: bool) -> Result<(), TableError> {
        let mut entry = self.config.get(&0, 0).map_err(access("read", CONFIG))?;
        let flags = if on {
            entry.flags | CONFIG_TRACE
        } else {
            entry.flags & !CONFIG_TRACE
        };
        if flags == entry.flags {
            return Ok(());
        }
        entry.flags = flags;
        self.config.set(0, entry, 0).map_err(access("write", CONFIG))
    }
}
