//! Which packets of pods their agents dropped since the last report. Pure.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};

use thuban_common::counters::Counter;
use thuban_common::tables::DropKey;
use thuban_proto::MAX_DROPS;
use thuban_proto::transit::Dropped;

use crate::attachments::Attachment;

/// The counts that the operator knows, or that are of before it asked; none: it has not asked.
#[derive(Debug, Default)]
pub struct Meter(Option<HashMap<DropKey, u64>>);

impl Meter {
    /// Returns what was dropped since the last look of packets of pods, for reasons that are told. The first look
    /// returns nothing. What is too much for one report is lost: the most frequent reason of each pod comes before any
    /// pod's second one. `counts`: all. `attachments`: those of this droplet.
    pub fn look<'a>(
        &mut self,
        counts: HashMap<DropKey, u64>,
        attachments: impl Iterator<Item = &'a Attachment>,
    ) -> Vec<Dropped> {
        let Some(last) = self.0.take() else {
            self.0 = Some(counts);
            return Vec::new();
        };
        let pods = attachments.filter(|attachment| !attachment.is_host());
        let pods: HashMap<u32, &Attachment> = pods.map(|pod| (pod.host_ifindex, pod)).collect();
        let mut by_interface: BTreeMap<u32, Vec<(u64, Counter)>> = BTreeMap::new();
        for (key, packets) in &counts {
            let Some(reason) = Counter::of(key.reason).filter(|reason| reason.is_told()) else {
                continue;
            };
            // The count is lower than before: the entry went and came back between two looks.
            let before = last.get(key).filter(|before| *before <= packets);
            let more = packets - before.copied().unwrap_or_default();
            if more > 0 {
                by_interface
                    .entry(key.interface)
                    .or_default()
                    .push((more, reason));
            }
        }
        let mut told = Vec::new();
        for (interface, mut reasons) in by_interface {
            let Some(pod) = pods.get(&interface) else { continue };
            reasons.sort_by_key(|(packets, reason)| (Reverse(*packets), *reason as u32));
            let places = reasons.into_iter().enumerate();
            told.extend(places.map(|(place, (packets, reason))| (place, dropped(pod, reason, packets))));
        }
        told.sort_by_key(|(place, _)| *place);
        self.0 = Some(counts);
        told.into_iter()
            .take(MAX_DROPS)
            .map(|(_, dropped)| dropped)
            .collect()
    }

    pub const fn has_looked(&self) -> bool {
        self.0.is_some()
    }
}

fn dropped(pod: &Attachment, reason: Counter, packets: u64) -> Dropped {
    let key = pod.key();
    Dropped {
        vni: key.vni,
        address: key.address.to_vec(),
        reason: reason as u32,
        packets,
    }
}

#[cfg(test)]
mod tests {
    use thuban_common::packet::ipv4::mapped;

    use super::*;
    use crate::attachments::AttachmentId;
    use crate::attachments::tests::attachment;

    /// Returns pods behind the interfaces 1 to `count`.
    fn pods(count: u32) -> Vec<Attachment> {
        let pod = |interface: u32| Attachment {
            host_ifindex: interface,
            ..attachment(&format!("c{interface}"), 1)
        };
        (1..=count).map(pod).collect()
    }

    fn count(interface: u32, reason: Counter, packets: u64) -> (DropKey, u64) {
        let reason = reason as u32;
        (DropKey { interface, reason }, packets)
    }

    /// Returns a meter that has looked once, when nothing was dropped.
    fn meter() -> Meter {
        let mut meter = Meter::default();
        assert!(meter.look(HashMap::new(), pods(0).iter()).is_empty());
        meter
    }

    fn look(meter: &mut Meter, counts: &[(DropKey, u64)]) -> Vec<(u32, u64)> {
        let told = meter.look(counts.iter().copied().collect(), pods(3).iter());
        told.iter()
            .map(|dropped| (dropped.reason, dropped.packets))
            .collect()
    }

    #[test]
    fn what_is_dropped_after_the_question_is_reported_once() {
        let mut meter = Meter::default();
        let reason = Counter::OutsideVpc as u32;
        let at = |packets| [count(1, Counter::OutsideVpc, packets)];
        assert!(look(&mut meter, &at(100)).is_empty(), "of before");
        assert!(look(&mut meter, &at(100)).is_empty());
        assert_eq!(look(&mut meter, &at(103)), [(reason, 3)]);
        assert!(look(&mut meter, &at(103)).is_empty());
        assert_eq!(look(&mut meter, &at(1)), [(reason, 1)], "the entry came again");
    }

    #[test]
    fn a_report_names_the_pod() {
        let counts = [count(2, Counter::VlanTagged, 7)].into();
        let expected = Dropped {
            vni: 7,
            address: mapped([10, 0, 1, 5]).to_vec(),
            reason: Counter::VlanTagged as u32,
            packets: 7,
        };
        assert_eq!(meter().look(counts, pods(3).iter()), [expected]);
    }

    #[test]
    fn noise_and_what_is_no_pods_are_not_reported() {
        let counts = [
            count(1, Counter::Ipv6Discovery, 5),
            count(2, Counter::NotUnicast, 5),
            count(99, Counter::OutsideVpc, 5),
            (
                DropKey {
                    interface: 1,
                    reason: 127,
                },
                5,
            ),
        ];
        assert!(look(&mut meter(), &counts).is_empty());
        let mut node = pods(1);
        node[0].id = AttachmentId::host("eth0");
        let counts = [count(1, Counter::OutsideVpc, 5)].into();
        assert!(meter().look(counts, node.iter()).is_empty(), "the node's own");
    }

    #[test]
    fn every_pod_is_in_a_report_before_any_pods_second_reason() {
        let mut counts = HashMap::new();
        for interface in 1..=200 {
            counts.extend([
                count(interface, Counter::OutsideVpc, 2),
                count(interface, Counter::SpoofedMac, 9),
            ]);
        }
        let told = meter().look(counts, pods(200).iter());
        assert_eq!(told.len(), MAX_DROPS);
        let (first, second) = told.split_at(200);
        assert!(first.iter().all(|dropped| dropped.packets == 9));
        assert!(second.iter().all(|dropped| dropped.packets == 2));
    }
}
