//! FLOWS: the flows that transit has judged and let pass.

use std::collections::HashMap;
use std::time::Duration;

use thuban_common::policy::{FLOWS_OF_VPC, FlowEntry};
use thuban_common::services::{ALL_FLOWS, ConnectionKey};
use thuban_common::tables::EndpointKey;

use super::life::life_of_flow;
use super::{Connections, Counts, MAX_EXPIRED_PER_SCAN, ROOM_OF_FLOWS, endpoint};
use crate::dataplane::tables::{TableError, lookup, take};

/// The table of flows.
pub const FLOWS: &str = "FLOWS";

impl Connections {
    /// Removes flows whose time is over and those of servers that aren't here. Counts the rest, and returns how many
    /// they are. `before`: the counts before the scan.
    pub(super) fn scan_flows(
        &mut self,
        is_here: impl Fn(&EndpointKey) -> bool,
        now: Duration,
        before: &Counts,
        shares: &mut HashMap<EndpointKey, u32>,
    ) -> Result<usize, TableError> {
        let (mut held, mut doomed) = (0, Vec::new());
        let limit = before.limit_of_flows();
        let mut count = |vni| {
            *shares.entry(endpoint(vni, ALL_FLOWS)).or_default() += 1;
            held += 1;
        };
        self.all_flows.each(|key, entry| {
            let is_crowding = before.share(key.vni, ALL_FLOWS) > limit;
            let life = life_of_flow(key.protocol, &entry, is_crowding);
            let is_over = now.saturating_sub(Duration::from_nanos(entry.time)) > life;
            let is_wanted = !is_over && is_here(&endpoint(key.vni, key.destination));
            if is_wanted || doomed.len() == MAX_EXPIRED_PER_SCAN {
                count(key.vni);
            } else {
                doomed.push((key, entry.time));
            }
            Ok(())
        })?;
        for (key, time) in doomed {
            match self.flow(&key)? {
                // A packet has come since.
                Some(entry) if entry.time != time => count(key.vni),
                _ => take(&mut self.flows, FLOWS, &key)?,
            }
        }
        Ok(held)
    }

    /// Removes flows of endpoints that have left.
    pub(super) fn forget_flows(&mut self, has_left: impl Fn(&EndpointKey) -> bool) -> Result<(), TableError> {
        let mut gone = Vec::new();
        self.all_flows.each(|key, _| {
            let mut ends = [key.source, key.destination].into_iter();
            if ends.any(|end| has_left(&endpoint(key.vni, end))) {
                gone.push(key);
            }
            Ok(())
        })?;
        let mut gone = gone.iter();
        gone.try_for_each(|key| take(&mut self.flows, FLOWS, key))
    }

    fn flow(&self, key: &ConnectionKey) -> Result<Option<FlowEntry>, TableError> {
        lookup(FLOWS, self.flows.get(key, 0))
    }
}

impl Counts {
    /// Returns how many flows a VPC may have without shorter lives: [`Self::limit`], and less than nearly all that it
    /// may have.
    fn limit_of_flows(&self) -> u32 {
        let nearly_all = FLOWS_OF_VPC / 4 * 3;
        self.limit(ALL_FLOWS, ROOM_OF_FLOWS).min(nearly_all - 1)
    }
}
