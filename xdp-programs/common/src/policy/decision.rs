//! What rules say of a packet: the first rule of each tier that matches, and the verdict of both.

/// What rules say of a packet: the first rule that matches in tier Admin, and the first one that matches behind it. A
/// lower number comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// [`ranked`], or [`NO_RULE`].
    pub admin: u16,
    pub rest: u16,
}

/// No rule matches.
pub const NO_RULE: u16 = u16::MAX;
/// The greatest rank of a rule.
pub const MAX_RANK: u16 = 0x3ffe;

#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Action {
    Accept = 0,
    Deny = 1,
    /// On to what comes behind tier Admin.
    Pass = 2,
}

/// Returns a rule of the given place in its set.
#[inline(always)]
pub const fn ranked(rank: u16, action: Action) -> u16 {
    rank << 2 | action as u16
}

impl Decision {
    pub const NONE: Self = Self {
        admin: NO_RULE,
        rest: NO_RULE,
    };

    #[inline(always)]
    pub const fn read(word: u32) -> Self {
        Self {
            admin: (word >> 16) as u16,
            rest: word as u16,
        }
    }

    #[inline(always)]
    pub const fn word(self) -> u32 {
        (self.admin as u32) << 16 | self.rest as u32
    }

    /// Returns what both together say.
    #[inline(always)]
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self {
            admin: least(self.admin, other.admin),
            rest: least(self.rest, other.rest),
        }
    }

    /// Returns whether the packet passes, and the rank of the rule that says so; [`NO_RULE`] if none does.
    #[inline(always)]
    pub const fn verdict(self, denies: bool) -> (bool, u16) {
        let mut rule = self.admin;
        if rule == NO_RULE || rule & 3 == Action::Pass as u16 {
            rule = self.rest;
        }
        if rule == NO_RULE {
            return (!denies, NO_RULE);
        }
        (rule & 3 == Action::Accept as u16, rule >> 2)
    }
}

#[inline(always)]
const fn least(a: u16, b: u16) -> u16 {
    if a < b { a } else { b }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tier_admin_decides_first_and_the_lower_rank_within_a_tier() {
        let rule = |admin, rest| Decision { admin, rest };
        let [accept, deny] = [Action::Accept, Action::Deny].map(|action| ranked(5, action));
        let pass = ranked(5, Action::Pass);
        assert_eq!(rule(accept, deny).verdict(true), (true, 5));
        assert_eq!(rule(deny, accept).verdict(false), (false, 5));
        assert_eq!(rule(pass, accept).verdict(true), (true, 5));
        assert_eq!(rule(pass, NO_RULE).verdict(true), (false, NO_RULE));
        assert_eq!(Decision::NONE.verdict(false), (true, NO_RULE));
        let (earlier, later) = (ranked(6, Action::Deny), ranked(7, Action::Accept));
        let both = rule(earlier, later).and(rule(later, earlier));
        assert_eq!(both, rule(earlier, earlier));
        assert_eq!(Decision::read(both.word()), both);
        assert!(ranked(MAX_RANK, Action::Pass) < NO_RULE);
    }
}
