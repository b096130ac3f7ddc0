use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use thuban_api::Vip;

use super::{Begun, FINALIZER, is_anothers_turn, is_new};

/// Returns a Vip that was made at 8:00.
fn vip(finalizers: &[&str], status: &Value) -> Vip {
    let metadata = json!({"name": "web", "namespace": "red", "uid": "v1", "finalizers": finalizers,
        "creationTimestamp": "2026-11-27T08:00:00Z"});
    serde_json::from_value(
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "metadata": metadata,
        "spec": {"service": "web"}, "status": status}),
    )
    .unwrap()
}

#[test]
fn a_new_vip_is_left_to_the_lbaasd_that_began() {
    let at = |time: &str| format!("2026-11-27T{time}Z").parse::<Timestamp>().unwrap();
    let is_anothers =
        |finalizers: &[&str], status: Value, time| is_anothers_turn(&vip(finalizers, &status), at(time));
    assert!(is_anothers(&[FINALIZER], Value::Null, "08:00:09"));
    assert!(!is_anothers(&[], Value::Null, "08:00:09"), "nobody has begun");
    assert!(
        !is_anothers(&[FINALIZER], json!({}), "08:00:09"),
        "the other one is done"
    );
    assert!(
        !is_anothers(&[FINALIZER], Value::Null, "08:00:10"),
        "the other one has ended"
    );
    assert!(
        !is_anothers(&[FINALIZER], Value::Null, "07:59:50"),
        "another clock is behind"
    );
}

#[test]
fn a_vip_is_its_lbaasds_until_its_status_is_written() {
    let begun = Begun::default();
    assert!(!begun.has("v1"));
    begun.begin("v1");
    assert!(begun.has("v1"), "a look that fails is repeated at once");
    assert!(!begun.has("v2"));
    begun.end("v1");
    assert!(!begun.has("v1"));
}

#[test]
fn a_vip_without_finalizer_and_with_addresses_is_not_new() {
    assert!(is_new(&vip(&[FINALIZER], &Value::Null)));
    let conditions = json!([{"type": "DnsReady", "status": "False", "reason": "NotAnnounced", "message": "",
        "lastTransitionTime": ""}]);
    assert!(is_new(&vip(&[FINALIZER], &json!({"conditions": conditions}))));
    assert!(!is_new(&vip(
        &[FINALIZER],
        &json!({"addresses": ["203.0.113.7"]})
    )));
}
