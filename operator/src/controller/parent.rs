//! Decides the next step of a VPC or a network from its view: both are served by roles, and both follow one order.
//! Nothing here reads a store or writes: the reconciler looks, and does what is decided here.

use thuban_api::{Condition, Phase};

/// The view of a VPC or network that is not deleted.
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own, none follows from another
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// For a network: its VPC is there and has not been checked yet.
    pub is_early: bool,
    /// Its spec may come into force.
    pub is_usable: bool,
    /// An earlier spec is in force.
    pub is_in_force: bool,
    /// It has the number that its rows are told apart by. A network always has one.
    pub has_number: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Its VPC comes first.
    WaitForVpc,
    /// Its status says why its spec is refused. A spec that is in force goes on being served.
    Refuse {
        serves_on: bool,
    },
    /// It has no number yet, and is not served before it has one.
    ClaimNumber,
    Serve,
}

pub fn decide(view: View) -> Step {
    if view.is_early {
        Step::WaitForVpc
    } else if !view.is_usable {
        Step::Refuse {
            serves_on: view.is_in_force,
        }
    } else if view.has_number {
        Step::Serve
    } else {
        Step::ClaimNumber
    }
}

/// The progress of a VPC or network that is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It was Provisioned before, and stays Provisioned.
    Kept,
    WaitsForVpc,
    WaitsForRoles,
    /// It is Provisioned from now on.
    Provisioned,
}

/// Has the condition `Ready`, which stays as it is, be about this generation.
pub fn keep_ready(conditions: &mut [Condition], generation: Option<i64>) {
    for condition in conditions
        .iter_mut()
        .filter(|condition| condition.kind == "Ready")
    {
        condition.observed_generation = generation;
    }
}

/// Returns the progress. `vpc` is the phase of a network's VPC, `waiting` the number of roles that don't work.
pub fn readiness(phase: Phase, vpc: Option<Phase>, waiting: usize) -> Readiness {
    if phase == Phase::Provisioned {
        Readiness::Kept
    } else if vpc == Some(Phase::Init) {
        Readiness::WaitsForVpc
    } else if waiting > 0 {
        Readiness::WaitsForRoles
    } else {
        Readiness::Provisioned
    }
}

/// A stage of the deletion: it ends before the object goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The networks of a VPC, or the endpoints of a network: the roles serve them to their end.
    Members,
    Roles,
    /// Rows of the object that droplets have.
    Rows,
    /// Members that the API server knows and this process does not.
    Unseen,
}

impl Stage {
    /// The order of the deletion. A look at roles deletes them, so nobody looks at a stage before the former one has
    /// ended.
    pub const ORDER: [Self; 4] = [Self::Members, Self::Roles, Self::Rows, Self::Unseen];
}

#[cfg(test)]
mod tests {
    use thuban_api::Phase;

    use super::{Readiness, Step, View, decide, keep_ready, readiness};
    use crate::controller::runtime::objects::condition;

    const NEW: View = View {
        is_early: false,
        is_usable: true,
        is_in_force: false,
        has_number: false,
    };

    #[test]
    fn what_is_in_force_is_served_though_a_later_spec_is_refused() {
        let serving = View {
            is_in_force: true,
            has_number: true,
            ..NEW
        };
        let bad = |view| View {
            is_usable: false,
            ..view
        };
        let early = |view| View {
            is_early: true,
            ..view
        };
        for (view, step) in [
            (NEW, Step::ClaimNumber),
            (
                View {
                    has_number: true,
                    ..NEW
                },
                Step::Serve,
            ),
            (serving, Step::Serve),
            (bad(NEW), Step::Refuse { serves_on: false }),
            (bad(serving), Step::Refuse { serves_on: true }),
            // The network doesn't report a missing VPC before the VPC was checked.
            (early(bad(NEW)), Step::WaitForVpc),
            (early(serving), Step::WaitForVpc),
        ] {
            assert_eq!(decide(view), step, "{view:?}");
        }
    }

    #[test]
    fn a_condition_that_stays_is_about_the_latest_generation() {
        let before = condition("Ready", true, "Provisioned", "its dividers work", Some(1));
        let accepted = condition("Accepted", true, "Valid", "", Some(1));
        let mut conditions = [accepted.clone(), before.clone()];
        keep_ready(&mut conditions, Some(7));
        assert_eq!(conditions[0], accepted);
        assert_eq!(conditions[1].observed_generation, Some(7));
        assert_eq!(
            conditions[1].last_transition_time, before.last_transition_time,
            "it has not changed"
        );
    }

    #[test]
    fn a_parent_is_provisioned_after_its_vpc_and_all_roles() {
        let (init, provisioned) = (Phase::Init, Phase::Provisioned);
        for (phase, vpc, waiting, expected) in [
            (init, None, 1, Readiness::WaitsForRoles),
            (init, None, 0, Readiness::Provisioned),
            (init, Some(init), 0, Readiness::WaitsForVpc),
            (init, Some(init), 1, Readiness::WaitsForVpc),
            (init, Some(provisioned), 2, Readiness::WaitsForRoles),
            (init, Some(provisioned), 0, Readiness::Provisioned),
            // A Provisioned object stays Provisioned, whatever happens to its roles.
            (provisioned, Some(init), 2, Readiness::Kept),
            (provisioned, None, 0, Readiness::Kept),
        ] {
            assert_eq!(
                readiness(phase, vpc, waiting),
                expected,
                "{phase:?} {vpc:?} {waiting}"
            );
        }
    }
}
