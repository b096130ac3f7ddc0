//! What a set says of a peer: which of its rules match the peer, and the first of them at each point.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap};
use std::sync::{Arc, OnceLock};

use thuban_common::packet::ipv4::TCP;
use thuban_common::policy::{Action, Decision, LAST_POINT, NO_RULE, PortRange, point, ranked};
use thuban_rows::{Class, NamedPort, PolicyAction, PolicyPorts, PolicyRule, PolicySet, PolicyTier};

use super::lists::Contents;
use super::outside::Outside;

/// A set, with its rules by whom they match.
#[derive(Debug)]
pub struct Set {
    row: PolicySet,
    /// What the rules of anyone say of numbered ports.
    anyone: Vec<PortRange>,
    /// The ranks of the rules of anyone that name ports.
    naming: Vec<u16>,
    /// The ranks of the rules of each group.
    of_groups: HashMap<u64, Vec<u16>>,
    /// What [`Self::outside`] has returned.
    outside: OnceLock<Option<Arc<Outside>>>,
}

/// What sets name. A class has only those groups and names of ports of its endpoints that the sets of its operator
/// name.
#[derive(Debug, Default)]
pub struct Named {
    groups: BTreeSet<u64>,
    names: BTreeSet<String>,
}

impl Named {
    pub fn of<'a>(sets: impl Iterator<Item = &'a Set>) -> Self {
        let mut all = Self::default();
        for set in sets {
            all.add(set);
        }
        all
    }

    /// Adds what a set names. Returns whether anything is new.
    pub fn add(&mut self, set: &Set) -> bool {
        let before = self.groups.len() + self.names.len();
        self.groups.extend(set.of_groups.keys());
        for name in set.names() {
            if !self.names.contains(name) {
                self.names.insert(name.to_owned());
            }
        }
        self.groups.len() + self.names.len() > before
    }

    /// Returns what both have.
    pub fn intersection(&self, other: &Self) -> Self {
        Self {
            groups: self.groups.intersection(&other.groups).copied().collect(),
            names: self.names.intersection(&other.names).cloned().collect(),
        }
    }
}

/// What a set can tell of a class. It says the same of classes that look the same.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Look<'a> {
    /// Those that a rule of the set names.
    groups: Vec<u64>,
    names: Option<&'a BTreeSet<NamedPort>>,
    /// Groups of the set that the class does not say whether it has.
    unsure: Vec<u64>,
    /// Its ports may have names of the set that it does not say.
    has_unsure_names: bool,
}

/// The ports of the other side that have names.
#[derive(Clone, Copy)]
enum Names<'a> {
    Known(&'a BTreeSet<NamedPort>),
    /// Any port may have any name.
    Unknown,
}

impl Set {
    pub fn new(row: PolicySet) -> Self {
        let (mut anyone, mut naming) = (Vec::new(), Vec::new());
        let mut of_groups: HashMap<u64, Vec<u16>> = HashMap::new();
        for (rank, rule) in asked(&row) {
            if rule.anyone {
                anyone.extend(numbered(rule, decision(rank, rule)));
                let is_name = |ports: &PolicyPorts| matches!(ports, PolicyPorts::Named(..));
                naming.extend(rule.ports.iter().any(is_name).then_some(rank));
                continue;
            }
            for group in &rule.groups {
                of_groups.entry(*group).or_default().push(rank);
            }
        }
        Self {
            anyone: sweep(anyone),
            naming,
            of_groups,
            outside: OnceLock::new(),
            row,
        }
    }

    pub const fn row(&self) -> &PolicySet {
        &self.row
    }

    /// Returns the names of ports that rules name.
    fn names(&self) -> impl Iterator<Item = &str> {
        let ports = self.row.rules.iter().flat_map(|rule| &rule.ports);
        ports.filter_map(|ports| match ports {
            PolicyPorts::Named(name, _) => Some(&**name),
            PolicyPorts::Range(..) => None,
        })
    }

    /// Returns how a class of the VPC looks to the set. `says`: the groups and names that the class says whether it has
    /// them; `None`: all.
    pub fn look<'a>(&self, class: &'a Class, says: Option<&Named>) -> Look<'a> {
        let groups = class.groups.iter().copied();
        let is_unsure = |group: &u64| {
            says.is_some_and(|says| !says.groups.contains(group)) && !class.groups.contains(group)
        };
        let mut unsure: Vec<u64> = self.of_groups.keys().copied().filter(is_unsure).collect();
        unsure.sort_unstable();
        let says_name = |name: &str| says.is_none_or(|says| says.names.contains(name));
        Look {
            groups: groups
                .filter(|group| self.of_groups.contains_key(group))
                .collect(),
            names: self.row.is_egress.then_some(&class.names),
            unsure,
            has_unsure_names: self.row.is_egress && !self.names().all(says_name),
        }
    }

    /// Returns what the set says of classes that look like this, blocks apart. Where a class may match, a rule that
    /// accepts doesn't match, and any other rule denies.
    pub fn of_classes(&self, look: &Look<'_>) -> Vec<PortRange> {
        let of_groups = look.groups.iter().filter_map(|group| self.of_groups.get(group));
        let ranks: BTreeSet<&u16> = of_groups.flatten().chain(&self.naming).collect();
        let mut spans = self.anyone.clone();
        for rank in ranks {
            let rule = &self.row.rules[usize::from(*rank)];
            let decision = decision(*rank, rule);
            spans.extend(numbered(rule, decision));
            if let Some(names) = look.names {
                spans.extend(named(rule, Names::Known(names), decision));
            }
            if look.has_unsure_names && action(rule) != Action::Accept {
                spans.extend(named(rule, Names::Unknown, denies(*rank, rule)));
            }
        }
        let unsure = look.unsure.iter().filter_map(|group| self.of_groups.get(group));
        for rank in unsure.flatten() {
            let rule = &self.row.rules[usize::from(*rank)];
            if action(rule) != Action::Accept {
                spans.extend(numbered(rule, denies(*rank, rule)));
                spans.extend(named(rule, Names::Unknown, denies(*rank, rule)));
            }
        }
        sweep(spans)
    }

    /// Returns what the set says of addresses outside of the VPC, blocks apart. No port has a name there.
    pub fn of_outside(&self) -> Vec<PortRange> {
        self.anyone.clone()
    }

    /// Returns what the set accepts of addresses outside of the VPC, blocks and all; `None` if that needs more lists
    /// than a VPC may have.
    pub fn outside(&self, most_lists: usize) -> Option<Arc<Outside>> {
        let new = || Some(Arc::new(Outside::new(self, &mut Contents::new(most_lists)).ok()?));
        self.outside.get_or_init(new).clone()
    }

    /// Returns what the set says of a class that isn't known, blocks apart. The class may be in any group, and its
    /// ports may have any name. A rule that accepts doesn't match for that. Any other rule matches, and denies.
    pub fn of_unknown(&self) -> Vec<PortRange> {
        let mut spans = self.anyone.clone();
        for (rank, rule) in asked(&self.row) {
            if action(rule) == Action::Accept {
                continue;
            }
            let denies = denies(rank, rule);
            if !rule.anyone && !rule.groups.is_empty() {
                spans.extend(numbered(rule, denies));
            }
            if rule.anyone || !rule.groups.is_empty() {
                spans.extend(named(rule, Names::Unknown, denies));
            }
        }
        sweep(spans)
    }
}

/// Returns the rules that are asked, with their ranks.
pub fn asked(row: &PolicySet) -> impl Iterator<Item = (u16, &PolicyRule)> {
    let rules = (0..).zip(&row.rules);
    rules.filter(|(_, rule)| rule.tier != PolicyTier::Baseline || !row.is_isolated)
}

/// Returns what a rule says where it matches.
pub fn decision(rank: u16, rule: &PolicyRule) -> Decision {
    in_tier(rule.tier, ranked(rank, action(rule)))
}

/// Returns what a rule says if it denies where it may match.
fn denies(rank: u16, rule: &PolicyRule) -> Decision {
    in_tier(rule.tier, ranked(rank, Action::Deny))
}

const fn action(rule: &PolicyRule) -> Action {
    match (rule.action, rule.tier) {
        // Behind the last tier everything passes.
        (PolicyAction::Accept, _) | (PolicyAction::Pass, PolicyTier::Baseline) => Action::Accept,
        (PolicyAction::Deny, _) => Action::Deny,
        (PolicyAction::Pass, _) => Action::Pass,
    }
}

fn in_tier(tier: PolicyTier, ranked: u16) -> Decision {
    match tier {
        PolicyTier::Admin => Decision {
            admin: ranked,
            ..Decision::NONE
        },
        PolicyTier::NetworkPolicy | PolicyTier::Baseline => Decision {
            rest: ranked,
            ..Decision::NONE
        },
    }
}

/// Returns the points of a rule's ports that are numbers, each with the decision.
pub fn numbered(rule: &PolicyRule, decision: Decision) -> impl Iterator<Item = PortRange> {
    let all = rule.ports.is_empty().then_some((0, LAST_POINT));
    let ranges = rule.ports.iter().filter_map(|ports| match *ports {
        PolicyPorts::Range(protocol, first, last) => Some((point(protocol, first), point(protocol, last))),
        PolicyPorts::Named(..) => None,
    });
    all.into_iter()
        .chain(ranges)
        .map(move |points| span(points, decision))
}

/// Returns the points of a rule's ports that are names, each with the decision.
fn named(rule: &PolicyRule, names: Names<'_>, decision: Decision) -> Vec<PortRange> {
    let mut spans = Vec::new();
    for ports in &rule.ports {
        let PolicyPorts::Named(name, protocol) = ports else {
            continue;
        };
        match names {
            Names::Known(known) => {
                let is_meant = |port: &&NamedPort| {
                    *port.name == **name && protocol.is_none_or(|protocol| protocol == port.protocol)
                };
                let points = known
                    .iter()
                    .filter(is_meant)
                    .map(|port| point(port.protocol, port.port));
                spans.extend(points.map(|point| span((point, point), decision)));
            }
            Names::Unknown => {
                let first = point(protocol.unwrap_or(TCP), 0);
                let last = protocol.map_or(LAST_POINT, |protocol| point(protocol, u16::MAX));
                spans.push(span((first, last), decision));
            }
        }
    }
    spans
}

fn span((first, last): (u32, u32), decision: Decision) -> PortRange {
    PortRange {
        first,
        last,
        decision: decision.word(),
    }
}

/// Returns what the first span of each tier says, wherever one says something.
pub fn sweep(mut spans: Vec<PortRange>) -> Vec<PortRange> {
    spans.sort_by_key(|span| span.first);
    let mut bounds: Vec<u32> = spans
        .iter()
        .flat_map(|span| [span.first, span.last + 1])
        .collect();
    bounds.sort_unstable();
    bounds.dedup();
    let (mut admin, mut rest) = (BinaryHeap::new(), BinaryHeap::new());
    let mut spans = spans.into_iter().peekable();
    let mut ranges: Vec<PortRange> = Vec::new();
    for bound in bounds.windows(2) {
        let (first, last) = (bound[0], bound[1] - 1);
        while let Some(span) = spans.next_if(|span| span.first == first) {
            let decision = Decision::read(span.decision);
            admin.push(Reverse((decision.admin, span.last)));
            rest.push(Reverse((decision.rest, span.last)));
        }
        let decision = Decision {
            admin: least(&mut admin, first),
            rest: least(&mut rest, first),
        };
        if decision == Decision::NONE {
            continue;
        }
        let decision = decision.word();
        match ranges.last_mut() {
            Some(range) if range.last + 1 == first && range.decision == decision => range.last = last,
            _ => ranges.push(PortRange {
                first,
                last,
                decision,
            }),
        }
    }
    ranges
}

/// Returns the least rule that reaches the point. Rules that end before it are dropped.
fn least(rules: &mut BinaryHeap<Reverse<(u16, u32)>>, point: u32) -> u16 {
    while let Some(Reverse((rule, last))) = rules.peek() {
        if *last >= point {
            return *rule;
        }
        rules.pop();
    }
    NO_RULE
}
