//! DROPS: how many packets the agents dropped, by interface and reason. Programs count; user space reads.

use std::collections::HashMap;
use std::path::Path;

use thuban_common::tables::DropKey;

use super::tables::TableError;
use super::walk::Walk;

/// Reads all counts.
pub fn read(maps: &Path) -> Result<HashMap<DropKey, u64>, TableError> {
    let mut counts = HashMap::new();
    Walk::open(maps, "DROPS")?.each(|key: DropKey, packets: u64| {
        counts.insert(key, packets);
        Ok(())
    })?;
    Ok(counts)
}
