//! Decides when a CA is replaced. Nothing here reads a clock: times are seconds since 1970.
//!
//! Invariant: a bundle that was published in the last [`OVERLAP`] verifies the certificates that the CA in use signs,
//! unless a CA has expired meanwhile.

const DAY: u64 = 24 * 3600;
/// How long a CA is valid.
pub const LIFE: u64 = 365 * DAY;
/// The part of its life after which the next CA is made: numerator and denominator.
const RENEWAL: (u64, u64) = (2, 3);
/// How long the next CA is published before it signs, and how long the former CA is published after that at least. A
/// droplet reads the bundle whenever it dials, so seconds would do; whoever keeps a copy of the bundle
/// (`--operator-ca`) has a week to follow.
pub const OVERLAP: u64 = 7 * DAY;
/// How much earlier than it is made a CA becomes valid, because clocks of nodes differ.
pub const CLOCK_SKEW: u64 = DAY;
/// The rest of a CA's life in which the next CA signs, however young it is.
const LAST_CALL: u64 = DAY;

/// The times between which a CA is valid, by its certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    pub from: u64,
    pub to: u64,
}

impl Life {
    /// Returns the life of a CA that is made now.
    pub fn begin(now: u64) -> Self {
        Self {
            from: now.saturating_sub(CLOCK_SKEW),
            to: now + LIFE,
        }
    }

    fn made(self) -> u64 {
        self.from + CLOCK_SKEW
    }

    /// Returns the time when its successor is made. A CA of operators that knew no rotation is valid for two thousand
    /// years, and counts as one that is valid for [`LIFE`].
    fn renewal(self) -> u64 {
        let (numerator, denominator) = RENEWAL;
        let life = self.to.saturating_sub(self.made()).min(LIFE);
        self.made() + life * numerator / denominator
    }
}

/// The CAs of the Secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The CA that signs.
    pub current: Life,
    /// The CA that signs next; it is published already.
    pub next: Option<Life>,
    /// Whether a CA that signed before is still published.
    pub has_former: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Keep,
    /// The next CA is made and published.
    MakeNext,
    /// The next CA signs from now on. The former one stays published.
    Switch,
    /// The former CA is published no longer.
    Retire,
    /// The CA has expired without a successor: another one takes its place at once.
    Replace,
}

pub fn decide(view: View, now: u64) -> Step {
    let View {
        current,
        next,
        has_former,
    } = view;
    if let Some(next) = next {
        let is_known = now >= next.made() + OVERLAP;
        let is_urgent = now + LAST_CALL >= current.to;
        return if is_known || is_urgent {
            Step::Switch
        } else {
            Step::Keep
        };
    }
    if now >= current.to {
        Step::Replace
    } else if has_former && now >= current.made() + 2 * OVERLAP {
        Step::Retire
    } else if now >= current.renewal() {
        Step::MakeNext
    } else {
        Step::Keep
    }
}

#[cfg(test)]
mod tests {
    use super::{CLOCK_SKEW, DAY, LAST_CALL, LIFE, Life, OVERLAP, Step, View, decide};

    const MADE: u64 = 1_800_000_000;

    fn alone(current: Life) -> View {
        View {
            current,
            next: None,
            has_former: false,
        }
    }

    #[test]
    fn next_ca_is_made_after_two_thirds_of_a_life() {
        let view = alone(Life::begin(MADE));
        let after = |time: u64| decide(view, MADE + time);
        assert_eq!(after(0), Step::Keep);
        assert_eq!(after(LIFE * 2 / 3 - 1), Step::Keep);
        assert_eq!(after(LIFE * 2 / 3), Step::MakeNext);
        assert_eq!(after(LIFE - 1), Step::MakeNext);
        assert_eq!(after(LIFE), Step::Replace);
    }

    #[test]
    fn next_ca_signs_after_the_overlap_or_just_before_the_end() {
        let current = Life::begin(MADE);
        let made = MADE + LIFE * 2 / 3;
        let with = |made: u64, now: u64| {
            let next = Some(Life::begin(made));
            decide(
                View {
                    next,
                    ..alone(current)
                },
                now,
            )
        };
        assert_eq!(with(made, made + OVERLAP - 1), Step::Keep);
        assert_eq!(with(made, made + OVERLAP), Step::Switch);
        let late = MADE + LIFE - 2 * DAY;
        assert_eq!(with(late, late + DAY - 1), Step::Keep);
        assert_eq!(with(late, MADE + LIFE - LAST_CALL), Step::Switch);
        assert_eq!(with(late, MADE + LIFE + DAY), Step::Switch, "not Replace");
        // The clock went back by years after the next CA was made.
        assert_eq!(with(made + 10 * LIFE, made), Step::Keep);
        assert_eq!(with(made + 10 * LIFE, MADE + LIFE - LAST_CALL), Step::Switch);
    }

    #[test]
    fn former_ca_leaves_the_bundle_an_overlap_after_the_switch() {
        let view = View {
            has_former: true,
            ..alone(Life::begin(MADE))
        };
        let switched = MADE + OVERLAP;
        assert_eq!(decide(view, switched), Step::Keep);
        assert_eq!(decide(view, switched + OVERLAP - 1), Step::Keep);
        assert_eq!(decide(view, switched + OVERLAP), Step::Retire);
    }

    #[test]
    fn ca_without_an_end_is_renewed_and_signs_on_meanwhile() {
        // The years 1975 and 4096, as rcgen has them.
        let endless = Life {
            from: 157_766_400,
            to: 67_090_000_000,
        };
        assert_eq!(decide(alone(endless), MADE), Step::MakeNext);
        let next = Some(Life::begin(MADE));
        let view = View {
            next,
            ..alone(endless)
        };
        assert_eq!(decide(view, MADE + OVERLAP - 1), Step::Keep);
        assert_eq!(decide(view, MADE + OVERLAP), Step::Switch);
    }

    #[test]
    fn a_short_life_is_renewed_by_its_own_length() {
        let short = Life {
            from: MADE - CLOCK_SKEW,
            to: MADE + 30 * DAY,
        };
        assert_eq!(decide(alone(short), MADE + 20 * DAY - 1), Step::Keep);
        assert_eq!(decide(alone(short), MADE + 20 * DAY), Step::MakeNext);
    }
}
