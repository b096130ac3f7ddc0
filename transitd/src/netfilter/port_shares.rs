//! The source ports of each VPC for connections that its pods make in the node's name. Two connections to one
//! destination need two ports, so a VPC that has many connections there must not use up the ports of others.
//!
//! Invariant: while a node has more than one VPC, no two VPCs have a port in common. So a VPC that comes when others
//! have used up their ports finds its own. The exceptions are VPCs from the ninth on: each gets ports that were another
//! VPC's, and finds those that the other VPC's connections have left. Pure.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

/// The least number of shares; there are always a power of two.
const MIN_SHARES: u16 = 8;
/// The most shares. A node has fewer pods.
const MAX_SHARES: u16 = 512;

/// The share of each VPC. A VPC keeps its share, or a part of it, for as long as it has pods on the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortShares {
    count: u16,
    /// VNIs, each with the number of its share, from 0.
    of: Vec<(u32, u16)>,
}

impl Default for PortShares {
    fn default() -> Self {
        Self {
            count: MIN_SHARES,
            of: Vec::new(),
        }
    }
}

impl PortShares {
    /// Takes back the shares of VPCs that are gone, and gives new VPCs theirs.
    pub fn follow(&mut self, vnis: &BTreeSet<u32>) {
        self.of.retain(|(vni, _)| vnis.contains(vni));
        self.merge();
        for vni in vnis {
            if self.share(*vni).is_none()
                && let Some(share) = self.take()
            {
                self.of.push((*vni, share));
            }
        }
    }

    fn share(&self, vni: u32) -> Option<u16> {
        let own = self.of.iter().find(|(of, _)| *of == vni);
        own.map(|(_, share)| *share)
    }

    /// Makes shares twice as large for as long as there are then enough for all VPCs. If two VPCs have the halves of
    /// one, the second VPC moves to another share. Only its new connections notice.
    fn merge(&mut self) {
        while self.count > MIN_SHARES && self.of.len() <= usize::from(self.count / 2) {
            self.count /= 2;
            let mut taken = BTreeSet::new();
            let mut homeless = Vec::new();
            for (index, (_, share)) in self.of.iter_mut().enumerate() {
                *share /= 2;
                if !taken.insert(*share) {
                    homeless.push(index);
                }
            }
            let free = (0..self.count).filter(|share| !taken.contains(share));
            for (index, share) in homeless.into_iter().zip(free) {
                self.of[index].1 = share;
            }
        }
    }

    /// Returns a share that no VPC has, if need be the upper half of one that is split.
    fn take(&mut self) -> Option<u16> {
        let taken: BTreeSet<u16> = self.of.iter().map(|(_, share)| *share).collect();
        let free = (0..self.count).find(|share| !taken.contains(share));
        if free.is_some() || self.count >= MAX_SHARES {
            return free;
        }
        self.count *= 2;
        for (_, share) in &mut self.of {
            *share *= 2;
        }
        Some(1)
    }

    /// Returns the VPC's part of all ports of pods: all of them for the only VPC, and for one that found no share.
    pub fn range(&self, vni: u32, all: &RangeInclusive<u16>) -> RangeInclusive<u16> {
        // Of the smallest share, so that the halves of a split share are exactly that share.
        let smallest = (all.end() - all.start()) / MAX_SHARES;
        let width = MAX_SHARES / self.count * smallest;
        let share = self.share(vni).filter(|_| self.of.len() > 1 && width > 0);
        share.map_or(all.clone(), |share| {
            let first = all.start() + share * width;
            first..=first + width - 1
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: RangeInclusive<u16> = 10_000..=32_767;

    fn follow(shares: &mut PortShares, vnis: impl IntoIterator<Item = u32>) -> Vec<RangeInclusive<u16>> {
        let vnis: BTreeSet<u32> = vnis.into_iter().collect();
        shares.follow(&vnis);
        vnis.iter().map(|vni| shares.range(*vni, &ALL)).collect()
    }

    #[test]
    fn only_vpc_has_all_ports_until_another_comes() {
        let mut shares = PortShares::default();
        assert_eq!(follow(&mut shares, [7]), [ALL]);
        assert_eq!(follow(&mut shares, [5, 7]), [12_816..=15_631, 10_000..=12_815]);
        assert_eq!(follow(&mut shares, [5]), [ALL]);
    }

    #[test]
    fn no_two_vpcs_have_a_port_in_common() {
        let mut shares = PortShares::default();
        for count in (2..=600).chain((2..=40).rev()) {
            let mut ranges = follow(&mut shares, 1..=count);
            ranges.sort_by_key(|range| *range.start());
            let have_own = count <= u32::from(MAX_SHARES);
            assert!(
                !have_own || ranges.is_sorted_by(|low, high| low.end() < high.start()),
                "{count}: {ranges:?}"
            );
            assert!(
                ranges
                    .iter()
                    .all(|range| ALL.contains(range.start()) && ALL.contains(range.end()))
            );
        }
    }

    #[test]
    fn a_vpc_keeps_its_share_while_others_come_and_go() {
        let mut shares = PortShares::default();
        let before = follow(&mut shares, 1..=8)[2].clone();
        let others = follow(&mut shares, [3, 20, 21, 22]);
        assert_eq!(others[0], before);
        // The ninth VPC gets half of another one's share, and everybody keeps a part of the own one.
        let split = follow(&mut shares, [3, 20, 21, 22, 23, 24, 25, 26, 27]);
        assert_eq!(split[0].start(), before.start());
        assert!(split[0].end() < before.end());
    }

    #[test]
    fn shares_grow_again_when_vpcs_go() {
        let mut shares = PortShares::default();
        let width = |range: &RangeInclusive<u16>| range.end() - range.start() + 1;
        follow(&mut shares, 1..=65);
        let kept = follow(&mut shares, 60..=64);
        assert!(kept.iter().all(|range| width(range) == 2816), "{kept:?}");
        let distinct: BTreeSet<u16> = kept.iter().map(|range| *range.start()).collect();
        assert_eq!(distinct.len(), 5);
    }

    #[test]
    fn few_ports_are_shared_by_all_rather_than_by_none() {
        let mut shares = PortShares::default();
        shares.follow(&BTreeSet::from([1, 2]));
        assert_eq!(shares.range(1, &(10..=14)), 10..=14);
    }
}
