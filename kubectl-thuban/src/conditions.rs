//! Reads the conditions of objects.

use k8s_openapi::jiff::Timestamp;
use thuban_api::condition::find;
use thuban_api::{Condition, ConditionStatus, Phase};

use crate::report::{Problem, STATUS};

/// The condition that is there only while the object is being deleted.
const DELETING: &str = "Deleting";

/// Conditions of which one that is False, or says that the object is being deleted, stands in an object's way. The most
/// telling comes first.
const TELLING: [&str; 3] = ["Accepted", DELETING, "Ready"];

/// Returns the condition that stands in an object's way.
pub fn lacking(conditions: &[Condition]) -> Option<&Condition> {
    let mut told = TELLING.iter().filter_map(|kind| find(conditions, kind));
    told.find(|condition| condition.kind == DELETING || condition.status == ConditionStatus::False)
}

/// Returns what stands in the way of an object of a kind, if anything does.
pub fn problem(kind: &str, name: &str, phase: Phase, conditions: &[Condition]) -> Option<Problem> {
    match lacking(conditions) {
        Some(condition) => Some(Problem::new(kind, name, &condition.reason, &condition.message)),
        None if phase == Phase::Init => Some(Problem::new(STATUS, name, "NotJudged", "")),
        None => None,
    }
}

/// Returns how long ago a time in RFC 3339 was, for people.
pub fn age(time: &str, now: Timestamp) -> Option<String> {
    let seconds = now.duration_since(time.parse().ok()?).as_secs().max(0);
    Some(match seconds {
        0..120 => format!("{seconds} s"),
        120..7_200 => format!("{} min", seconds / 60),
        7_200..172_800 => format!("{} h", seconds / 3_600),
        _ => format!("{} d", seconds / 86_400),
    })
}

#[cfg(test)]
mod tests {
    use thuban_api::{Condition, ConditionStatus};

    use super::{age, lacking};

    #[test]
    fn an_object_in_deletion_says_what_it_waits_for() {
        let condition = |kind: &str, status, reason: &str| Condition {
            kind: kind.to_owned(),
            status,
            reason: reason.to_owned(),
            message: String::new(),
            last_transition_time: String::new(),
            observed_generation: None,
        };
        let ready = condition("Ready", ConditionStatus::True, "Provisioned");
        assert_eq!(lacking(std::slice::from_ref(&ready)), None);
        let deleting = condition("Deleting", ConditionStatus::True, "WaitsForNetworks");
        assert_eq!(
            lacking(&[ready, deleting]).map(|told| told.reason.as_str()),
            Some("WaitsForNetworks")
        );
    }

    #[test]
    fn an_age_is_short() {
        let now = "2026-11-28T12:00:00Z".parse().unwrap();
        for (time, expected) in [
            ("2026-11-28T11:59:46Z", "14 s"),
            ("2026-11-28T11:50:00Z", "10 min"),
            ("2026-11-27T12:00:00Z", "24 h"),
            ("2026-11-18T12:00:00Z", "10 d"),
            // The clock of this machine is behind.
            ("2026-11-28T12:00:05Z", "0 s"),
        ] {
            assert_eq!(age(time, now).as_deref(), Some(expected));
        }
        assert_eq!(age("yesterday", now), None);
    }
}
