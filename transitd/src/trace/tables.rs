//! The map TRACED, and the flag in CONFIG.

use std::path::Path;
use std::time::Duration;

use aya::maps::{Array, HashMap, Map, MapData, MapError};
use thiserror::Error;
use thuban_common::tables::{CONFIG_TRACE, ConfigEntry, EndpointKey};

use crate::follow::now;

#[derive(Debug, Error)]
pub enum TraceTableError {
    #[error("cannot open the pinned map {name}; has this version of transitd run on this node?")]
    Open { name: &'static str, source: MapError },
    #[error("cannot {operation} {name}")]
    Access {
        operation: &'static str,
        name: &'static str,
        source: MapError,
    },
}

pub struct TraceTables {
    traced: HashMap<MapData, EndpointKey, u64>,
    config: Array<MapData, ConfigEntry>,
}

impl TraceTables {
    pub fn open(maps: &Path) -> Result<Self, TraceTableError> {
        let open = |name| move |source| TraceTableError::Open { name, source };
        let data = |name| MapData::from_pin(maps.join(name)).map_err(open(name));
        Ok(Self {
            traced: HashMap::try_from(Map::HashMap(data("TRACED")?)).map_err(open("TRACED"))?,
            config: Array::try_from(Map::Array(data("CONFIG")?)).map_err(open("CONFIG"))?,
        })
    }

    /// Traces the endpoints from now on for the time given.
    pub fn start(&mut self, keys: &[EndpointKey], time: Duration) -> Result<(), TraceTableError> {
        let until = now() + time.as_nanos() as u64;
        for key in keys {
            self.traced
                .insert(key, until, 0)
                .map_err(access("write", "TRACED"))?;
        }
        self.set_flag(true)
    }

    pub fn stop(&mut self, keys: &[EndpointKey]) -> Result<(), TraceTableError> {
        for key in keys {
            match self.traced.remove(key) {
                Ok(()) | Err(MapError::KeyNotFound) => {}
                Err(source) => return Err(access("remove from", "TRACED")(source)),
            }
        }
        self.set_flag(false)
    }

    fn entry(&self) -> Result<ConfigEntry, TraceTableError> {
        self.config.get(&0, 0).map_err(access("read", "CONFIG"))
    }

    fn set_flag(&mut self, on: bool) -> Result<(), TraceTableError> {
        let mut entry = self.entry()?;
        let flags = if on {
            entry.flags | CONFIG_TRACE
        } else {
            entry.flags & !CONFIG_TRACE
        };
        if flags == entry.flags {
            return Ok(());
        }
        entry.flags = flags;
        self.config.set(0, entry, 0).map_err(access("write", "CONFIG"))
    }
}

/// Removes what a killed trace left: endpoints whose time is over, and with the last one the flag.
pub fn sweep(maps: &Path) -> Result<(), TraceTableError> {
    let mut tables = TraceTables::open(maps)?;
    if tables.entry()?.flags & CONFIG_TRACE == 0 {
        return Ok(());
    }
    let now = now();
    let entries: Vec<(EndpointKey, u64)> = tables.traced.iter().filter_map(Result::ok).collect();
    if entries.iter().any(|(_, until)| now < *until) {
        return Ok(());
    }
    let keys: Vec<EndpointKey> = entries.into_iter().map(|(key, _)| key).collect();
    tables.stop(&keys)
}

fn access(operation: &'static str, name: &'static str) -> impl FnOnce(MapError) -> TraceTableError {
    move |source| TraceTableError::Access {
        operation,
        name,
        source,
    }
}
