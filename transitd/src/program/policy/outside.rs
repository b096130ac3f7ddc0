//! What a set says of addresses outside of its VPC, as ranges that the node's own stack can look up.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use thuban_common::host_stack::NFT_POLICY_TABLE;
use thuban_common::policy::{Decision, LAST_POINT, PortRange};

use super::blocks::{self, Prefix};
use super::compile::{Set, sweep};
use super::lists::{Content, Contents};
use super::store::{NoRoom, SHARES, vni};
use crate::dataplane::reserve::Shared;

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

/// The most that all ingress sets of a node may cost nftables. nft takes about 60 us for each element, and holds the
/// kernel's lock for as long.
pub const STACK_CAPACITY: usize = 262_144;
/// What a set of ports costs nftables besides its elements, because each one makes the next one dearer.
const PORT_SET_COST: usize = 64;

/// What each ingress set costs nftables. VPCs share it as they share the maps.
#[derive(Debug, Default)]
pub struct Costs(BTreeMap<u64, usize>);

impl Costs {
    /// Returns an error unless a set may cost this instead of what it does now.
    pub fn admit(&self, set: u64, cost: usize) -> Result<(), NoRoom> {
        let mut of_vpcs: HashMap<u32, usize> = HashMap::new();
        for (other, held) in self.0.iter().filter(|(other, _)| **other != set) {
            *of_vpcs.entry(vni(*other)).or_default() += held;
        }
        let now: usize = of_vpcs.values().sum();
        let own = *of_vpcs.entry(vni(set)).or_default() + cost;
        let shared = Shared::quarter_reserved(STACK_CAPACITY);
        let held = || of_vpcs.into_values().collect();
        if now + cost > STACK_CAPACITY {
            return Err(NoRoom::Table(NFT_POLICY_TABLE));
        }
        let has_room = own <= STACK_CAPACITY / SHARES && shared.admits(own, now + cost, held, now);
        has_room.then_some(()).ok_or(NoRoom::Share(NFT_POLICY_TABLE))
    }

    pub fn set(&mut self, set: u64, cost: usize) {
        self.0.insert(set, cost);
    }

    /// Returns whether the set had cost anything.
    pub fn remove(&mut self, set: u64) -> bool {
        self.0.remove(&set).is_some()
    }
}

/// Returns what an ingress set costs nftables, or an error if the set says too many things of addresses outside:
/// `others` of all of them, and more of these blocks.
pub fn cost(is_isolated: bool, others: &Content, blocks: &[(Prefix, Content)]) -> Result<usize, NoRoom> {
    let different: HashSet<&Content> = blocks.iter().map(|(_, content)| content).collect();
    let compared = different.iter().map(|content| content.len() + others.len());
    if compared.sum::<usize>() > MAX_COMPARED {
        return Err(NoRoom::Set);
    }
    let mut known: HashSet<Points> = HashSet::new();
    let mut cost = blocks.len();
    let nothing = Content::from([]);
    for more in different.into_iter().chain([&nothing]) {
        let points = accepted(
            &sweep(others.iter().chain(&**more).copied().collect()),
            is_isolated,
        );
        if !known.contains(&points) {
            cost += cost_of(&points);
            known.insert(points);
        }
        if cost > STACK_CAPACITY / SHARES {
            return Err(NoRoom::Set);
        }
    }
    Ok(cost)
}

/// Returns what nftables need to accept these points.
fn cost_of(points: &[(u32, u32)]) -> usize {
    match points {
        // A verdict says it, without a set of ports.
        [] | [(0, LAST_POINT)] => 1,
        ranges => ranges.len() + PORT_SET_COST,
    }
}

impl Outside {
    /// Returns about what it costs nftables.
    pub fn cost(&self) -> usize {
        let points = self.ranges.iter().map(|(.., points)| points);
        let points: HashSet<&Points> = points.chain([&self.rest]).collect();
        self.ranges.len() + points.into_iter().map(|points| cost_of(points)).sum::<usize>()
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: usize = STACK_CAPACITY / SHARES;

    #[test]
    fn no_vpc_takes_what_nftables_has_room_for_of_others() {
        let set = |vpc: u64, number: u64| (vpc << 24) | number;
        let share = Err(NoRoom::Share(NFT_POLICY_TABLE));
        let mut costs = Costs::default();
        costs.set(set(1, 1), SHARE - 10);
        assert_eq!(costs.admit(set(1, 2), 10), Ok(()));
        assert_eq!(costs.admit(set(1, 2), 11), share);
        assert_eq!(costs.admit(set(1, 1), SHARE), Ok(()), "in its own place");
        for vpc in 1..=3 {
            assert_eq!(costs.admit(set(vpc, 1), SHARE), Ok(()));
            costs.set(set(vpc, 1), SHARE);
        }
        let reserve = SHARE / 32;
        assert_eq!(costs.admit(set(4, 1), reserve), Ok(()));
        assert_eq!(costs.admit(set(4, 1), reserve + 1), share);
        for vpc in 4..=64 {
            let admit = |cost| costs.admit(set(vpc, 1), cost);
            let reserve = match vpc {
                ..=16 => reserve,
                17..=32 => reserve / 4,
                _ => reserve / 8,
            };
            assert_eq!([admit(reserve), admit(reserve + 1)], [Ok(()), share], "{vpc}");
            costs.set(set(vpc, 1), reserve);
        }
        for vpc in 4..=64 {
            costs.remove(set(vpc, 1));
        }
        assert!(costs.remove(set(1, 1)) && !costs.remove(set(1, 1)));
        assert_eq!(costs.admit(set(4, 1), SHARE), Ok(()));
    }
}
