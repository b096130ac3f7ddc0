//! Decides how many bouncers a network needs, and how many dividers a VPC needs.

/// A demand: an amount, and how much of it one role can carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    pub amount: u64,
    pub each: u64,
}

/// The bounds of a number of roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub least: u32,
    pub most: u32,
}

/// A decision on the number of roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scaling {
    /// This number is needed now.
    Now(u32),
    /// Fewer roles are enough, with room to spare: this number, if the demand stays so for a while.
    Fewer(u32),
}

/// The percentage of a role's measure that may be used when there is one role less.
const ROOM: u64 = 80;

/// Decides on the number of roles: more at once; fewer only with room to spare, and not at once.
pub fn scale(current: u32, bounds: Bounds, demands: &[Demand]) -> Scaling {
    let most = bounds.most.max(bounds.least);
    let needed = |percent: u64| {
        let needs = demands.iter().map(|demand| {
            let each = (demand.each * percent / 100).max(1);
            u32::try_from(demand.amount.div_ceil(each)).unwrap_or(u32::MAX)
        });
        needs.max().unwrap_or_default().clamp(bounds.least, most)
    };
    let current = current.clamp(bounds.least, most);
    let now = needed(100);
    let fewer = needed(ROOM);
    if now >= current {
        Scaling::Now(now)
    } else if fewer < current {
        Scaling::Fewer(fewer)
    } else {
        Scaling::Now(current)
    }
}

/// Returns how many of the wanted roles there should be, if so many droplets have one of them or may get one. None is
/// added that would share a droplet. Of the `known` number so far those that are `there` stay: a droplet that is away
/// may return.
pub fn limit(wanted: u32, places: u32, there: u32, known: u32) -> u32 {
    wanted.min(places.max(there.min(known))).max(1)
}

#[cfg(test)]
mod tests {
    use super::{Bounds, Demand, Scaling, limit, scale};

    #[test]
    fn roles_are_added_for_droplets_and_stay_without_them() {
        assert_eq!(limit(2, 0, 0, 0), 1, "the first waits for a droplet");
        assert_eq!(limit(3, 2, 0, 0), 2);
        assert_eq!(limit(3, 3, 2, 2), 3, "a droplet has joined");
        assert_eq!(limit(2, 9, 2, 2), 2);
        assert_eq!(limit(2, 1, 2, 2), 2, "a droplet is away");
        assert_eq!(limit(2, 1, 1, 2), 1, "nothing is added meanwhile");
        assert_eq!(limit(1, 1, 2, 2), 1, "a person's word counts");
        assert_eq!(
            limit(2, 1, 2, 1),
            1,
            "a substitute goes when the role is there again"
        );
    }

    #[test]
    fn demand_adds_roles_at_once_but_removes_only_with_margin() {
        let bounds = Bounds { least: 1, most: 4 };
        let endpoints = |amount| [Demand { amount, each: 100 }];
        assert_eq!(scale(1, bounds, &endpoints(0)), Scaling::Now(1));
        assert_eq!(scale(1, bounds, &endpoints(101)), Scaling::Now(2));
        assert_eq!(
            scale(2, bounds, &endpoints(90)),
            Scaling::Now(2),
            "no room to spare"
        );
        assert_eq!(scale(2, bounds, &endpoints(80)), Scaling::Fewer(1));
        assert_eq!(scale(1, bounds, &endpoints(100_000)), Scaling::Now(4));
        let load = Demand {
            amount: 900,
            each: 300,
        };
        assert_eq!(
            scale(1, bounds, &[endpoints(101)[0], load]),
            Scaling::Now(3),
            "the larger need"
        );
    }

    #[test]
    fn without_demands_the_bounds_decide() {
        let fixed = |least| Bounds { least, most: least };
        assert_eq!(scale(1, fixed(3), &[]), Scaling::Now(3));
        assert_eq!(
            scale(3, fixed(1), &[]),
            Scaling::Now(1),
            "a person's word counts at once"
        );
        assert_eq!(scale(9, Bounds { least: 2, most: 1 }, &[]), Scaling::Now(2));
    }
}
