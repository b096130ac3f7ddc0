use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::jiff::Timestamp;
use kube::runtime::reflector::store;
use serde_json::{Value, json};
use thuban_api::{ConditionStatus, Vip};
use thuban_client::played;
use tokio::sync::watch;

use super::{Begun, Context, FINALIZER, Outcome, is_anothers_turn, is_new, lease};
use crate::certificates::Certificates;
use crate::leases::Leases;

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

/// Has an lbaasd lease addresses for a Vip that got its finalizer just now, while the API server has `there` by the
/// Vip's name. cidrd can't be reached. Returns whether lbaasd tried to.
async fn asks_cidrd(there: Option<Value>) -> bool {
    let has_asked = Arc::new(AtomicBool::new(false));
    let note = has_asked.clone();
    let client = played::client(move |request| {
        let is_vip = request.path.ends_with("/vips/web");
        if !is_vip {
            // A connection to cidrd begins with its CA.
            assert!(
                request.path.ends_with("/secrets/thuban-cidrd-ca"),
                "{}",
                request.path
            );
            note.store(true, Ordering::Relaxed);
        }
        ready(match &there {
            Some(vip) if is_vip => (200, vip.to_string()),
            _ => played::status(404, "NotFound", "not found"),
        })
    });
    let changes = watch::Sender::new(0);
    let context = Context {
        leases: Arc::new(Leases::new(client.clone(), String::new(), changes.clone())),
        certificates: Arc::new(Certificates::new(client.clone(), changes)),
        client,
        services: store().0,
        profiles: store().0,
        pools: store().0,
        namespaces: store().0,
        begun: Begun::default(),
    };
    let mut vip = vip(&[FINALIZER], &Value::Null);
    vip.spec.pool = "public".to_owned();
    let accepted = (ConditionStatus::True, "Valid", String::new());
    let outcome = lease(&vip, true, &accepted, &context).await.unwrap();
    assert!(matches!(outcome, Outcome::Away), "nothing is decided");
    has_asked.load(Ordering::Relaxed)
}

#[tokio::test]
async fn a_new_vip_that_another_lbaasd_has_ended_gets_no_lease() {
    let there = serde_json::to_value(vip(&[FINALIZER], &Value::Null)).unwrap();
    assert!(asks_cidrd(Some(there.clone())).await, "the Vip is there");
    assert!(!asks_cidrd(None).await, "the Vip is gone");
    let mut in_its_end = there.clone();
    in_its_end["metadata"]["deletionTimestamp"] = "2026-11-27T08:00:01Z".into();
    assert!(!asks_cidrd(Some(in_its_end)).await, "another lbaasd ends the Vip");
    let mut another = there;
    another["metadata"]["uid"] = "v2".into();
    assert!(!asks_cidrd(Some(another)).await, "another Vip has the name");
}
