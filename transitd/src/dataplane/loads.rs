//! LOADS: what each role of this droplet passed on, per CPU. An entry is made with the role and goes with it; only
//! programs count in it.

use std::fmt;

use aya::maps::{MapData, MapError, PerCpuHashMap, PerCpuValues};
use aya::util::nr_cpus;
use thuban_common::tables::LoadKey;

pub struct Loads(PerCpuHashMap<MapData, LoadKey, u64>);

impl Loads {
    pub fn new(map: PerCpuHashMap<MapData, LoadKey, u64>) -> Self {
        Self(map)
    }

    /// Makes the entry of a role that has come. It has passed on nothing yet.
    pub fn begin(&mut self, key: LoadKey) -> Result<(), MapError> {
        let cpus = nr_cpus().map_err(|(_, error)| error)?;
        self.0.insert(key, PerCpuValues::try_from(vec![0; cpus])?, 0)
    }

    pub fn remove(&mut self, key: LoadKey) -> Result<(), MapError> {
        self.0.remove(&key)
    }

    /// Returns the packets that each role has passed on since it came.
    pub fn totals(&self) -> impl Iterator<Item = Result<(LoadKey, u64), MapError>> {
        let sum = |(key, values): (LoadKey, PerCpuValues<u64>)| (key, values.iter().sum());
        self.0.iter().map(move |entry| entry.map(sum))
    }
}

impl fmt::Debug for Loads {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Loads").finish_non_exhaustive()
    }
}
