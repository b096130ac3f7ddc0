//! Decides the next step of a role from its view. Nothing here reads a store or writes: the reconciler looks, asks, and
//! does what is decided here.

use crate::hub::{Missing, TABLE_FULL};

/// The reason why a role should not be where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// It has no droplet.
    Unplaced,
    /// Its droplet doesn't exist any more, or is not accepted.
    Gone,
    /// Its droplet has no stream.
    Suspect,
    /// Its droplet's Node is cordoned.
    Cordoned,
    /// A sibling is on the same droplet.
    Crowded,
    /// Its droplet has no room for its tables.
    Full,
    /// Its droplet does not take its tables.
    Refused,
}

impl Move {
    pub fn reason(self) -> &'static str {
        match self {
            Self::Unplaced => "Placed",
            Self::Gone => "DropletGone",
            Self::Suspect => "DropletSuspect",
            Self::Cordoned => "NodeCordoned",
            Self::Crowded => "DropletShared",
            Self::Full => TABLE_FULL,
            Self::Refused => "DropletRefused",
        }
    }

    /// Whether any other droplet is better, even a cordoned or crowded one.
    pub fn is_forced(self) -> bool {
        matches!(self, Self::Unplaced | Self::Gone | Self::Suspect)
    }
}

/// The view of a role that serves or is about to serve.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own, none follows from another
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// The droplet where the role should be.
    pub droplet: Option<&'a str>,
    /// The reason why the role should be elsewhere.
    pub why: Option<Move>,
    /// Users are told that the role is where it should be.
    pub is_published: bool,
    /// Its status says that it is Provisioned where it should be.
    pub serves_here: bool,
    /// Its status says that it leaves.
    pub is_leaving: bool,
    /// Its object is deleted, and the role is the last one that its users have.
    pub is_deleted: bool,
}

impl View<'_> {
    /// Whether users are being told of the role. Other roles may have left because of that, so this role moves only
    /// once users know where it is.
    fn is_announced(&self) -> bool {
        self.is_published && !self.serves_here
    }

    /// Returns the reason to look for another droplet now. If there is no other droplet the role goes on where it is.
    pub fn wants_to_move(&self) -> Option<Move> {
        self.why.filter(|why| why.is_forced() || !self.is_announced())
    }
}

/// The progress of a role's tables on the droplet where it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Tables {
    /// The role has no parent that makes tables.
    Unknown,
    /// The droplet has not acked the tables, because it has no room for them or for another reason; `is_overdue`: it
    /// has not for so long that it never will.
    Missing {
        what: Missing,
        is_overdue: bool,
    },
    There,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// No droplet can carry the role.
    WaitForDroplet,
    /// Its object says that the role leaves, but it is needed. The object must say so, because the next leader knows
    /// only the object.
    Reinstate,
    /// It is deleted, and leaves once another role serves.
    WaitForAnother,
    /// Users use the role. There may be a better place for it later.
    Rest(Option<Move>),
    WaitForTables(Missing),
    /// Its droplet does not take its tables: the operator looks for another droplet, and the role waits for the tables
    /// meanwhile.
    LeaveDroplet(Missing),
    /// Droplets don't accept the role's packets yet, or don't know where the role is.
    WaitForUsers(Missing),
    /// All droplets accept the role's packets: users may be told.
    Publish,
}

/// Decides the next step. The tables come first, then all droplets that must accept the role's packets, then its users:
/// a packet may be faster than the news. `tables` and `uninformed` are called only if the answer matters, because acks
/// wake every caller.
pub fn decide(view: View, tables: impl FnOnce() -> Tables, uninformed: impl FnOnce() -> Missing) -> Step {
    if view.droplet.is_none() {
        return Step::WaitForDroplet;
    }
    if view.is_published && view.serves_here {
        return if view.is_leaving {
            Step::Reinstate
        } else if view.is_deleted {
            Step::WaitForAnother
        } else {
            Step::Rest(view.why)
        };
    }
    match tables() {
        Tables::Missing { what, is_overdue } if !view.is_announced() => {
            return if is_overdue || !what.full.is_empty() {
                Step::LeaveDroplet(what)
            } else {
                Step::WaitForTables(what)
            };
        }
        // The tables were there when users were told. The role moves once all users know where it is.
        Tables::Missing { what, .. } if !what.full.is_empty() => {}
        Tables::Missing { what, .. } => return Step::WaitForTables(what),
        Tables::Unknown => return Step::WaitForTables(Missing::default()),
        Tables::There => {}
    }
    let uninformed = uninformed();
    if !uninformed.is_empty() {
        return Step::WaitForUsers(uninformed);
    }
    if view.is_leaving {
        Step::Reinstate
    } else {
        Step::Publish
    }
}

/// The view of a role whose object is deleted.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own, none follows from another
#[derive(Clone, Copy, Debug)]
pub struct LeavingView {
    /// The roles of its parent may be in use.
    pub is_in_use: bool,
    /// Users have another role, which stays.
    pub has_other: bool,
    /// Users were told to forget the role.
    pub is_unpublished: bool,
    /// Its status says that it leaves.
    pub is_leaving: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// Nothing counts on the role from now on. Its status must say that it leaves before any user is told.
    Drain,
    /// Its users are told to forget it.
    Unpublished,
    /// It is the last role that its users have.
    Held,
    /// It is the last role, and users were told to forget it; the content of its object is not known yet.
    HeldUnseen,
}

pub fn decide_leaving(view: LeavingView) -> Leaving {
    if !view.is_in_use || view.has_other {
        return if view.is_unpublished && view.is_leaving {
            Leaving::Unpublished
        } else {
            Leaving::Drain
        };
    }
    if view.is_unpublished && !view.is_leaving {
        Leaving::HeldUnseen
    } else {
        Leaving::Held
    }
}

#[cfg(test)]
mod tests {
    use thuban_rows::Kind;

    use super::{Leaving, LeavingView, Missing, Move, Step, Tables, View, decide, decide_leaving};
    use crate::model::full_tables::Full;

    const NEW: View<'static> = View {
        droplet: Some("a"),
        why: None,
        is_published: false,
        serves_here: false,
        is_leaving: false,
        is_deleted: false,
    };
    const SERVING: View<'static> = View {
        is_published: true,
        serves_here: true,
        ..NEW
    };

    fn next(view: View, tables: Tables, uninformed: &[&str]) -> Step {
        decide(view, || tables, || unacked(uninformed))
    }

    fn unacked(droplets: &[&str]) -> Missing {
        Missing {
            unacked: droplets.iter().map(ToString::to_string).collect(),
            ..Missing::default()
        }
    }

    fn missing(is_overdue: bool) -> Tables {
        Tables::Missing {
            what: unacked(&["a"]),
            is_overdue,
        }
    }

    /// Decides for a role that serves: it asks for nothing, because every ack would wake it.
    fn next_unasked(view: View) -> Step {
        decide(view, || unreachable!(), || unreachable!())
    }

    #[test]
    fn users_are_told_last() {
        assert_eq!(next_unasked(View { droplet: None, ..NEW }), Step::WaitForDroplet);
        assert_eq!(
            next(NEW, Tables::Unknown, &[]),
            Step::WaitForTables(Missing::default())
        );
        assert_eq!(
            next(NEW, missing(false), &[]),
            Step::WaitForTables(unacked(&["a"]))
        );
        assert_eq!(
            next(NEW, Tables::There, &["b"]),
            Step::WaitForUsers(unacked(&["b"]))
        );
        assert_eq!(next(NEW, Tables::There, &[]), Step::Publish);
        assert_eq!(next_unasked(SERVING), Step::Rest(None));
    }

    #[test]
    fn an_unpublished_role_leaves_a_droplet_without_its_tables() {
        assert_eq!(next(NEW, missing(true), &[]), Step::LeaveDroplet(unacked(&["a"])));
        let announced = View {
            is_published: true,
            ..NEW
        };
        assert_eq!(
            next(announced, missing(true), &[]),
            Step::WaitForTables(unacked(&["a"]))
        );
    }

    #[test]
    fn role_leaves_a_full_droplet_at_once_unless_announced() {
        let full = || {
            let tables = Full {
                droplet: "a".into(),
                kind: Kind::Bouncer,
                rows: 1,
            };
            Missing {
                full: vec![tables],
                ..unacked(&["a"])
            }
        };
        let tables = || Tables::Missing {
            what: full(),
            is_overdue: false,
        };
        assert_eq!(next(NEW, tables(), &[]), Step::LeaveDroplet(full()));
        let announced = View {
            is_published: true,
            ..NEW
        };
        assert_eq!(
            next(announced, tables(), &["b"]),
            Step::WaitForUsers(unacked(&["b"]))
        );
        assert_eq!(next(announced, tables(), &[]), Step::Publish);
        let serving = View {
            why: Some(Move::Full),
            ..SERVING
        };
        assert_eq!(serving.wants_to_move(), Some(Move::Full));
        assert_eq!(next_unasked(serving), Step::Rest(Some(Move::Full)));
    }

    #[test]
    fn a_role_that_users_are_being_told_of_moves_only_if_it_must() {
        let announced = |why| View {
            why: Some(why),
            is_published: true,
            ..NEW
        };
        assert_eq!(announced(Move::Crowded).wants_to_move(), None);
        assert_eq!(announced(Move::Cordoned).wants_to_move(), None);
        assert_eq!(announced(Move::Suspect).wants_to_move(), Some(Move::Suspect));
        let serving = View {
            why: Some(Move::Crowded),
            ..SERVING
        };
        assert_eq!(serving.wants_to_move(), Some(Move::Crowded));
        assert_eq!(next_unasked(serving), Step::Rest(Some(Move::Crowded)));
    }

    #[test]
    fn a_deleted_role_that_is_needed_serves_and_says_that_it_stays() {
        let deleted = View {
            is_deleted: true,
            ..SERVING
        };
        assert_eq!(next_unasked(deleted), Step::WaitForAnother);
        let leaving = View {
            is_leaving: true,
            ..deleted
        };
        assert_eq!(next_unasked(leaving), Step::Reinstate);
        // Its users were told to forget the role: it is made ready as a new role is, and its object says so before
        // users are told.
        let unpublished = View {
            is_published: false,
            ..leaving
        };
        assert_eq!(next(unpublished, Tables::There, &[]), Step::Reinstate);
    }

    #[test]
    fn the_last_role_is_held_while_somebody_uses_it() {
        let last = LeavingView {
            is_in_use: true,
            has_other: false,
            is_unpublished: false,
            is_leaving: false,
        };
        assert_eq!(decide_leaving(last), Leaving::Held);
        let unseen = LeavingView {
            is_unpublished: true,
            ..last
        };
        assert_eq!(decide_leaving(unseen), Leaving::HeldUnseen);
        let other = LeavingView {
            has_other: true,
            ..last
        };
        let unused = LeavingView {
            is_in_use: false,
            ..last
        };
        assert_eq!(decide_leaving(other), Leaving::Drain);
        assert_eq!(decide_leaving(unused), Leaving::Drain);
        // The world and the object must both say so, because the next leader knows only the object.
        let told = LeavingView {
            is_unpublished: true,
            ..other
        };
        assert_eq!(decide_leaving(told), Leaving::Drain);
        let left = LeavingView {
            is_leaving: true,
            ..told
        };
        assert_eq!(decide_leaving(left), Leaving::Unpublished);
    }
}
