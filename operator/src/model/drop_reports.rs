//! What droplets have told of pods' dropped packets since the pods were told of it, and which pods are told next.
//!
//! Invariant: a bounded number of events is written in a minute, whatever is dropped: one of a pod, so many of a
//! droplet and so many of the cluster. Where more pods wait, a namespace that had fewer events lately comes first.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};

use thuban_common::counters::Counter;

use super::denial_reports::sum;

/// How many pods of all, and of one droplet, are told in an interval.
pub const MAX_OF_CLUSTER: usize = 60;
pub const MAX_OF_DROPLET: usize = 10;
/// The shortest time between two events of a pod, milliseconds.
const INTERVAL: u64 = 60_000;
/// How long what was dropped is worth an event, milliseconds.
const STALE: u64 = 2 * INTERVAL;
/// How long an event counts for its namespace, milliseconds.
const MEMORY: u64 = 10 * INTERVAL;
/// How many reasons an event names beside the most frequent one.
const MAX_OTHERS: usize = 3;

/// (namespace, name).
pub type PodName = (String, String);

/// Packets of a pod that were dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drops {
    /// The droplet that tells.
    pub droplet: String,
    packets: HashMap<Counter, u64>,
    /// The time of the first report, milliseconds.
    since: u64,
}

impl Drops {
    fn new(droplet: &str, now: u64) -> Self {
        Self {
            droplet: droplet.to_owned(),
            packets: HashMap::new(),
            since: now,
        }
    }

    /// Returns the most frequent reason, and the drops in words: how many, why, and what to do.
    pub fn words(&self) -> Option<(Counter, String)> {
        let mut reasons: Vec<(Counter, u64)> =
            self.packets.iter().map(|(why, count)| (*why, *count)).collect();
        reasons.sort_by_key(|(reason, packets)| (Reverse(*packets), *reason as u32));
        let ((first, packets), others) = reasons.split_first()?;
        let (name, reason, remedy) = (first.name(), first.reason(), first.remedy());
        let mut words = format!(
            "dropped {packets} of the packets that the pod sent, {name}: {reason}. What to do: {remedy}"
        );
        if !others.is_empty() {
            let others = others.iter().take(MAX_OTHERS);
            let others = others.map(|(reason, packets)| format!("{} {packets}", reason.name()));
            words += ". Dropped besides: ";
            words += &others.collect::<Vec<_>>().join(", ");
        }
        Some((*first, words))
    }
}

/// An event that was written.
#[derive(Debug)]
struct Told {
    at: u64,
    pod: PodName,
    droplet: String,
}

#[derive(Debug, Default)]
pub struct DropReports {
    waiting: BTreeMap<PodName, Drops>,
    told: Vec<Told>,
}

impl DropReports {
    /// Adds packets that a droplet dropped of a pod.
    pub fn note(&mut self, droplet: &str, pod: PodName, (reason, packets): (Counter, u64), now: u64) {
        let new = || Drops::new(droplet, now);
        let drops = self.waiting.entry(pod).or_insert_with(new);
        if drops.droplet != droplet {
            // This is another pod of the name.
            *drops = new();
        }
        let count = drops.packets.entry(reason).or_default();
        *count = sum(*count, packets);
    }

    /// Takes the pods that are to be told now.
    pub fn take(&mut self, now: u64) -> Vec<(PodName, Drops)> {
        let age = |time: u64| now.saturating_sub(time);
        self.waiting.retain(|_, drops| age(drops.since) < STALE);
        self.told.retain(|told| age(told.at) < MEMORY);
        let chosen = self.choose(now);
        let mut taken = Vec::with_capacity(chosen.len());
        for pod in chosen {
            if let Some(drops) = self.waiting.remove(&pod) {
                self.told.push(Told {
                    at: now,
                    pod: pod.clone(),
                    droplet: drops.droplet.clone(),
                });
                taken.push((pod, drops));
            }
        }
        taken
    }

    fn choose(&self, now: u64) -> Vec<PodName> {
        // How many events each namespace had lately, or gets before the pod.
        let mut places: HashMap<&str, usize> = HashMap::new();
        let mut lately: HashMap<&PodName, usize> = HashMap::new();
        let mut recent: HashSet<&PodName> = HashSet::new();
        let mut of_droplets: HashMap<&str, usize> = HashMap::new();
        let mut room = MAX_OF_CLUSTER;
        for told in &self.told {
            *places.entry(told.pod.0.as_str()).or_default() += 1;
            *lately.entry(&told.pod).or_default() += 1;
            if now.saturating_sub(told.at) < INTERVAL {
                recent.insert(&told.pod);
                *of_droplets.entry(told.droplet.as_str()).or_default() += 1;
                room = room.saturating_sub(1);
            }
        }
        let waiting = self.waiting.iter().filter(|(pod, _)| !recent.contains(pod));
        let mut waiting: Vec<(&PodName, &Drops)> = waiting.collect();
        waiting.sort_by_key(|(pod, _)| lately.get(pod).copied().unwrap_or_default());
        let mut due: Vec<(usize, &PodName, &str)> = Vec::with_capacity(waiting.len());
        for (pod, drops) in waiting {
            let place = places.entry(pod.0.as_str()).or_default();
            due.push((*place, pod, drops.droplet.as_str()));
            *place += 1;
        }
        due.sort_unstable();
        let mut chosen = Vec::new();
        for (_, pod, droplet) in due {
            let used = of_droplets.entry(droplet).or_default();
            if room > 0 && *used < MAX_OF_DROPLET {
                *used += 1;
                room -= 1;
                chosen.push(pod.clone());
            }
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60_000;

    fn pod(namespace: &str, number: usize) -> PodName {
        (namespace.to_owned(), format!("p{number:03}"))
    }

    fn note(reports: &mut DropReports, droplet: &str, pod: PodName, now: u64) {
        reports.note(droplet, pod, (Counter::OutsideVpc, 1), now);
    }

    /// Returns the namespaces of the pods that are told now.
    fn told(reports: &mut DropReports, now: u64) -> Vec<String> {
        let taken = reports.take(now).into_iter();
        taken.map(|((namespace, _), _)| namespace).collect()
    }

    #[test]
    fn a_pod_is_told_once_a_minute_of_all_since() {
        let mut reports = DropReports::default();
        note(&mut reports, "n0", pod("a", 1), 0);
        note(&mut reports, "n0", pod("a", 1), 5);
        let taken = reports.take(10);
        assert_eq!(taken.len(), 1);
        assert!(
            taken[0].1.words().unwrap().1.contains("dropped 2 of"),
            "{taken:?}"
        );
        assert!(told(&mut reports, 20).is_empty(), "nothing is new");
        note(&mut reports, "n0", pod("a", 1), 30);
        assert!(told(&mut reports, 9 + MINUTE).is_empty(), "too soon");
        assert_eq!(told(&mut reports, 10 + MINUTE), ["a"]);
    }

    #[test]
    fn an_event_says_how_many_why_and_what_to_do() {
        let mut reports = DropReports::default();
        let of = [
            (Counter::VlanTagged, 1),
            (Counter::OutsideVpc, 4),
            (Counter::OutsideVpc, 8),
            (Counter::SpoofedMac, 2),
        ];
        for dropped in of {
            reports.note("n0", pod("a", 1), dropped, 0);
        }
        let (reason, words) = reports.take(0)[0].1.words().unwrap();
        assert_eq!(reason, Counter::OutsideVpc);
        assert_eq!(
            words,
            "dropped 12 of the packets that the pod sent, outside_vpc: destination outside the VPC, which has no way \
             out. What to do: ask the VPC's owner for spec.egress if pods should reach outside; a network with \
             egress: false stays closed. Dropped besides: spoofed_mac 2, vlan_tagged 1"
        );
    }

    #[test]
    fn the_words_of_every_reason_fit_into_an_event() {
        for reason in Counter::ALL.iter().filter(|reason| reason.is_told()) {
            let others = Counter::ALL.iter().filter(|other| other.is_told());
            let mut drops = Drops::new("n0", 0);
            drops.packets = others.map(|other| (*other, i64::MAX as u64 - 1)).collect();
            drops.packets.insert(*reason, i64::MAX as u64);
            let (first, words) = drops.words().unwrap();
            assert_eq!(first, *reason);
            assert!(words.len() < 1000, "{words}");
        }
    }

    #[test]
    fn a_droplet_and_the_cluster_have_a_bound_each_minute() {
        let mut reports = DropReports::default();
        let fill = |reports: &mut DropReports, now| {
            for number in 0..200 {
                note(reports, &format!("n{}", number / 20), pod("a", number), now);
            }
        };
        for minute in 0..3 {
            let mut count = 0;
            for second in 0..6 {
                let now = minute * MINUTE + second * 10_000;
                fill(&mut reports, now);
                count += told(&mut reports, now).len();
            }
            assert_eq!(count, MAX_OF_CLUSTER, "{minute}");
        }
        let mut reports = DropReports::default();
        for number in 0..30 {
            note(&mut reports, "n0", pod("a", number), 0);
        }
        assert_eq!(told(&mut reports, 0).len(), MAX_OF_DROPLET);
        note(&mut reports, "n1", pod("a", 99), 1);
        assert_eq!(told(&mut reports, 1).len(), 1, "another droplet has its own");
    }

    #[test]
    fn many_pods_of_a_namespace_keep_no_other_one_waiting() {
        let mut reports = DropReports::default();
        for now in [0, 10_000, MINUTE, MINUTE + 10_000] {
            for number in 0..50 {
                note(&mut reports, "n0", pod("a", number), now);
            }
            if now != MINUTE {
                reports.take(now);
                continue;
            }
            note(&mut reports, "n0", pod("z", 1), now);
            let told = told(&mut reports, now);
            assert_eq!(told.iter().filter(|namespace| *namespace == "z").count(), 1);
            assert_eq!(
                (told.len(), &*told[0]),
                (MAX_OF_DROPLET, "z"),
                "it had no event yet"
            );
        }
    }

    #[test]
    fn what_is_old_or_of_another_pod_is_not_told() {
        let mut reports = DropReports::default();
        note(&mut reports, "n0", pod("a", 1), 0);
        assert!(told(&mut reports, 2 * MINUTE).is_empty());
        note(&mut reports, "n0", pod("a", 1), 2 * MINUTE);
        note(&mut reports, "n1", pod("a", 1), 2 * MINUTE);
        let taken = reports.take(2 * MINUTE);
        assert_eq!((taken.len(), &*taken[0].1.droplet), (1, "n1"));
        assert!(taken[0].1.words().unwrap().1.contains("dropped 1 of"));
        assert_eq!(Drops::new("n0", 0).words(), None);
    }
}
