//! What a set says of addresses outside of its VPC, as ranges that the node's own stack can look up.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use thuban_common::policy::{Decision, LAST_POINT, PortRange};

use super::blocks::{self, Prefix};
use super::compile::{Set, sweep};
use super::lists::{Content, Contents};
use super::store::NoRoom;

/// Ranges of points (`thuban_common::policy::point`), ascending, none touched by another: first and last.
pub type Points = Arc<[(u32, u32)]>;

/// What a set accepts of whom outside.
#[derive(Debug, PartialEq, Eq)]
pub struct Outside {
    /// What the set accepts of addresses that are in none of the ranges.
    pub rest: Points,
    /// Ranges of addresses, each of one family, ascending and disjoint: first and last, and what the set accepts of
    /// them.
    pub ranges: Vec<(IpAddr, IpAddr, Points)>,
}

/// The most ranges of ports that are compared for what nftables is to look up of a set, so that no VPC keeps the node
/// busy.
const MAX_COMPARED: usize = 1 << 20;

/// Returns an error if an ingress set says too many things of addresses outside: `others` of all of them, and more of
/// these blocks.
pub fn admit(others: &Content, blocks: &[(Prefix, Content)]) -> Result<(), NoRoom> {
    let different: HashSet<&Content> = blocks.iter().map(|(_, content)| content).collect();
    let compared = different.iter().map(|content| content.len() + others.len());
    let compared = compared.sum::<usize>();
    (compared <= MAX_COMPARED).then_some(()).ok_or(NoRoom::Set)
}

impl Outside {
    pub fn new(set: &Set, contents: &mut Contents) -> Result<Self, NoRoom> {
        let row = set.row();
        let others = set.of_outside();
        let mut known: HashMap<Content, Points> = HashMap::new();
        let mut accepted = |more: Content| {
            let spans = || others.iter().chain(&*more).copied().collect();
            let new = || accepted(&sweep(spans()), row.is_isolated);
            known.entry(more.clone()).or_insert_with(new).clone()
        };
        let rest = accepted([].into());
        let prefixes = blocks::prefixes(row, contents)?.into_iter();
        let prefixes = prefixes.map(|(prefix, content)| (prefix, accepted(content)));
        let ranges = disjoint(prefixes).into_iter();
        let ranges = ranges.filter(|(.., points)| *points != rest);
        let address = |bits: u128| Ipv6Addr::from_bits(bits).to_canonical();
        let ranges = ranges.map(|(first, last, points)| (address(first), address(last), points));
        Ok(Self {
            ranges: ranges.collect(),
            rest,
        })
    }
}

/// Returns the points that pass by these ranges.
fn accepted(ranges: &[PortRange], is_isolated: bool) -> Points {
    let mut accepted: Vec<(u32, u32)> = Vec::new();
    let mut add = |first, last, decision: Decision| {
        if first > last || !decision.verdict(is_isolated).0 {
            return;
        }
        match accepted.last_mut() {
            Some(before) if before.1 + 1 == first => before.1 = last,
            _ => accepted.push((first, last)),
        }
    };
    let mut next = 0;
    for range in ranges {
        if range.first > next {
            add(next, range.first - 1, Decision::NONE);
        }
        add(range.first, range.last, Decision::read(range.decision));
        next = range.last + 1;
    }
    add(next, LAST_POINT, Decision::NONE);
    accepted.into()
}

/// Disjoint ranges of addresses, ascending.
struct Ranges<T> {
    ranges: Vec<(u128, u128, T)>,
    /// The first address that is in no range yet; `None` behind the last address.
    next: Option<u128>,
}

impl<T> Ranges<T> {
    /// Ends at an address what is in no range yet.
    fn end(&mut self, last: u128, of: T) {
        if let Some(first) = self.next.filter(|first| *first <= last) {
            self.ranges.push((first, last, of));
            self.next = last.checked_add(1);
        }
    }
}

/// Returns the addresses of which each prefix is the longest one that holds them. The prefixes are in order.
fn disjoint<T: Clone>(prefixes: impl Iterator<Item = (Prefix, T)>) -> Vec<(u128, u128, T)> {
    let mut ranges = Ranges {
        ranges: Vec::new(),
        next: Some(0),
    };
    // The prefixes that hold the present one, by their last addresses.
    let mut path: Vec<(u128, T)> = Vec::new();
    for (prefix, of) in prefixes {
        let first = u128::from_be_bytes(prefix.address);
        while let Some((last, of)) = path.pop_if(|(last, _)| *last < first) {
            ranges.end(last, of);
        }
        if let (Some((_, of)), Some(before)) = (path.last(), first.checked_sub(1)) {
            ranges.end(before, of.clone());
        }
        ranges.next = Some(first);
        let rest = u128::MAX.checked_shr(prefix.length.into()).unwrap_or(0);
        path.push((first | rest, of));
    }
    while let Some((last, of)) = path.pop() {
        ranges.end(last, of);
    }
    ranges.ranges
}
