//! Standard conditions, with reasons that a person can act on.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ConditionStatus {
    True,
    False,
    Unknown,
}

/// One statement about the object, in the form of a Kubernetes condition.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What the condition is about, such as `Accepted` (the spec is valid), `Ready` (packets flow) or `Deleting`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Whether it is so: `True`, `False` or `Unknown`.
    pub status: ConditionStatus,
    /// The reason for programs, one word in CamelCase.
    pub reason: String,
    /// The reason for people: the field or object, what is wrong, and what to do.
    pub message: String,
    /// The time at which `status` changed last, in RFC 3339 format.
    pub last_transition_time: String,
    /// The `metadata.generation` that the condition is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

/// The condition of a VPC that names Services that can't be shared. It stands behind all others: packets flow
/// nevertheless.
pub const ADVICE: &str = "SharedServices";

/// Sets a condition; its time changes only with its status. Returns whether anything but the time changed.
pub fn set(conditions: &mut Vec<Condition>, mut new: Condition) -> bool {
    let Some(old) = conditions.iter_mut().find(|condition| condition.kind == new.kind) else {
        // The column Reason of kubectl shows the first one that is False.
        let advice = conditions.iter().position(|condition| condition.kind == ADVICE);
        let place = advice.filter(|_| new.kind != ADVICE).unwrap_or(conditions.len());
        conditions.insert(place, new);
        return true;
    };
    if old.status == new.status {
        new.last_transition_time.clone_from(&old.last_transition_time);
    }
    let is_changed = *old != new;
    *old = new;
    is_changed
}

/// Returns the condition of a type.
pub fn find<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.kind == kind)
}

#[cfg(test)]
mod tests {
    use super::{Condition, ConditionStatus, find, set};

    fn condition(status: ConditionStatus, reason: &str, time: &str) -> Condition {
        Condition {
            kind: "Accepted".into(),
            status,
            reason: reason.into(),
            message: String::new(),
            last_transition_time: time.into(),
            observed_generation: None,
        }
    }

    #[test]
    fn the_time_changes_only_with_the_status() {
        let mut conditions = Vec::new();
        assert!(set(
            &mut conditions,
            condition(ConditionStatus::False, "Overlap", "1")
        ));
        assert!(!set(
            &mut conditions,
            condition(ConditionStatus::False, "Overlap", "2")
        ));
        assert!(set(
            &mut conditions,
            condition(ConditionStatus::False, "Outside", "3")
        ));
        assert_eq!(find(&conditions, "Accepted").unwrap().last_transition_time, "1");
        assert!(set(
            &mut conditions,
            condition(ConditionStatus::True, "Fine", "4")
        ));
        assert_eq!(find(&conditions, "Accepted").unwrap().last_transition_time, "4");
    }
}
