//! Following: verbs of transitd show what programs write into a ring buffer, from now on until somebody ends them.
//!
//! The daemon reads the ring buffers, and gives each follower what it wants: [`followers`]. A verb asks the daemon by
//! its socket: [`asking`].
//!
//! Invariant: a ring buffer has one reader on a node, the daemon.

pub mod asking;
pub mod followers;
mod sources;

use std::path::Path;
use std::time::Duration;

use aya::Pod;
use thuban_common::counters::Counter;

use crate::boot;
use crate::dataplane::tables::TableError;

/// How long the programs write records without a renewal.
const LEASE: Duration = Duration::from_secs(5);

/// A ring buffer that can be followed, and the lease by which programs write into it.
pub trait Source: Send + Sized + 'static {
    /// What the programs write.
    type Record: Pod;
    /// What a follower wants to see.
    type Wanted: Send + 'static;
    /// The ring buffer's name.
    const RING: &'static str;
    /// The verb, as a user types it.
    const VERB: &'static str;
    /// Counts the records that the ring buffer had no room for.
    const LOST: Counter;

    fn open(maps: &Path) -> Result<Self, TableError>;

    /// Has programs write what is wanted until a time, ns since boot, and nothing else. Nothing: they write no more.
    fn lease(&mut self, wanted: &[&Self::Wanted], until: u64) -> Result<(), TableError>;

    fn is_wanted(wanted: &Self::Wanted, record: &Self::Record) -> bool;
}

/// Returns nanoseconds since boot, by the programs' clock.
pub fn now() -> u64 {
    boot::monotonic().as_nanos() as u64
}
