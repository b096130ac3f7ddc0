//! Which policies have denied packets reported, of which sets droplets are asked, and what droplets have reported since
//! it was written.
//!
//! Invariant: a namespace makes a bounded amount of work, whatever it annotates and whatever is denied. The first
//! policies by name count, and one namespace's never displace those of another one that come earlier in their own.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::mem;
use std::sync::Arc;

use thuban_api::DeniedPeer;
use thuban_api::identifiers::Vni;
use thuban_rows::PolicyId;

/// How many NetworkPolicies of a namespace are reported, and how many ClusterNetworkPolicies.
pub const MAX_POLICIES: usize = 16;
/// Of how many sets with rules of one policy droplets are asked.
const MAX_SETS_OF_POLICY: usize = 64;
/// Of how many sets of one VPC droplets are asked.
const MAX_SETS_OF_VPC: usize = 1024;
/// How many peers are remembered of a policy.
const MAX_PEERS: usize = 10;
/// The shortest time between two writes of a policy's numbers, milliseconds.
const WRITE_INTERVAL: u64 = 60_000;

/// What droplets have reported of a policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    pub packets: u64,
    /// The latest first.
    pub last_peers: Vec<DeniedPeer>,
}

impl Gathered {
    fn add(&mut self, other: Self) {
        self.packets = sum(self.packets, other.packets);
        note_peers(&mut self.last_peers, other.last_peers);
    }
}

/// Returns the sum of two numbers of packets, as far as the API server can store it.
pub fn sum(one: u64, other: u64) -> u64 {
    one.saturating_add(other).min(i64::MAX as u64)
}

/// Adds peers to those of a policy: each once, with its latest time, and the latest only.
pub fn note_peers(known: &mut Vec<DeniedPeer>, peers: impl IntoIterator<Item = DeniedPeer>) {
    known.extend(peers);
    keep_latest(known, |one, other| other.time.cmp(&one.time), is_same);
}

/// Keeps the latest of each group of same ones, and so many groups as peers of a policy. `order`: that of the latest
/// first.
pub fn keep_latest<T>(
    all: &mut Vec<T>,
    order: impl Fn(&T, &T) -> Ordering,
    is_same: impl Fn(&T, &T) -> bool,
) {
    let mut rest = mem::take(all);
    rest.sort_by(order);
    for next in rest {
        if all.len() == MAX_PEERS {
            break;
        }
        if !all.iter().any(|later| is_same(later, &next)) {
            all.push(next);
        }
    }
}

/// Whether two peers differ at most in their time.
fn is_same(one: &DeniedPeer, other: &DeniedPeer) -> bool {
    let DeniedPeer {
        time: _,
        direction,
        pod,
        address,
        peer_pod,
        protocol,
        port,
    } = one;
    (direction, port) == (&other.direction, &other.port)
        && (address, protocol) == (&other.address, &other.protocol)
        && (pod, peer_pod) == (&other.pod, &other.peer_pod)
}

/// A set with rules of policies that are reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedSet {
    pub vpc: Arc<str>,
    pub vni: Vni,
    pub id: PolicyId,
    /// The policies that are reported and have rules in the set.
    pub policies: BTreeSet<Arc<str>>,
}

#[derive(Debug, Default)]
pub struct DenialReports {
    /// The names of policies with the annotation, by namespace; that of ClusterNetworkPolicies is empty.
    wanted: BTreeMap<String, BTreeSet<String>>,
    gathered: HashMap<String, Gathered>,
    /// When what was gathered was taken last, milliseconds.
    taken: HashMap<String, u64>,
}

impl DenialReports {
    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Sets whether a policy, by the name that rules have, is to be reported. Returns the policies that are reported
    /// and weren't before, or the other way round.
    pub fn set(&mut self, policy: &str, is_wanted: bool) -> Vec<String> {
        let namespace = namespace(policy);
        if !is_wanted && !self.wanted.contains_key(namespace) {
            return Vec::new();
        }
        let before = self.reported_of(namespace);
        let wanted = self.wanted.entry(namespace.to_owned()).or_default();
        if is_wanted {
            wanted.insert(policy.to_owned());
        } else {
            wanted.remove(policy);
            self.taken.remove(policy);
        }
        if wanted.is_empty() {
            self.wanted.remove(namespace);
        }
        let now = self.reported_of(namespace);
        for gone in before.difference(&now) {
            self.gathered.remove(gone);
        }
        before.symmetric_difference(&now).cloned().collect()
    }

    fn reported_of(&self, namespace: &str) -> BTreeSet<String> {
        let wanted = self.wanted.get(namespace).into_iter().flatten();
        wanted.take(MAX_POLICIES).cloned().collect()
    }

    /// Whether the policy has the annotation, and counts.
    pub fn is_reported(&self, policy: &str) -> bool {
        let wanted = self.wanted.get(namespace(policy)).into_iter().flatten();
        wanted.take(MAX_POLICIES).any(|name| name == policy)
    }

    /// Returns the sets of which droplets are to be asked, out of all that have rules of reported policies. Where there
    /// are too many, the first policy of each namespace goes first, then the second of each, and so on.
    pub fn choose(&self, sets: Vec<ReportedSet>) -> Vec<ReportedSet> {
        let mut by_policy: BTreeMap<(usize, Arc<str>), Vec<usize>> = BTreeMap::new();
        for (number, set) in sets.iter().enumerate() {
            for policy in &set.policies {
                let key = (self.place(policy), Arc::clone(policy));
                by_policy.entry(key).or_default().push(number);
            }
        }
        let mut room: BTreeMap<&str, usize> = BTreeMap::new();
        let mut chosen = BTreeSet::new();
        for numbers in by_policy.values() {
            for number in numbers.iter().take(MAX_SETS_OF_POLICY) {
                let used = room.entry(&sets[*number].vpc).or_default();
                if *used < MAX_SETS_OF_VPC && chosen.insert(*number) {
                    *used += 1;
                }
            }
        }
        drop(room);
        let sets = sets.into_iter().enumerate();
        sets.filter(|(number, _)| chosen.contains(number))
            .map(|(_, set)| set)
            .collect()
    }

    /// Returns the place of a policy among those of its namespace.
    fn place(&self, policy: &str) -> usize {
        let mut wanted = self.wanted.get(namespace(policy)).into_iter().flatten();
        wanted.position(|name| name == policy).unwrap_or(usize::MAX)
    }

    /// Adds what a droplet has reported of a policy.
    pub fn note(&mut self, policy: &str, reported: Gathered) {
        if self.is_reported(policy) {
            self.gathered.entry(policy.to_owned()).or_default().add(reported);
        }
    }

    /// Returns the policies of which something new can be written.
    pub fn due(&self, now: u64) -> Vec<String> {
        let due = self.gathered.keys().filter(|policy| self.is_due(policy, now));
        due.cloned().collect()
    }

    fn is_due(&self, policy: &str, now: u64) -> bool {
        let taken = self.taken.get(policy);
        taken.is_none_or(|taken| now.saturating_sub(*taken) >= WRITE_INTERVAL)
    }

    /// Takes what was gathered of a policy, if it can be written now and `may_write` says so too.
    pub fn take(&mut self, policy: &str, now: u64, may_write: impl FnOnce() -> bool) -> Option<Gathered> {
        if !self.gathered.contains_key(policy) || !self.is_due(policy, now) || !may_write() {
            return None;
        }
        self.taken.insert(policy.to_owned(), now);
        self.gathered.remove(policy)
    }

    /// Takes back what was taken and could not be written. It is due at once.
    pub fn give_back(&mut self, policy: &str, gathered: Gathered) {
        if self.is_reported(policy) {
            self.taken.remove(policy);
            self.note(policy, gathered);
        }
    }
}

/// Returns the namespace in the name of a NetworkPolicy; that of a ClusterNetworkPolicy has none.
fn namespace(policy: &str) -> &str {
    policy.split_once('/').map_or("", |(namespace, _)| namespace)
}

#[cfg(test)]
mod tests {
    use thuban_rows::builders::VNI;

    use super::*;

    fn peer(address: &str, time: u32) -> DeniedPeer {
        DeniedPeer {
            address: address.to_owned(),
            time: format!("2026-01-01T00:00:{time:02}.000Z"),
            ..DeniedPeer::default()
        }
    }

    fn gathered(packets: u64, address: &str, time: u32) -> Gathered {
        Gathered {
            packets,
            last_peers: vec![peer(address, time)],
        }
    }

    fn set(id: u32, policies: &[&str]) -> ReportedSet {
        ReportedSet {
            vpc: "red".into(),
            vni: VNI,
            id: PolicyId::new(id).unwrap(),
            policies: policies.iter().map(|policy| Arc::from(*policy)).collect(),
        }
    }

    #[test]
    fn each_peer_is_kept_once_and_ten_at_most() {
        let mut peers = Vec::new();
        note_peers(
            &mut peers,
            (0..12).map(|number| peer(&format!("10.0.0.{number}"), number)),
        );
        note_peers(&mut peers, [peer("10.0.0.5", 30), peer("10.0.0.5", 20)]);
        let kept: Vec<&str> = peers.iter().map(|peer| peer.address.as_str()).collect();
        let latest = [5, 11, 10, 9, 8, 7, 6, 4, 3, 2].map(|number| format!("10.0.0.{number}"));
        assert_eq!(kept, latest);
        assert!(peers[0].time.contains(":30."));
    }

    #[test]
    fn a_namespace_has_a_bounded_number_of_policies_reported() {
        let mut reports = DenialReports::default();
        for number in 0..20 {
            reports.set(&format!("a/p{number:02}"), true);
        }
        assert_eq!(reports.set("b/p", true), ["b/p"]);
        assert_eq!(reports.set("cluster", true), ["cluster"]);
        assert!(reports.is_reported("a/p15") && !reports.is_reported("a/p16"));
        reports.note("a/p16", gathered(1, "10.0.0.1", 0));
        assert!(reports.due(0).is_empty(), "it doesn't count");
        assert_eq!(
            reports.set("a/p03", false),
            ["a/p03", "a/p16"],
            "the next one counts"
        );
        assert!(reports.is_reported("a/p16") && !reports.is_reported("a/p03"));
        assert!(reports.set("c/p", false).is_empty());
        for policy in ["b/p", "cluster"] {
            reports.set(policy, false);
        }
        for number in 0..20 {
            reports.set(&format!("a/p{number:02}"), false);
        }
        assert!(reports.is_empty());
    }

    #[test]
    fn sets_of_a_namespace_leave_room_for_those_of_others() {
        let mut reports = DenialReports::default();
        let mut sets = Vec::new();
        for number in 0..16 {
            let policy = format!("a/p{number:02}");
            reports.set(&policy, true);
            sets.extend((1..=100).map(|id| set(number * 1000 + id, &[&policy])));
        }
        for policy in ["z/one", "z/two"] {
            reports.set(policy, true);
            sets.push(set(100_000 + policy.len() as u32, &[policy]));
            sets.push(set(200_000 + u32::from(policy == "z/two"), &[policy, "a/p00"]));
        }
        let chosen = reports.choose(sets);
        assert_eq!(chosen.len(), MAX_SETS_OF_VPC);
        let of = |policy: &str| {
            let its = chosen
                .iter()
                .filter(|set| set.policies.iter().any(|name| **name == *policy));
            its.count()
        };
        assert_eq!((of("z/one"), of("z/two")), (2, 2));
        assert_eq!(of("a/p01"), MAX_SETS_OF_POLICY);
        assert!(of("a/p15") < MAX_SETS_OF_POLICY, "the last ones lack room");
    }

    #[test]
    fn what_is_gathered_is_taken_once_a_minute() {
        let mut reports = DenialReports::default();
        reports.set("a/p", true);
        reports.note("a/p", gathered(3, "10.0.0.1", 1));
        reports.note("a/p", gathered(4, "10.0.0.2", 2));
        assert_eq!(reports.due(5), ["a/p"]);
        assert_eq!(reports.take("a/p", 5, || false), None, "too many writes");
        let taken = reports.take("a/p", 5, || true).unwrap();
        assert_eq!((taken.packets, taken.last_peers.len()), (7, 2));
        reports.note("a/p", gathered(1, "10.0.0.1", 3));
        assert!(reports.due(60_004).is_empty() && reports.take("a/p", 60_004, || true).is_none());
        assert_eq!(reports.due(60_005), ["a/p"]);
        let second = reports.take("a/p", 60_005, || true).unwrap();
        reports.give_back("a/p", second);
        assert_eq!(reports.take("a/p", 60_006, || true).unwrap().packets, 1);
        reports.note("a/p", gathered(1, "10.0.0.1", 3));
        reports.set("a/p", false);
        reports.set("a/p", true);
        assert!(reports.due(200_000).is_empty(), "nothing is left of before");
    }
}
