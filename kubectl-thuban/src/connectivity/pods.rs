//! Whether a pod of the test works, and why it does not start. Pure.

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;

/// Reasons of containers that only wait for their turn.
const USUAL: [&str; 2] = ["ContainerCreating", "PodInitializing"];

pub fn is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.iter().flat_map(|status| &status.conditions).flatten();
    conditions
        .filter(|condition| condition.type_ == "Ready")
        .any(|condition| condition.status == "True")
}

pub fn phase(pod: &Pod) -> &str {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    phase.unwrap_or("Pending")
}

/// Whether the pod's container has ended, so that its log is whole.
pub fn has_ended(pod: &Pod) -> bool {
    matches!(phase(pod), "Succeeded" | "Failed")
}

/// Says why a pod does not run: by its container, by its condition, or by the last event that warns.
pub fn why(pod: &Pod, events: &[Event]) -> String {
    let told = of_container(pod)
        .or_else(|| of_scheduling(pod))
        .or_else(|| of_events(pod, events));
    told.unwrap_or_else(|| format!("{}, and no event says why", phase(pod)))
}

fn of_container(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let mut states = status
        .container_statuses
        .iter()
        .flatten()
        .filter_map(|container| container.state.as_ref());
    states.find_map(|state| {
        if let Some(ended) = &state.terminated {
            let text = ended.message.as_deref().or(ended.reason.as_deref());
            return Some(format!(
                "its container ended with {}: {}",
                ended.exit_code,
                text.unwrap_or_default()
            ));
        }
        let waiting = state.waiting.as_ref()?;
        let reason = waiting
            .reason
            .as_deref()
            .filter(|reason| !USUAL.contains(reason))?;
        Some(with_message(reason, waiting.message.as_deref()))
    })
}

fn of_scheduling(pod: &Pod) -> Option<String> {
    let mut conditions = pod.status.as_ref()?.conditions.iter().flatten();
    let refused =
        conditions.find(|condition| condition.type_ == "PodScheduled" && condition.status == "False")?;
    let reason = refused.reason.as_deref().unwrap_or("not scheduled");
    Some(with_message(reason, refused.message.as_deref()))
}

/// Returns the last warning about the pod, or the last event if none warns.
fn of_events(pod: &Pod, events: &[Event]) -> Option<String> {
    let name = pod.name_any();
    let own = events
        .iter()
        .filter(|event| event.involved_object.name.as_deref() == Some(name.as_str()));
    let last = own.max_by_key(|event| (event.type_.as_deref() == Some("Warning"), time(event)))?;
    let reason = last.reason.as_deref().unwrap_or("event");
    Some(with_message(reason, last.message.as_deref()))
}

fn time(event: &Event) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    last.or_else(|| event.event_time.as_ref().map(|time| time.0))
}

fn with_message(reason: &str, message: Option<&str>) -> String {
    match message {
        Some(message) if !message.is_empty() => format!("{reason}: {message}"),
        _ => reason.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Event, Pod};
    use serde_json::{Value, json};

    use super::{has_ended, is_ready, why};
    use crate::testing::object;

    fn pod(status: &Value) -> Pod {
        object(json!({"metadata": {"name": "web-0"}, "status": status}))
    }

    fn event(pod: &str, kind: &str, minute: u8, reason: &str) -> Event {
        object(json!({
            "metadata": {}, "involvedObject": {"name": pod}, "type": kind, "reason": reason, "message": "said",
            "lastTimestamp": format!("2026-11-28T12:{minute:02}:00Z"),
        }))
    }

    #[test]
    fn the_most_telling_reason_is_said() {
        let events = [
            event("web-0", "Warning", 1, "FailedScheduling"),
            event("web-0", "Warning", 2, "FailedCreatePodSandBox"),
            event("web-0", "Normal", 3, "Pulling"),
            event("web-1", "Warning", 4, "OutOfDisk"),
        ];
        let waiting = |reason: &str| {
            let state = json!({"waiting": {"reason": reason, "message": "back-off"}});
            let container = json!({"name": "c", "image": "", "imageID": "", "ready": false, "restartCount": 0,
                "state": state});
            pod(&json!({"phase": "Pending", "containerStatuses": [container]}))
        };
        assert_eq!(
            why(&waiting("ImagePullBackOff"), &events),
            "ImagePullBackOff: back-off"
        );
        assert_eq!(
            why(&waiting("ContainerCreating"), &events),
            "FailedCreatePodSandBox: said"
        );
        let unscheduled = json!({"conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"},
        ]});
        assert_eq!(why(&pod(&unscheduled), &events), "Unschedulable: 0/3 nodes");
        assert_eq!(why(&pod(&json!({})), &events[2..]), "Pulling: said");
        assert!(why(&pod(&json!({})), &[]).starts_with("Pending"));
    }

    #[test]
    fn a_pod_is_ready_by_its_condition_and_ends_by_its_phase() {
        let ready =
            |status: &str| json!({"phase": "Running", "conditions": [{"type": "Ready", "status": status}]});
        assert!(is_ready(&pod(&ready("True"))));
        assert!(!is_ready(&pod(&ready("False"))));
        assert!(!has_ended(&pod(&ready("True"))));
        assert!(has_ended(&pod(&json!({"phase": "Failed"}))));
        let ended = json!({"phase": "Failed", "containerStatuses": [{"name": "c", "image": "", "imageID": "",
            "ready": false, "restartCount": 0, "state": {"terminated": {"exitCode": 2, "reason": "Error"}}}]});
        assert_eq!(why(&pod(&ended), &[]), "its container ended with 2: Error");
    }
}
