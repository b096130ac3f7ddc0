//! Reads the per-CPU COUNTERS from the pins. Observes only.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

use aya::maps::{Map, MapData, MapError, PerCpuArray};
use thiserror::Error;
use thuban_common::counters::Counter;

#[derive(Debug, Error)]
#[error("cannot read the pinned map COUNTERS; has transitd run on this node?")]
pub struct CounterError(#[from] MapError);

/// The counters of this node.
pub struct Counters(PerCpuArray<MapData, u64>);

impl Counters {
    pub fn open(maps: &Path) -> Result<Self, CounterError> {
        let data = MapData::from_pin(maps.join("COUNTERS"))?;
        Ok(Self(PerCpuArray::try_from(Map::PerCpuArray(data))?))
    }

    /// Returns the sum over all CPUs.
    pub fn get(&self, counter: Counter) -> Result<u64, CounterError> {
        Ok(self.0.get(&(counter as u32), 0)?.iter().sum())
    }
}

/// Reads the counters: name -> sum over all CPUs.
pub fn read(maps: &Path) -> Result<BTreeMap<&'static str, u64>, CounterError> {
    let counters = Counters::open(maps)?;
    Counter::ALL
        .iter()
        .map(|counter| Ok((counter.name(), counters.get(*counter)?)))
        .collect()
}

/// Returns what was dropped, as text: the largest numbers first, each with its meaning and a remedy.
pub fn drops(counters: &BTreeMap<&'static str, u64>) -> String {
    let count = |counter: &Counter| counters.get(counter.name()).copied().unwrap_or_default();
    let drops = Counter::ALL.iter().filter(|counter| counter.is_drop());
    let mut drops: Vec<(u64, &Counter)> = drops.map(|counter| (count(counter), counter)).collect();
    drops.retain(|(count, _)| *count > 0);
    drops.sort_by_key(|(count, counter)| (u64::MAX - count, counter.name()));
    let mut text = String::new();
    for (count, counter) in drops {
        let (name, meaning) = (counter.name(), counter.meaning().trim_start_matches(" Drop: "));
        let _ = writeln!(
            text,
            "{count:>12}  {name}: {meaning}\n{:>14}-> {}",
            "",
            counter.remedy()
        );
    }
    if text.is_empty() {
        text.push_str("nothing was dropped\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::drops;

    #[test]
    fn drops_are_told_with_a_remedy() {
        assert_eq!(drops(&[("delivered", 9)].into()), "nothing was dropped\n");
        let text = drops(
            &[
                ("delivered", 9),
                ("too_big", 3),
                ("spoofed_mac", 12),
                ("no_config", 0),
            ]
            .into(),
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(
            lines[0],
            "          12  spoofed_mac: source MAC is not the endpoint's."
        );
        assert_eq!(lines[3].trim(), "-> look at the pod's MTU");
    }
}
