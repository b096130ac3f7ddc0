//! The blocks of a set as prefixes, of which a packet's address finds the longest one that holds it.
//!
//! Invariant: the prefixes are the blocks' own ranges and excepts. So all addresses of a prefix that no longer one
//! holds are in the same blocks. What these say together is what the prefix says.

use std::collections::BTreeMap;

use ipnet::IpNet;
use thuban_common::policy::PortRange;
use thuban_common::tables::Address;
use thuban_rows::PolicySet;

use super::compile::{asked, decision, numbered, sweep};
use super::lists::{Content, Contents};
use super::store::NoRoom;

/// The most spans that are compared for the blocks of a set, so that no VPC keeps the node busy.
const MAX_SPANS: usize = 1 << 19;

/// A range of addresses as the key of BLOCKS has it. Ordered, so that what it holds comes directly behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Prefix {
    pub address: Address,
    /// Bits of the address.
    pub length: u8,
}

/// All of IPv4.
const IPV4: Prefix = Prefix {
    address: [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 0, 0, 0, 0],
    length: 96,
};

impl From<IpNet> for Prefix {
    fn from(range: IpNet) -> Self {
        let (address, length) = match range {
            IpNet::V4(range) => (range.network().to_ipv6_mapped(), 96 + range.prefix_len()),
            IpNet::V6(range) => (range.network(), range.prefix_len()),
        };
        Self {
            address: address.octets(),
            length,
        }
    }
}

impl Prefix {
    /// The first one, in order: all addresses.
    pub const ALL: Self = Self {
        address: [0; 16],
        length: 0,
    };

    pub fn holds(&self, other: &Self) -> bool {
        let differs = u128::from_be_bytes(self.address) ^ u128::from_be_bytes(other.address);
        self.length <= other.length && differs.leading_zeros() >= self.length.into()
    }
}

/// The blocks that begin or are excepted at a prefix, by their numbers.
#[derive(Default)]
struct Edge {
    ranges: Vec<usize>,
    excepts: Vec<usize>,
}

/// Returns the prefixes of a set's blocks, and what the set says of each. Rules that name all of their ports match
/// nothing here.
pub fn prefixes(set: &PolicySet, contents: &mut Contents) -> Result<Vec<(Prefix, Content)>, NoRoom> {
    let mut ranks = Vec::new();
    let mut edges: BTreeMap<Prefix, Edge> = BTreeMap::new();
    for (rank, rule) in asked(set) {
        if numbered(rule, decision(rank, rule)).next().is_none() {
            continue;
        }
        for block in &rule.blocks {
            edges
                .entry(block.range.into())
                .or_default()
                .ranges
                .push(ranks.len());
            for except in &block.except {
                edges
                    .entry((*except).into())
                    .or_default()
                    .excepts
                    .push(ranks.len());
            }
            ranks.push(rank);
        }
    }
    // A prefix of IPv6 that holds the addresses into which IPv4 is mapped says nothing of IPv4.
    if edges.keys().any(|prefix| prefix.holds(&IPV4)) {
        edges.entry(IPV4).or_default();
    }
    let mut found = Vec::new();
    let mut compared = 0;
    // The prefixes that hold the present one, each with the blocks that it is in.
    let mut path: Vec<(Prefix, Vec<usize>)> = Vec::new();
    for (prefix, edge) in edges {
        while path.pop_if(|(outer, _)| !outer.holds(&prefix)).is_some() {}
        let mut blocks = match path.last() {
            Some((_, blocks)) if prefix != IPV4 => blocks.clone(),
            _ => Vec::new(),
        };
        blocks.extend(edge.ranges);
        blocks.retain(|block| edge.excepts.binary_search(block).is_err());
        let spans = spans(set, blocks.iter().map(|block| ranks[*block]));
        compared += spans.len();
        contents.work += spans.len();
        if compared > MAX_SPANS {
            return Err(NoRoom::Set);
        }
        found.push((prefix, contents.add(sweep(spans))?));
        path.push((prefix, blocks));
    }
    Ok(found)
}

/// Returns what rules say of their numbered ports.
fn spans(set: &PolicySet, ranks: impl Iterator<Item = u16>) -> Vec<PortRange> {
    let rules = ranks.map(|rank| (rank, &set.rules[usize::from(rank)]));
    rules
        .flat_map(|(rank, rule)| numbered(rule, decision(rank, rule)))
        .collect()
}
