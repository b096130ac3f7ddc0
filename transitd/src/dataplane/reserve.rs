//! The share of each VPC in CONNECTIONS: how many entries are its own, no matter what other VPCs do.
//!
//! Invariant: there is always room for the entries that each VPC lacks of its reserve. A VPC goes beyond its reserve
//! only while half of the table is free, and all reserves together are at most that half. Pure.

use thuban_common::services::{CONNECTIONS_BEYOND_RESERVE, CONNECTIONS_CAPACITY};

/// The least number of VPCs that the reserves are for.
const LEAST_VPCS: usize = 4;

/// Returns the number of entries that each VPC may always have. `held`: the entries of each VPC that has any; `vpcs`:
/// how many VPCs have endpoints here; `total`: entries in the table.
pub fn reserve(held: &[u32], vpcs: usize, total: u32) -> u32 {
    let free = u64::from(CONNECTIONS_CAPACITY.saturating_sub(total));
    let idle = vpcs.saturating_sub(held.len()) as u64;
    let lacking = |reserve: u32| {
        let held = held.iter().map(|held| u64::from(reserve.saturating_sub(*held)));
        held.sum::<u64>() + idle * u64::from(reserve)
    };
    // The divisor is a power of two, so that the reserve rarely changes.
    let parts = vpcs.max(held.len()).max(LEAST_VPCS).next_power_of_two();
    let first = CONNECTIONS_BEYOND_RESERVE / u32::try_from(parts).unwrap_or(u32::MAX);
    let mut smaller = std::iter::successors(Some(first), |reserve| Some(reserve / 2));
    smaller
        .find(|reserve| lacking(*reserve) <= free)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: u32 = CONNECTIONS_BEYOND_RESERVE;

    #[test]
    fn all_reserves_together_are_at_most_half_of_the_table() {
        for vpcs in 1..5000_usize {
            let reserve = reserve(&[], vpcs, 0);
            assert!(
                reserve > 0 && reserve as usize * vpcs <= HALF as usize,
                "{vpcs}: {reserve}"
            );
            assert!(vpcs > LEAST_VPCS || reserve == HALF / 4, "{vpcs}: {reserve}");
        }
    }

    #[test]
    fn every_reserve_has_room_however_others_fill_the_table() {
        let mut random = fastrand::Rng::with_seed(18);
        for _ in 0..200 {
            let vpcs = random.usize(2..40);
            let mut held = vec![0_u32; vpcs];
            let mut reserved = reserve(&held, vpcs, 0);
            for _ in 0..400 {
                let total: u32 = held.iter().sum();
                // The last VPC takes nothing.
                let of = random.usize(..vpcs - 1);
                let own = held[of];
                // Agents decide the same way.
                if own < reserved {
                    held[of] += random.u32(..=reserved - own);
                } else if total < HALF {
                    held[of] += random.u32(..=HALF - total);
                }
                if random.u8(..8) == 0 {
                    held[of] -= random.u32(..=held[of]);
                }
                let total: u32 = held.iter().sum();
                assert!(total + reserved <= CONNECTIONS_CAPACITY, "{held:?}, {reserved}");
                if random.u8(..4) == 0 {
                    let some: Vec<u32> = held.iter().copied().filter(|held| *held > 0).collect();
                    reserved = reserve(&some, vpcs, total);
                }
            }
        }
    }

    #[test]
    fn a_reserve_that_there_is_no_room_for_is_smaller() {
        // Nine VPCs where there were eight. Of the eight, one has a half, and the others have a whole eighth of a half
        // each.
        let held = [&[HALF][..], &[HALF / 8; 7]].concat();
        let total = held.iter().sum();
        let reserved = reserve(&held, 16, total);
        assert!(
            reserved > 0 && reserved * 8 <= CONNECTIONS_CAPACITY - total,
            "{reserved}"
        );
        assert_eq!(
            reserve(&held, 8, CONNECTIONS_CAPACITY),
            HALF / 8,
            "nobody lacks any"
        );
    }
}
