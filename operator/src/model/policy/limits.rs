//! How much the NetworkPolicies of a namespace may say together, so that their author costs nobody else: no time or
//! memory of the operator, and no rows of droplets.
//!
//! The oldest policies count. Those beyond a limit isolate the pods that they select, and accept nothing.
//!
//! Invariant: which policies count depends on the policies that there are alone. The change of one costs as much as
//! those that count or are closed one by one, however many there are.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::networking::v1::{NetworkPolicyPeer, NetworkPolicySpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thiserror::Error;

use super::compiled::Policy;

/// The most NetworkPolicies of a namespace that count.
pub const MAX_POLICIES: usize = 500;
/// The most entries of these policies, see [`entries`].
pub const MAX_ENTRIES: usize = 20_000;
/// The most different selectors of their peers. Each is matched against the pods of all VPCs.
pub const MAX_PEERS: usize = 1_000;
/// The most entries of the sets of a namespace's pods, in one VPC: droplets with pods of the VPC have all of them.
pub const MAX_SET_ENTRIES: usize = 100_000;
/// The most policies that are closed one by one. If there are more, all pods of the namespace are closed.
const MAX_CLOSED: usize = 500;

/// What a namespace has too much of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Limit {
    #[error("has more than {MAX_POLICIES} NetworkPolicies")]
    Policies,
    #[error(
        "has NetworkPolicies with more than {MAX_ENTRIES} entries (a rule has its peers times its ports)"
    )]
    Entries,
    #[error("has NetworkPolicies whose peers have more than {MAX_PEERS} different selectors")]
    Peers,
}

/// Why a policy does not count, for its author.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    limit: Limit,
    /// All pods of the namespace are isolated.
    is_all: bool,
}

impl fmt::Display for Refused {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let isolated = if self.is_all {
            "all pods of the namespace are isolated"
        } else {
            "the pods that it selects are isolated"
        };
        write!(
            formatter,
            "the namespace {}, of which the oldest count: this one accepts nothing, and {isolated}; delete or join \
             policies",
            self.limit
        )
    }
}

/// Returns how many entries a policy has: those of its own selector, and of each rule its peers times its ports. A
/// selector counts its labels and values, a block its exceptions.
pub fn entries(spec: &NetworkPolicySpec) -> usize {
    let rule = |peers: Option<&Vec<NetworkPolicyPeer>>, ports: Option<usize>| {
        let peers = peers.into_iter().flatten().map(of_peer).sum::<usize>();
        peers.max(1).saturating_mul(ports.unwrap_or_default().max(1))
    };
    let ingress = spec.ingress.iter().flatten();
    let ingress = ingress.map(|given| rule(given.from.as_ref(), given.ports.as_ref().map(Vec::len)));
    let egress = spec.egress.iter().flatten();
    let egress = egress.map(|given| rule(given.to.as_ref(), given.ports.as_ref().map(Vec::len)));
    let subject = spec.pod_selector.as_ref().map_or(0, of_selector);
    ingress.chain(egress).fold(subject, usize::saturating_add)
}

fn of_peer(peer: &NetworkPolicyPeer) -> usize {
    let block = peer
        .ip_block
        .iter()
        .map(|block| 1 + block.except.iter().flatten().count());
    let selectors = peer
        .namespace_selector
        .iter()
        .chain(&peer.pod_selector)
        .map(of_selector);
    block.chain(selectors).sum::<usize>().max(1)
}

fn of_selector(selector: &LabelSelector) -> usize {
    let expressions = selector.match_expressions.iter().flatten();
    let values = expressions.map(|expression| expression.values.iter().flatten().count().max(1));
    selector.match_labels.iter().flatten().count() + values.sum::<usize>()
}

/// The age of a policy and its name: older ones are first.
type Place = (i64, Arc<str>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Counts,
    Closed(Limit),
    /// It is closed with all pods of the namespace.
    ClosedWithAll(Limit),
}

#[derive(Debug)]
struct Asked {
    policy: Arc<Policy>,
    entries: usize,
    /// None: it was not judged yet.
    verdict: Option<Verdict>,
}

impl Asked {
    fn judge(&mut self, place: &Place, verdict: Verdict, seen: &mut Vec<Seen>) {
        if self.verdict == Some(verdict) {
            return;
        }
        self.verdict = Some(verdict);
        let policy = match verdict {
            Verdict::Counts => Some(Arc::clone(&self.policy)),
            Verdict::Closed(_) => Some(Arc::new(self.policy.closed())),
            Verdict::ClosedWithAll(_) => None,
        };
        seen.push((Arc::clone(&place.1), policy));
    }
}

/// A policy by its name, as pods see it from now on. None: not at all.
pub type Seen = (Arc<str>, Option<Arc<Policy>>);

/// Returns the name of the policy that closes all pods of a namespace. No NetworkPolicy has it.
fn closing_name(namespace: &str) -> String {
    format!("{namespace}/*")
}

/// What the policies of a namespace that count have together.
#[derive(Debug, Default)]
struct Sum {
    policies: usize,
    entries: usize,
    peers: HashSet<u64>,
    /// The limit that was reached.
    reached: Option<Limit>,
}

impl Sum {
    /// Adds a policy. An error says why it does not count.
    fn add(&mut self, asked: &Asked) -> Result<(), Limit> {
        let groups = &asked.policy.groups;
        // One that is too large by itself takes no room from others.
        if asked.entries > MAX_ENTRIES {
            return Err(Limit::Entries);
        }
        if groups.len() > MAX_PEERS {
            return Err(Limit::Peers);
        }
        if let Some(reached) = self.reached {
            return Err(reached);
        }
        let new = groups.iter().filter(|group| !self.peers.contains(&group.id()));
        let reached = if self.policies == MAX_POLICIES {
            Limit::Policies
        } else if self.entries + asked.entries > MAX_ENTRIES {
            Limit::Entries
        } else if self.peers.len() + new.count() > MAX_PEERS {
            Limit::Peers
        } else {
            self.policies += 1;
            self.entries += asked.entries;
            self.peers.extend(groups.iter().map(|group| group.id()));
            return Ok(());
        };
        self.reached = Some(reached);
        Err(reached)
    }
}

/// The NetworkPolicies of a namespace.
#[derive(Debug, Default)]
pub struct Share {
    ages: HashMap<Arc<str>, i64>,
    asked: BTreeMap<Place, Asked>,
    /// Those that count or are closed one by one.
    first: BTreeSet<Place>,
}

impl Share {
    /// Sets or removes a policy, which was made at a time and has so many entries. Returns what pods see otherwise
    /// now.
    pub fn set(
        &mut self,
        namespace: &str,
        name: &Arc<str>,
        given: Option<(i64, usize, Policy)>,
    ) -> Vec<Seen> {
        let was_over = self.is_over();
        let mut seen = Vec::new();
        if let Some(age) = self.ages.remove(name) {
            let place = (age, Arc::clone(name));
            self.asked.remove(&place);
            self.first.remove(&place);
        }
        if let Some((age, entries, policy)) = given {
            let asked = Asked {
                policy: Arc::new(policy),
                entries,
                verdict: None,
            };
            self.ages.insert(Arc::clone(name), age);
            self.asked.insert((age, Arc::clone(name)), asked);
        } else {
            seen.push((Arc::clone(name), None));
        }
        self.judge(name, &mut seen);
        if self.is_over() != was_over {
            let name = closing_name(namespace);
            let all = self
                .is_over()
                .then(|| Arc::new(Policy::closing_all(&name, namespace)));
            seen.push((name.into(), all));
        }
        seen
    }

    pub fn is_empty(&self) -> bool {
        self.asked.is_empty()
    }

    /// Whether all pods of the namespace are closed.
    fn is_over(&self) -> bool {
        self.first.len() < self.asked.len()
    }

    /// Returns why a policy does not count; none: it does, or there is no such policy.
    pub fn refused(&self, name: &str) -> Option<Refused> {
        let (name, age) = self.ages.get_key_value(name)?;
        match self.asked.get(&(*age, Arc::clone(name)))?.verdict? {
            Verdict::Counts => None,
            Verdict::Closed(limit) => Some(Refused { limit, is_all: false }),
            Verdict::ClosedWithAll(limit) => Some(Refused { limit, is_all: true }),
        }
    }

    /// Decides which policies count, after a change of the one of that name.
    fn judge(&mut self, changed: &Arc<str>, seen: &mut Vec<Seen>) {
        let mut sum = Sum::default();
        let (mut first, mut closed, mut last) = (BTreeSet::new(), 0, Limit::Policies);
        for (place, asked) in &mut self.asked {
            let verdict = match sum.add(asked) {
                Ok(()) => Verdict::Counts,
                Err(limit) => {
                    (last, closed) = (limit, closed + 1);
                    Verdict::Closed(limit)
                }
            };
            if closed > MAX_CLOSED {
                break;
            }
            first.insert(place.clone());
            asked.judge(place, verdict, seen);
        }
        let mut beyond = std::mem::take(&mut self.first);
        beyond.extend(self.ages.get(changed).map(|age| (*age, Arc::clone(changed))));
        for place in beyond.difference(&first) {
            if let Some(asked) = self.asked.get_mut(place) {
                asked.judge(place, Verdict::ClosedWithAll(last), seen);
            }
        }
        self.first = first;
    }
}

#[cfg(test)]
mod tests;
