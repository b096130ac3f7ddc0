//! Reads what programs tell of flows, and notes what they could not tell.
//!
//! Invariant: it reads at most [`BATCH`] events in a [`PAUSE`], so that its share of the CPUs is bounded. What the ring
//! buffer has no room for meanwhile is counted.

use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;
use thuban_api::identifiers::Vni;
use thuban_common::counters::Counter;
use thuban_common::flow_events::FlowEventRecord;
use thuban_proto::observe::Lost;
use thuban_rows::PolicyId;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::deniers::Deniers;
use super::flow::of_event;
use super::queue::Queue;
use crate::dataplane::counters::{CounterError, Counters};
use crate::dataplane::ring::{Ring, RingError, decode};
use crate::program::policy::Denier;

const RING: &str = "FLOW_EVENTS";
/// The most events that are read in a row.
const BATCH: usize = 256;
/// The time between two batches: 20,000 events a second at most. One wake-up reads all that came meanwhile.
const PAUSE: Duration = Duration::from_micros(12_800);
/// The time between looks at what the programs could not tell.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum ReadError {
    #[error(transparent)]
    Ring(#[from] RingError),
    #[error(transparent)]
    Counters(#[from] CounterError),
}

/// Reads until it fails. `ask`: returns what denies a packet that a set denies by the rule of a rank, or by none.
pub async fn run(
    maps: &Path,
    queue: &Queue,
    ask: impl FnMut(Vni, PolicyId, u16) -> Denier,
) -> Result<Infallible, ReadError> {
    let mut ring = Ring::open(maps, RING)?;
    let counters = Counters::open(maps)?;
    let mut before = untold(&counters)?;
    let mut deniers = Deniers::new(ask);
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let mut flows = Vec::new();
        let add = |bytes: &[u8]| {
            if let Some(record) = decode::<FlowEventRecord>(bytes) {
                flows.push(of_event(&record, deniers.of(&record)));
            }
        };
        tokio::select! {
            read = ring.read(BATCH, add) => {
                read?;
                queue.add(flows);
                sleep(PAUSE).await;
            }
            _ = look.tick() => {
                let now = untold(&counters)?;
                queue.lose(since(now, before));
                before = now;
            }
        }
    }
}

/// Returns the number of events that programs could not tell since the maps were made.
fn untold(counters: &Counters) -> Result<Lost, CounterError> {
    Ok(Lost {
        budget: counters.get(Counter::FlowsOverBudget)?,
        table: counters.get(Counter::FlowTableFull)?,
        ring: counters.get(Counter::FlowEventsLost)?,
        stream: 0,
    })
}

const fn since(now: Lost, before: Lost) -> Lost {
    Lost {
        budget: now.budget.saturating_sub(before.budget),
        table: now.table.saturating_sub(before.table),
        ring: now.ring.saturating_sub(before.ring),
        stream: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_are_those_since_the_last_look() {
        let lost = |budget, table, ring| Lost {
            budget,
            table,
            ring,
            stream: 0,
        };
        assert_eq!(since(lost(9, 4, 2), lost(5, 4, 0)), lost(4, 0, 2));
        assert_eq!(since(lost(1, 0, 0), lost(5, 0, 0)), lost(0, 0, 0), "new maps");
    }
}
