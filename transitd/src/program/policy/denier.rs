//! What denies a packet, in the names of policies.

use std::sync::Arc;

use thuban_rows::{PolicySet, PolicyTier};

/// The most policies that are named for one packet.
const MAX_NAMED: usize = 4;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Denier {
    /// A rule. Its index is its place in the policy.
    Rule { policy: Arc<str>, index: u32 },
    /// No rule accepts the packet, and the endpoint is isolated by these policies, or by others that have no rules.
    /// `more` is the number of those with rules and without a name here.
    NoRule { policies: Vec<Arc<str>>, more: u32 },
    /// The set denies all, because its rules have no room on this node.
    NoRoom,
    /// The set denies all, because this node does not have its rules, or not all of them.
    Unknown,
}

impl Denier {
    /// Returns what denies a packet that the set denies by the rule of a rank, or by none. `is_full`: there is no room
    /// for the set.
    pub fn of(set: &PolicySet, rank: u16, is_full: bool) -> Self {
        if let Some(rule) = set.rules.get(usize::from(rank)) {
            return Self::Rule {
                policy: Arc::clone(&rule.policy),
                index: rule.index,
            };
        }
        if is_full {
            return Self::NoRoom;
        }
        if !set.is_isolated {
            return Self::Unknown;
        }
        let rules = set
            .rules
            .iter()
            .filter(|rule| rule.tier == PolicyTier::NetworkPolicy);
        let mut policies: Vec<Arc<str>> = rules.map(|rule| Arc::clone(&rule.policy)).collect();
        // Rules of one policy follow each other.
        policies.dedup();
        let more = policies.len().saturating_sub(MAX_NAMED) as u32;
        policies.truncate(MAX_NAMED);
        Self::NoRule { policies, more }
    }
}
