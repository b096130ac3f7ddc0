//! The share of each VPC in a table: how many entries are its own, no matter what other VPCs do.
//!
//! Invariant: there is always room for the entries that each VPC lacks of its reserve. A VPC goes beyond its reserve
//! only while a part of the table is free, and all reserves together are at most that part. Pure.

/// A table that VPCs share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    pub capacity: usize,
    /// The entries of all reserves together.
    pub reserved: usize,
    /// The least number of VPCs that the reserves are for.
    pub least_vpcs: usize,
}

impl Shared {
    /// A table with room for so many entries, of which half is for reserves: CONNECTIONS or FLOWS.
    pub const fn half_reserved(capacity: usize) -> Self {
        Self {
            capacity,
            reserved: capacity / 2,
            least_vpcs: 4,
        }
    }

    /// A table of which a quarter is for reserves: one that transitd fills. Each of 16 VPCs gets 512 rows of SLOTS, and
    /// half of the quarter stays for VPCs behind them. 512 rows are enough for 512 ports with up to four backends.
    pub const fn quarter_reserved(capacity: usize) -> Self {
        Self {
            capacity,
            reserved: capacity / 4,
            least_vpcs: 32,
        }
    }

    /// Whether a VPC may come to have `own` entries of `total`. `held`: the entries of each VPC that has any, and of
    /// this one; `now`: all entries, without those that are to come. As many VPCs again may come and find a reserve.
    pub fn admits(self, own: usize, total: usize, held: impl FnOnce() -> Vec<usize>, now: usize) -> bool {
        if self.is_free(total) {
            return true;
        }
        let held = held();
        own <= self.reserve(&held, self.parts(2 * held.len()), now)
    }

    /// Returns the number of entries up to which VPCs may go beyond their reserves.
    pub fn shared(self) -> usize {
        self.capacity - self.reserved
    }

    /// The number of VPCs that reserves are for, if there are so many. It is a power of two, so that reserves rarely
    /// change.
    pub fn parts(self, vpcs: usize) -> usize {
        vpcs.max(self.least_vpcs).next_power_of_two()
    }

    /// Whether a VPC may go beyond its reserve in a table that then has so many entries.
    pub fn is_free(self, total: usize) -> bool {
        total <= self.shared()
    }

    /// Returns the number of entries beyond which a table is crowded: soon no VPC may go beyond its reserve.
    pub fn crowded(self) -> usize {
        self.shared() / 4 * 3
    }

    /// Returns the fair part of a VPC: the table would not be crowded if no VPC had more. Who has less leaves the rest
    /// to the others. `held`: the entries of each VPC; `total`: entries in the table.
    pub fn fair(self, mut held: Vec<usize>, total: usize) -> usize {
        if total <= self.crowded() {
            return usize::MAX;
        }
        // Entries that are no VPC's.
        let others = total.saturating_sub(held.iter().sum::<usize>());
        let mut room = self.crowded().saturating_sub(others);
        let mut vpcs = held.len();
        held.sort_unstable();
        for own in held {
            let part = room / vpcs;
            if own > part {
                return part;
            }
            room -= own;
            vpcs -= 1;
        }
        usize::MAX
    }

    /// Returns the number of entries that each VPC may always have. `held`: the entries of each VPC that has any;
    /// `vpcs`: how many VPCs there are; `total`: entries in the table.
    pub fn reserve(self, held: &[usize], vpcs: usize, total: usize) -> usize {
        let free = self.capacity.saturating_sub(total);
        let idle = vpcs.saturating_sub(held.len());
        let lacking = |reserve: usize| {
            let held = held.iter().map(|held| reserve.saturating_sub(*held));
            held.sum::<usize>() + idle * reserve
        };
        let first = self.reserved / self.parts(vpcs.max(held.len()));
        let mut smaller = std::iter::successors(Some(first), |reserve| Some(reserve / 2));
        smaller
            .find(|reserve| lacking(*reserve) <= free)
            .unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONNECTIONS: Shared = Shared::half_reserved(524_288);
    const HALF: usize = CONNECTIONS.reserved;

    #[test]
    fn all_reserves_together_are_at_most_half_of_the_table() {
        for vpcs in 1..5000_usize {
            let reserve = CONNECTIONS.reserve(&[], vpcs, 0);
            assert!(reserve > 0 && reserve * vpcs <= HALF, "{vpcs}: {reserve}");
            assert!(
                vpcs > CONNECTIONS.least_vpcs || reserve == HALF / 4,
                "{vpcs}: {reserve}"
            );
        }
    }

    #[test]
    fn every_reserve_has_room_however_others_fill_the_table() {
        let mut random = fastrand::Rng::with_seed(18);
        for _ in 0..200 {
            let vpcs = random.usize(2..40);
            let mut held = vec![0_usize; vpcs];
            let mut reserved = CONNECTIONS.reserve(&held, vpcs, 0);
            for _ in 0..400 {
                let total: usize = held.iter().sum();
                // The last VPC takes nothing.
                let of = random.usize(..vpcs - 1);
                let own = held[of];
                // Agents decide the same way.
                if own < reserved {
                    held[of] += random.usize(..=reserved - own);
                } else if total < HALF {
                    held[of] += random.usize(..=HALF - total);
                }
                if random.u8(..8) == 0 {
                    held[of] -= random.usize(..=held[of]);
                }
                let total: usize = held.iter().sum();
                assert!(total + reserved <= CONNECTIONS.capacity, "{held:?}, {reserved}");
                if random.u8(..4) == 0 {
                    let some: Vec<usize> = held.iter().copied().filter(|held| *held > 0).collect();
                    reserved = CONNECTIONS.reserve(&some, vpcs, total);
                }
            }
        }
    }

    #[test]
    fn who_has_less_than_its_fair_part_leaves_the_rest_to_others() {
        // It is crowded by 750 entries.
        let table = Shared::half_reserved(2000);
        let fair = |held: &[usize]| table.fair(held.to_vec(), held.iter().sum());
        assert_eq!(fair(&[400, 350]), usize::MAX, "a table with room");
        assert_eq!(fair(&[400, 351]), 399);
        assert_eq!(fair(&[500, 500]), 375);
        assert_eq!(fair(&[50, 500, 500]), 350);
        assert_eq!(fair(&[500, 200, 50, 500]), 250);
        assert_eq!(table.fair(vec![500, 100], 800), 450, "200 are no VPC's");
        assert_eq!(table.fair(vec![1], 2000), 0);
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..1000 {
            let held: Vec<usize> = (0..random.usize(1..20)).map(|_| random.usize(..300)).collect();
            let part = fair(&held);
            let capped = held.iter().map(|own| (*own).min(part)).sum::<usize>();
            assert!(capped <= 750, "{held:?}: {part}");
            let rest = held.iter().filter(|own| **own > part).count();
            assert!(rest == 0 || capped + rest > 750, "{held:?}: {part} is too little");
        }
    }

    #[test]
    fn behind_every_vpc_there_is_room_for_another_one() {
        let table = Shared::quarter_reserved(131_072);
        // Three VPCs have what they may have beyond their reserves, and each VPC that comes takes all it may.
        let mut held = vec![table.capacity / 4; 3];
        let mut reserves = Vec::new();
        for vpcs in 4..=300 {
            held.push(0);
            let total: usize = held.iter().sum();
            let may_have = |own| table.admits(own, total + own, || held.clone(), total);
            let mut powers = (0..=10).rev().map(|power| 1_usize << power);
            let reserve = powers.find(|own| may_have(*own)).unwrap_or_default();
            assert!(!may_have(reserve + 1));
            if let Some(last) = held.last_mut() {
                *last = reserve;
            }
            assert!(total + reserve <= table.capacity);
            if reserves.last().is_none_or(|(_, last)| *last != reserve) {
                reserves.push((vpcs, reserve));
            }
        }
        let expected = [(4, 1024), (17, 256), (33, 128), (65, 32), (129, 16), (257, 8)];
        assert_eq!(reserves, expected);
    }

    #[test]
    fn the_first_vpcs_have_their_reserves_whatever_came_before() {
        let table = Shared::quarter_reserved(131_072);
        let mut random = fastrand::Rng::with_seed(32);
        for _ in 0..100 {
            let mut held: Vec<usize> = Vec::new();
            for _ in 0..300 {
                let total: usize = held.iter().sum();
                let of = random.usize(..=held.len().min(40));
                if random.u8(..4) == 0 && of < held.len() {
                    held.swap_remove(of);
                    continue;
                }
                if of == held.len() {
                    held.push(0);
                }
                let own = held[of];
                let admits = |own, before| table.admits(own, total + own - before, || held.clone(), total);
                if held.len() <= 16 {
                    assert!(own >= 1024 || admits(1024, own), "{held:?}");
                }
                let wanted = own + random.usize(..40_000);
                let wanted = [wanted, own + 1024, 1024, own + 100, own + 10, 16].into_iter();
                let mut wanted = wanted.filter(|next| *next > own && *next <= table.capacity / 4);
                let next = wanted.find(|next| admits(*next, own));
                if let Some(next) = next {
                    held[of] = next;
                }
                let total: usize = held.iter().sum();
                assert!(total <= table.capacity, "{held:?}");
            }
        }
    }

    #[test]
    fn a_reserve_that_there_is_no_room_for_is_smaller() {
        // Nine VPCs where there were eight. Of the eight, one has a half, and the others have a whole eighth of a half
        // each.
        let held = [&[HALF][..], &[HALF / 8; 7]].concat();
        let total = held.iter().sum();
        let reserved = CONNECTIONS.reserve(&held, 16, total);
        assert!(
            reserved > 0 && reserved * 8 <= CONNECTIONS.capacity - total,
            "{reserved}"
        );
        assert_eq!(
            CONNECTIONS.reserve(&held, 8, CONNECTIONS.capacity),
            HALF / 8,
            "nobody lacks any"
        );
    }
}
