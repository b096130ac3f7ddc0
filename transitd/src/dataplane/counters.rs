//! Reads the per-CPU COUNTERS from the pins. Observes only.

use std::collections::BTreeMap;
use std::path::Path;

use aya::maps::{Map, MapData, MapError, PerCpuArray};
use thiserror::Error;
use thuban_common::counters::Counter;

#[derive(Debug, Error)]
#[error("cannot read the pinned map COUNTERS; has transitd run on this node?")]
pub struct CounterError(#[from] MapError);

/// Reads the counters: name -> sum over all CPUs.
pub fn read(maps: &Path) -> Result<BTreeMap<&'static str, u64>, CounterError> {
    let data = MapData::from_pin(maps.join("COUNTERS"))?;
    let counters: PerCpuArray<MapData, u64> = PerCpuArray::try_from(Map::PerCpuArray(data))?;
    Counter::ALL
        .iter()
        .map(|counter| Ok((counter.name(), counters.get(&(*counter as u32), 0)?.iter().sum())))
        .collect()
}
