//! Rendezvous hashing over the members of a role: every droplet picks the same member for a flow without a table, and
//! a member that leaves moves only its own flows.

use crate::{
    packet::flow::finish,
    tables::{DropletAddress, MAX_MEMBERS, Members},
};

/// An unused place.
const NOBODY: DropletAddress = [0; 4];

/// Returns the member for a flow's hash; `None` when there is none.
#[inline(always)]
pub fn pick(members: &Members, hash: u32) -> Option<DropletAddress> {
    let mut best = 0;
    let mut chosen = None;
    for (index, droplet) in members.droplets.iter().enumerate().take(MAX_MEMBERS) {
        if index >= members.count as usize {
            break;
        }
        let score = finish(hash ^ finish(u32::from_ne_bytes(*droplet)));
        if chosen.is_none() || score > best {
            best = score;
            chosen = Some(*droplet);
        }
    }
    chosen
}

/// Whether the droplet may pass packets on: it is a member, or stands behind them because it will be or was one.
#[inline(always)]
pub fn contains(members: &Members, droplet: DropletAddress) -> bool {
    for member in members.droplets.iter().take(MAX_MEMBERS) {
        if *member == NOBODY {
            break;
        }
        if *member == droplet {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::{contains, pick};
    use crate::{
        tables::{MAX_MEMBERS, Members},
        testing::Random,
    };

    fn members(count: u8) -> Members {
        let mut members = Members {
            count: u32::from(count),
            droplets: [[0; 4]; MAX_MEMBERS],
        };
        for (index, droplet) in (1..=count).zip(members.droplets.iter_mut()) {
            *droplet = [10, 0, 0, index];
        }
        members
    }

    #[test]
    fn nobody_is_picked_from_nobody() {
        assert_eq!(pick(&members(0), 7), None);
        assert!(!contains(&members(0), [0; 4]), "unused places are no members");
    }

    #[test]
    fn droplet_behind_members_may_relay_but_is_never_picked() {
        let mut members = members(1);
        members.droplets[1] = [9; 4];
        assert!(contains(&members, [9; 4]) && !contains(&members, [8; 4]) && !contains(&members, [0; 4]));
        assert!((0..1000).all(|hash| pick(&members, hash) == Some([10, 0, 0, 1])));
    }

    #[test]
    fn flows_spread_evenly() {
        let mut random = Random::from_clock();
        let members = members(4);
        let mut counts = [0_u32; 5];
        for _ in 0..40_000 {
            let chosen = pick(&members, random.u32()).unwrap();
            assert!(contains(&members, chosen));
            counts[chosen[3] as usize] += 1;
        }
        assert!(
            counts[1..].iter().all(|count| (9_400..10_600).contains(count)),
            "{counts:?} seed {}",
            random.seed()
        );
    }

    #[test]
    fn a_member_that_leaves_moves_only_its_own_flows() {
        let mut random = Random::from_clock();
        let (before, mut after) = (members(5), members(4));
        after.droplets[4] = [9; 4]; // beyond count: must not matter
        for _ in 0..20_000 {
            let hash = random.u32();
            let old = pick(&before, hash).unwrap();
            if old[3] != 5 {
                assert_eq!(pick(&after, hash), Some(old), "seed {}", random.seed());
            }
        }
    }
}
