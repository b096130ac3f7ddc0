use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use thuban_api::condition::find;
use thuban_api::{ConditionStatus, Vip};

use super::{Ending, ending, is_withdrawn, keep, left, proceed};

const NOW: &str = "2026-01-01T12:00:00Z";

fn at(seconds: i64) -> Timestamp {
    NOW.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(seconds)
}

fn deleted(drain: u32, status: &Value) -> Vip {
    serde_json::from_value(json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": "web", "namespace": "red", "uid": "v1", "deletionTimestamp": NOW},
        "spec": {"service": "web", "drainSeconds": drain}, "status": status,
    }))
    .unwrap()
}

fn marks(vip: &Vip) -> (Option<String>, Option<String>) {
    let status = vip.status.clone().unwrap();
    (status.name_removed_at, status.withdrawn_at)
}

#[test]
fn a_vip_without_name_and_drain_ends_with_one_write() {
    let mut vip = deleted(0, &json!({}));
    assert!(proceed(&mut vip, at(0)));
    assert!(is_withdrawn(&vip));
    assert!(!proceed(&mut vip, at(1)));
    assert_eq!(ending(&vip, false, at(1)), Ending::Release);
}

#[test]
fn nothing_is_withdrawn_while_the_name_is_there() {
    let mut vip = deleted(
        0,
        &json!({"dnsName": "shop.apps", "dnsZone": "apps", "dnsTtlSeconds": 30}),
    );
    assert!(!proceed(&mut vip, at(100_000)));
    assert_eq!(ending(&vip, false, at(100_000)), Ending::Wait);
    assert!(!is_withdrawn(&vip));
}

#[test]
fn resolvers_and_clients_have_their_time() {
    let mut vip = deleted(60, &json!({"dnsTtlSeconds": 30, "nameRemovedAt": NOW}));
    for seconds in [0, 1, 89] {
        assert!(!proceed(&mut vip, at(seconds)), "{seconds}");
        assert_eq!(ending(&vip, false, at(seconds)), Ending::Wait);
        assert_eq!(
            i64::try_from(left(&vip, at(seconds)).as_secs()).unwrap(),
            90 - seconds
        );
    }
    assert!(proceed(&mut vip, at(90)));
    assert!(is_withdrawn(&vip));
    // The name went before the Vip was deleted.
    let mut vip = deleted(0, &json!({"dnsTtlSeconds": 30}));
    assert!(proceed(&mut vip, at(0)));
    assert!(!is_withdrawn(&vip));
    assert!(proceed(&mut vip, at(30)));
    assert!(is_withdrawn(&vip));
}

#[test]
fn a_time_to_come_is_now() {
    let mut vip = deleted(10, &json!({"nameRemovedAt": at(1_000_000).to_string()}));
    assert!(proceed(&mut vip, at(0)));
    assert_eq!(marks(&vip), (Some(at(0).to_string()), None));
    assert!(proceed(&mut vip, at(10)));
    let mut vip = deleted(
        0,
        &json!({"nameRemovedAt": NOW, "withdrawnAt": at(1_000_000).to_string()}),
    );
    assert!(proceed(&mut vip, at(0)));
    assert!(is_withdrawn(&vip));
    assert_eq!(marks(&vip).1, Some(at(0).to_string()));
}

#[test]
fn silent_nodes_have_a_minute_from_the_withdrawal() {
    let announced = json!({"nameRemovedAt": NOW, "withdrawnAt": at(100).to_string(),
        "announcers": [{"node": "node-a", "sequence": 1}]});
    let vip = deleted(0, &announced);
    assert_eq!(ending(&vip, false, at(159)), Ending::Wait);
    assert_eq!(ending(&vip, false, at(160)), Ending::Leave);
    let told = deleted(0, &json!({"nameRemovedAt": NOW, "withdrawnAt": NOW}));
    assert_eq!(
        ending(&told, true, at(0)),
        Ending::Wait,
        "the Service tells the address"
    );
    assert_eq!(ending(&told, false, at(0)), Ending::Release);
}

#[test]
fn a_vip_that_is_not_deleted_does_not_end() {
    let mut vip = deleted(0, &json!({}));
    vip.metadata.deletion_timestamp = None;
    assert!(!proceed(&mut vip, at(0)));
    assert!(!is_withdrawn(&vip));
}

#[test]
fn a_vip_that_waits_for_its_service_says_so_once() {
    let accepted = json!({"type": "Accepted", "status": "True", "reason": "Valid", "message": "",
        "lastTransitionTime": ""});
    let mut vip = deleted(
        0,
        &json!({"addresses": ["10.0.9.3"], "vpc": "red", "conditions": [accepted]}),
    );
    assert!(keep(&mut vip, at(0)));
    for kind in ["Accepted", "Ready"] {
        let conditions = &vip.status.as_ref().unwrap().conditions;
        let condition = find(conditions, kind).unwrap();
        let said = (condition.status, condition.reason.as_str());
        assert_eq!(said, (ConditionStatus::False, "ServiceKeepsAddresses"), "{kind}");
        assert!(
            condition.message.contains("annotation thuban.dev/service-ip"),
            "{kind}"
        );
    }
    assert!(!keep(&mut vip, at(30)), "said once");
    assert!(!is_withdrawn(&vip), "the lease is renewed");
}
