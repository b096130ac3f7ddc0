//! SEEN_FLOWS and the flags of flows in CONFIG: what programs tell of in each mode. Programs write the table.
//!
//! Invariant: the table has the size of the mode. Another mode makes it anew: programs that still run keep the former
//! one until they are replaced.

use std::path::Path;

use aya::maps::{MapError, MapInfo};
use thuban_common::flow_events::{SEEN_DROPS_CAPACITY, SEEN_FLOWS_CAPACITY};
use thuban_common::tables::{CONFIG_FLOW_DROPS, CONFIG_FLOWS};

use crate::settings::FlowMode;

pub(super) const SEEN_FLOWS: &str = "SEEN_FLOWS";

/// Returns the flags of CONFIG.
pub const fn flags(mode: FlowMode) -> u32 {
    match mode {
        FlowMode::Off => 0,
        FlowMode::Drops => CONFIG_FLOW_DROPS,
        FlowMode::All => CONFIG_FLOW_DROPS | CONFIG_FLOWS,
    }
}

/// Returns how many entries the table has. No map has none.
pub const fn entries(mode: FlowMode) -> u32 {
    match mode {
        FlowMode::Off => 1,
        FlowMode::Drops => SEEN_DROPS_CAPACITY,
        FlowMode::All => SEEN_FLOWS_CAPACITY,
    }
}

/// Whether a pinned table has another size than the mode wants.
pub(super) fn is_of_other_mode(path: &Path, mode: FlowMode) -> Result<bool, MapError> {
    if !path.exists() {
        return Ok(false);
    }
    Ok(MapInfo::from_pin(path)?.max_entries() != entries(mode))
}
