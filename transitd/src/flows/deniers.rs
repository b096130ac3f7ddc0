//! Which policy denies a packet, remembered. To find out costs a walk over all rules of a set.

use std::collections::HashMap;

use thuban_api::identifiers::Vni;
use thuban_common::flow_events::FlowEventRecord;
use thuban_proto::observe::DenyingPolicy;
use thuban_rows::PolicyId;

use crate::program::policy::Denier;

/// The most answers that are kept.
const MAX_KNOWN: usize = 4096;

/// Answers about who denies.
pub struct Deniers<F> {
    /// By VNI, set and rank. Answers stay true, because a set never changes.
    known: HashMap<(u32, u32, u16), DenyingPolicy>,
    ask: F,
}

impl<F: FnMut(Vni, PolicyId, u16) -> Denier> Deniers<F> {
    /// `ask`: returns what denies a packet that a set denies by the rule of a rank, or by none.
    pub fn new(ask: F) -> Self {
        Self {
            known: HashMap::new(),
            ask,
        }
    }

    /// Returns the policy that denied a packet; `None`: no policy did, or this node does not know which.
    pub fn of(&mut self, record: &FlowEventRecord) -> Option<DenyingPolicy> {
        let set = PolicyId::new(record.set)?;
        let key = (record.vni, record.set, record.rank);
        if let Some(known) = self.known.get(&key) {
            return Some(known.clone());
        }
        let denier = (self.ask)(Vni::new(record.vni)?, set, record.rank);
        let policy = match denier {
            Denier::Rule { policy, index } => DenyingPolicy {
                policy: policy.to_string(),
                rule: index,
            },
            // An empty name says so.
            Denier::NoRule { .. } => DenyingPolicy::default(),
            Denier::NoRoom | Denier::Unknown => return None,
        };
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        self.known.insert(key, policy.clone());
        Some(policy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(set: u32, rank: u16) -> FlowEventRecord {
        FlowEventRecord {
            vni: 7,
            set,
            rank,
            ..FlowEventRecord::default()
        }
    }

    /// Plays a node with a rule at rank 3 of set 9, and without room for set 8.
    fn answer(vni: Vni, set: PolicyId, rank: u16) -> Denier {
        assert_eq!(vni.get(), 7);
        match (set.get(), rank) {
            (9, 3) => Denier::Rule {
                policy: "red/web".into(),
                index: 1,
            },
            (9, _) => Denier::NoRule {
                policies: vec!["red/web".into()],
                more: 0,
            },
            (8, _) => Denier::NoRoom,
            _ => Denier::Unknown,
        }
    }

    #[test]
    fn the_policy_and_its_rule_are_named_if_the_node_knows() {
        let mut deniers = Deniers::new(answer);
        let rule = DenyingPolicy {
            policy: "red/web".into(),
            rule: 1,
        };
        assert_eq!(deniers.of(&denied(9, 3)), Some(rule));
        assert_eq!(deniers.of(&denied(9, 0)), Some(DenyingPolicy::default()));
        assert_eq!(deniers.of(&denied(8, 0)), None);
        assert_eq!(deniers.of(&denied(5, 0)), None);
        assert_eq!(deniers.of(&denied(0, 3)), None, "no set denies it");
    }

    #[test]
    fn the_node_is_asked_once_for_what_stays_true() {
        let mut asked = 0;
        let mut deniers = Deniers::new(|vni, set, rank| {
            asked += 1;
            answer(vni, set, rank)
        });
        for _ in 0..3 {
            deniers.of(&denied(9, 3));
            deniers.of(&denied(9, 0));
            deniers.of(&denied(8, 0));
        }
        drop(deniers);
        assert_eq!(asked, 5, "what has no room may get it");
    }
}
