//! Rows that the last snapshot did not name, while they linger: other droplets may still send packets that bear them.
//!
//! A class has only the groups and names that the sets of its operator name. So it does not say all that a set of
//! another operator's program asks.

use std::collections::BTreeSet;

use thuban_rows::PolicyId;

use super::compile::Named;

/// The rows of a VPC that linger.
#[derive(Debug, Default)]
pub struct Former {
    pub classes: BTreeSet<PolicyId>,
    pub sets: BTreeSet<PolicyId>,
    /// What the sets of their program named; if they are of several, what those of each did.
    pub named: Named,
    pub are_of_several: bool,
    /// What the other sets name, if sets linger.
    pub named_now: Named,
}

impl Former {
    /// Returns what a class says of itself to a set; `None`: all that the set names.
    pub fn says(&self, set: PolicyId, class: PolicyId) -> Option<&Named> {
        match (self.sets.contains(&set), self.classes.contains(&class)) {
            (false, true) => Some(&self.named),
            (true, true) if self.are_of_several => Some(&self.named),
            (true, false) => Some(&self.named_now),
            (true, true) | (false, false) => None,
        }
    }

    pub fn is_over(&self) -> bool {
        self.classes.is_empty() && self.sets.is_empty()
    }
}
