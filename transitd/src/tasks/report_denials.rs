//! Reports to the operator what network policies deny, of the sets that it has asked about, and which packets of pods
//! their agents dropped, if it has asked about that.
//!
//! Observes only: the programs count. While the operator asks about nothing, nothing is read and nothing is sent.

mod drops;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use thuban_common::policy::{DenialKey, DenialRecord, in_vpc};
use thuban_common::tables::DropKey;
use thuban_proto::MAX_DENIALS;
use thuban_proto::transit::{Denial, Denials, droplet_message::Message};
use tokio::time::MissedTickBehavior;
use tracing::warn;

use crate::attachments::Attachment;
use crate::boot;
use crate::dataplane::tables::TableError;
use crate::dataplane::{denials, drops as drop_counts};
use crate::node::Node;
use crate::state::State;
use crate::words::ports;

/// The counts that the operator knows, or that are of before it asked; none: it has not asked.
#[derive(Debug, Default)]
struct Meter(Option<HashMap<DenialKey, u64>>);

impl Meter {
    /// Returns what was denied since the last look by sets that the operator has asked about, the latest first. What is
    /// too much for one report comes with the next one. The first look returns nothing. `records`: all, the oldest
    /// first. `now`: by the programs' clock.
    fn look(&mut self, records: &[DenialRecord], asked: &HashSet<u64>, now: Duration) -> Vec<Denial> {
        let last = self.0.take();
        let mut counted = HashMap::with_capacity(records.len());
        let mut denials = Vec::new();
        for DenialRecord { key, entry } in records.iter().rev() {
            let before = last.as_ref().map_or(entry.packets, |last| {
                // The count is lower than before: the entry went and came back between two looks.
                let before = last.get(key).filter(|before| **before <= entry.packets);
                before.copied().unwrap_or_default()
            });
            let is_told = entry.packets > before && asked.contains(&key.set);
            if is_told && denials.len() == MAX_DENIALS {
                counted.insert(*key, before);
                continue;
            }
            counted.insert(*key, entry.packets);
            if !is_told {
                continue;
            }
            let (vni, set) = in_vpc(key.set);
            let [_, port] = ports(entry.protocol, entry.ports).map(u16::from_be);
            let age = now.saturating_sub(Duration::from_nanos(entry.time));
            denials.push(Denial {
                vni,
                set,
                rank: key.rank.into(),
                packets: entry.packets - before,
                source: entry.source.to_vec(),
                destination: entry.destination.to_vec(),
                protocol: entry.protocol.into(),
                port: port.into(),
                age_ms: age.as_millis() as u64,
            });
        }
        self.0 = Some(counted);
        denials
    }

    const fn has_looked(&self) -> bool {
        self.0.is_some()
    }
}

/// What the operator knows, by kind of report.
#[derive(Debug, Default)]
struct Meters {
    denials: Meter,
    drops: drops::Meter,
}

impl Meters {
    /// Returns what to report. `asked` and `asks_of_drops`: what the operator asks about now; it may have asked about
    /// less or more when the maps were read. Its new question waits for the next look, which follows at once.
    fn look<'a>(
        &mut self,
        read: Read,
        asked: &HashSet<u64>,
        asks_of_drops: bool,
        attachments: impl Iterator<Item = &'a Attachment>,
    ) -> Denials {
        let mut report = Denials::default();
        if asked.is_empty() {
            self.denials = Meter::default();
        } else if let Some(records) = read.denials {
            report.denials = self.denials.look(&records, asked, boot::monotonic());
        }
        if !asks_of_drops {
            self.drops = drops::Meter::default();
        } else if let Some(counts) = read.drops {
            report.drops = self.drops.look(counts, attachments);
        }
        report
    }

    /// Whether the operator asks about something that was not looked at yet.
    fn lack_a_look(&self, state: &State) -> bool {
        let asks_of_sets = state.reported_sets.as_ref().is_some_and(|sets| !sets.is_empty());
        asks_of_sets && !self.denials.has_looked() || state.reports_drops && !self.drops.has_looked()
    }
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut interval = tokio::time::interval(Duration::from_secs(node.settings.denial_interval));
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut meters = Meters::default();
    loop {
        tokio::select! {
            _ = interval.tick() => report(&node, &mut meters),
            () = node.asked.notified() => {
                // What was denied or dropped before isn't told.
                let is_new = meters.lack_a_look(&node.state());
                if is_new {
                    interval.reset();
                    report(&node, &mut meters);
                }
            }
        }
    }
}

/// The contents of the maps that the operator asks about.
#[derive(Default)]
struct Read {
    denials: Option<Vec<DenialRecord>>,
    drops: Option<HashMap<DropKey, u64>>,
}

impl Read {
    fn new(maps: &Path, asks_of_sets: bool, asks_of_drops: bool) -> Self {
        let denials = asks_of_sets.then(|| as_read(denials::read(maps)));
        let drops = asks_of_drops.then(|| as_read(drop_counts::read(maps)));
        Self {
            denials: denials.flatten(),
            drops: drops.flatten(),
        }
    }
}

/// Returns whether the operator asks about sets, and whether about drops; none: it has not asked.
fn questions(state: &State) -> Option<(bool, bool)> {
    let asked = state.reported_sets.as_ref()?;
    Some((!asked.is_empty(), state.reports_drops))
}

/// Reports what was denied and dropped since the last look, if the operator asks. Without a stream it waits.
fn report(node: &Node, meters: &mut Meters) {
    let questions = questions(&node.state());
    let Some((asks_of_sets, asks_of_drops)) = questions else {
        return;
    };
    // All of the daemon waits for the state, so it is not locked here: the maps have thousands of entries.
    let read = Read::new(&node.settings.pins.maps(), asks_of_sets, asks_of_drops);
    let state = node.state();
    let Some(asked) = &state.reported_sets else {
        return;
    };
    let report = meters.look(read, asked, state.reports_drops, state.attachments.values());
    if !report.denials.is_empty() || !report.drops.is_empty() {
        state.send(Message::Denials(report));
    }
}

/// Returns what was read. An error is logged.
fn as_read<T>(result: Result<T, TableError>) -> Option<T> {
    match result {
        Ok(read) => Some(read),
        Err(error) => {
            warn!(
                error = &error as &dyn std::error::Error,
                "what was denied or dropped could not be read"
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use thuban_common::packet::ipv4::{ICMP, TCP, mapped};
    use thuban_common::policy::{DenialEntry, of_vpc};

    use super::*;

    const NOW: Duration = Duration::from_secs(9);

    fn record(set: u32, interface: u32, packets: u64) -> DenialRecord {
        DenialRecord {
            key: DenialKey {
                set: of_vpc(7, set),
                interface,
                rank: 3,
                flags: 0,
            },
            entry: DenialEntry {
                packets,
                time: 8_500_000_000,
                source: mapped([10, 0, 1, 5]),
                destination: mapped([10, 0, 1, 6]),
                ports: [40_000_u16.to_be(), 80_u16.to_be()],
                protocol: TCP,
                ..DenialEntry::default()
            },
        }
    }

    fn asked() -> HashSet<u64> {
        [of_vpc(7, 1)].into()
    }

    fn look(meter: &mut Meter, records: &[DenialRecord]) -> Vec<u64> {
        let denials = meter.look(records, &asked(), NOW);
        denials.iter().map(|denial| denial.packets).collect()
    }

    #[test]
    fn what_is_denied_after_the_question_is_reported_once() {
        let mut meter = Meter::default();
        assert!(look(&mut meter, &[record(1, 5, 100)]).is_empty(), "of before");
        assert!(look(&mut meter, &[record(1, 5, 100)]).is_empty());
        assert_eq!(look(&mut meter, &[record(1, 5, 103), record(1, 6, 2)]), [2, 3]);
        assert!(
            look(&mut meter, &[record(1, 5, 103), record(2, 5, 9)]).is_empty(),
            "not asked"
        );
        assert_eq!(look(&mut meter, &[record(1, 5, 1)]), [1], "the entry came again");
    }

    #[test]
    fn a_question_that_comes_while_maps_are_read_is_not_lost() {
        let mut meters = Meters::default();
        let mut look = |read: Read, sets: &HashSet<u64>, asks_of_drops| {
            let report = meters.look(read, sets, asks_of_drops, std::iter::empty());
            let packets: Vec<u64> = report.denials.iter().map(|denial| denial.packets).collect();
            (packets, meters.denials.has_looked(), meters.drops.has_looked())
        };
        let read = |packets| Read {
            denials: Some(vec![record(1, 5, packets)]),
            drops: Some(HashMap::new()),
        };
        assert_eq!(look(Read::default(), &asked(), true), (vec![], false, false));
        assert_eq!(look(read(100), &asked(), true), (vec![], true, true), "of before");
        assert_eq!(look(Read::default(), &asked(), true), (vec![], true, true));
        assert_eq!(look(read(103), &asked(), true), (vec![3], true, true));
        // It was taken back meanwhile.
        let none = HashSet::new();
        assert_eq!(look(read(104), &none, false), (vec![], false, false));
    }

    #[test]
    fn a_report_shows_one_of_the_packets() {
        let mut meter = Meter::default();
        meter.look(&[], &asked(), NOW);
        let mut echo = record(1, 6, 1);
        echo.entry.protocol = ICMP;
        let denials = meter.look(&[echo, record(1, 5, 4)], &asked(), NOW);
        let expected = Denial {
            vni: 7,
            set: 1,
            rank: 3,
            packets: 4,
            source: mapped([10, 0, 1, 5]).to_vec(),
            destination: mapped([10, 0, 1, 6]).to_vec(),
            protocol: 6,
            port: 80,
            age_ms: 500,
        };
        assert_eq!(denials[0], expected);
        assert_eq!(
            (denials[1].protocol, denials[1].port),
            (1, 0),
            "an identifier is no port"
        );
    }

    #[test]
    fn too_much_for_one_report_comes_with_the_next_one() {
        let mut meter = Meter::default();
        meter.look(&[], &asked(), NOW);
        let records: Vec<_> = (0..1500).map(|interface| record(1, interface, 2)).collect();
        assert_eq!(look(&mut meter, &records).len(), MAX_DENIALS);
        assert_eq!(look(&mut meter, &records), [2; 1500 - MAX_DENIALS]);
        assert!(look(&mut meter, &records).is_empty());
    }
}
