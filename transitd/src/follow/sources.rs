//! What can be followed: packets of traced endpoints, and packets that network policy denies.

use std::path::Path;

use thuban_common::counters::Counter;
use thuban_common::policy::DenialRecord;
use thuban_common::tables::{EndpointKey, TraceRecord};

use super::Source;
use crate::dataplane::denials::Followed;
use crate::dataplane::tables::TableError;
use crate::dataplane::traced::Traced;

impl Source for Traced {
    type Record = TraceRecord;
    type Wanted = Vec<EndpointKey>;
    const RING: &'static str = "TRACE";
    const VERB: &'static str = "trace";
    const LOST: Counter = Counter::TraceLost;

    fn open(maps: &Path) -> Result<Self, TableError> {
        Self::open(maps)
    }

    fn lease(&mut self, wanted: &[&Self::Wanted], until: u64) -> Result<(), TableError> {
        let wanted: Vec<EndpointKey> = wanted.iter().copied().flatten().copied().collect();
        self.set(&wanted, until)
    }

    /// The program looked in TRACED for the VNI and the addresses that are in the record, so this is exact.
    fn is_wanted(wanted: &Self::Wanted, record: &TraceRecord) -> bool {
        wanted
            .iter()
            .any(|key| key.vni == record.vni && [record.source, record.destination].contains(&key.address))
    }
}

impl Source for Followed {
    type Record = DenialRecord;
    /// Each follower gets all: only the verb knows the names of pods.
    type Wanted = ();
    const RING: &'static str = "DENIED";
    const VERB: &'static str = "denials --follow";
    const LOST: Counter = Counter::DenialsLost;

    fn open(maps: &Path) -> Result<Self, TableError> {
        Self::open(maps)
    }

    fn lease(&mut self, wanted: &[&()], until: u64) -> Result<(), TableError> {
        self.set(if wanted.is_empty() { 0 } else { until })
    }

    fn is_wanted((): &(), _: &DenialRecord) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use thuban_common::packet::ipv4::mapped;
    use thuban_common::tables::NO_COUNTER;

    use super::*;

    #[test]
    fn a_packet_is_its_senders_and_its_receivers() {
        let record = TraceRecord {
            time: 1,
            vni: 7,
            interface: 0,
            source: mapped([10, 0, 1, 5]),
            destination: mapped([10, 0, 1, 6]),
            length: 74,
            counter: NO_COUNTER,
            next: [0; 4],
            ports: [0; 2],
            protocol: 6,
            point: 0,
            rank: 0,
            set: 0,
        };
        let key = |vni, last| EndpointKey {
            vni,
            address: mapped([10, 0, 1, last]),
        };
        for (keys, is_wanted) in [
            (vec![key(7, 5)], true),
            (vec![key(7, 9), key(7, 6)], true),
            (vec![key(7, 7)], false),
            (vec![key(8, 5), key(8, 6)], false),
            (vec![], false),
        ] {
            assert_eq!(Traced::is_wanted(&keys, &record), is_wanted, "{keys:?}");
        }
    }
}
