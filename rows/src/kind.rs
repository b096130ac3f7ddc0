//! The kinds of rows, and which of them a droplet understands.
//!
//! Invariant: a kind's number is the number of its field in `Row` of the contract, and no other kind ever has it.

use std::collections::BTreeSet;
use std::fmt;

use thuban_proto::transit::{Hello, RowKind};

/// Defines all kinds in one list, for all code that must know every kind.
macro_rules! kinds {
    ($($kind:ident $name:literal),+ $(,)?) => {
        /// The kind of a row.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $($kind),+
        }

        impl Kind {
            pub const ALL: &[Self] = &[$(Self::$kind),+];

            /// Returns the name of the kind in messages to people.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$kind => $name),+
                }
            }

            /// Returns the number of the kind in Hello.
            pub const fn number(self) -> i32 {
                match self {
                    $(Self::$kind => RowKind::$kind as i32),+
                }
            }

            const fn told(kind: RowKind) -> Option<Self> {
                match kind {
                    RowKind::Unspecified => None,
                    $(RowKind::$kind => Some(Self::$kind)),+
                }
            }
        }
    };
}

kinds! {
    Droplet "droplet",
    Vpc "vpc",
    Network "network",
    Local "local",
    Bouncer "bouncer",
    Direct "direct",
    Forward "forward",
    Refused "refused",
    Service "service",
    NodeService "node-service",
    Exposed "exposed",
    Class "class",
    PolicySet "policy-set",
    Front "front",
}

/// The kinds of a droplet that doesn't say which kinds it understands: those of the last release before Hello named
/// them. The list never grows.
pub const BASELINE: &[Kind] = &[
    Kind::Droplet,
    Kind::Vpc,
    Kind::Network,
    Kind::Local,
    Kind::Bouncer,
    Kind::Direct,
    Kind::Forward,
    Kind::Refused,
    Kind::Service,
    Kind::NodeService,
    Kind::Exposed,
];

impl fmt::Display for Kind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())
    }
}

/// The kinds that a droplet understands, and what it understands of them beyond the first version of a kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kinds {
    kinds: BTreeSet<Kind>,
    /// The droplet understands [`Front::tunnel`](crate::Front::tunnel).
    has_tunnel: bool,
}

impl Kinds {
    /// Returns all kinds that this version knows.
    pub fn all() -> Self {
        Self {
            kinds: Kind::ALL.iter().copied().collect(),
            has_tunnel: true,
        }
    }

    /// Returns what the droplet of a Hello understands.
    pub fn of(hello: &Hello) -> Self {
        Self {
            has_tunnel: hello.front_tunnel,
            ..Self::read(&hello.row_kinds)
        }
    }

    /// Reads the kinds of `Hello.row_kinds`. An empty list means [`BASELINE`]; numbers of a newer version are left out.
    pub fn read(numbers: &[i32]) -> Self {
        if numbers.is_empty() {
            return BASELINE.iter().copied().collect();
        }
        let kinds = numbers
            .iter()
            .filter_map(|number| RowKind::try_from(*number).ok());
        kinds.filter_map(Kind::told).collect()
    }

    /// Returns the numbers for `Hello.row_kinds`.
    pub fn numbers(&self) -> Vec<i32> {
        self.kinds.iter().map(|kind| kind.number()).collect()
    }

    pub fn contains(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Whether the droplet understands fronts whose answers go back through the tunnel.
    pub fn has_tunnel(&self) -> bool {
        self.has_tunnel && self.contains(Kind::Front)
    }

    /// Returns the kinds that this version knows and the droplet does not understand.
    pub fn lacking(&self) -> impl Iterator<Item = Kind> {
        Kind::ALL.iter().copied().filter(|kind| !self.contains(*kind))
    }
}

impl FromIterator<Kind> for Kinds {
    fn from_iter<T: IntoIterator<Item = Kind>>(kinds: T) -> Self {
        Self {
            kinds: kinds.into_iter().collect(),
            has_tunnel: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_read_back_and_saying_none_is_the_baseline() {
        let all = Kinds::all();
        let hello = |front_tunnel| Hello {
            row_kinds: all.numbers(),
            front_tunnel,
            ..Hello::default()
        };
        assert_eq!(Kinds::of(&hello(true)), all);
        assert!(all.has_tunnel() && !Kinds::of(&hello(false)).has_tunnel());
        assert_eq!(all.lacking().count(), 0);
        let baseline = Kinds::read(&[]);
        assert!(BASELINE.iter().all(|kind| baseline.contains(*kind)));
        assert_eq!(baseline.numbers(), (1..=11).collect::<Vec<_>>(), "it never grows");
        let some = Kinds::read(&[2, 0, 4, 1_000_000, -1]);
        assert_eq!(some, [Kind::Vpc, Kind::Local].into_iter().collect());
        assert!(some.lacking().any(|kind| kind == Kind::Exposed));
        let without_fronts = Hello {
            front_tunnel: true,
            ..Hello::default()
        };
        assert!(!Kinds::of(&without_fronts).has_tunnel());
    }
}
