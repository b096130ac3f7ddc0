use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use thuban_api::{DnsZone, Vip};

use super::{LATE_REQUESTS, Step, forget, note_name, note_removal, step};
use crate::dns::Record;

const NAME: &str = "shop.red.apps.example.com";
const NOW: &str = "2026-01-01T12:00:00Z";

fn zones(allowed: &Value) -> Vec<Arc<DnsZone>> {
    let zone = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "DnsZone", "metadata": {"name": "apps"},
        "spec": {"zone": "apps.example.com", "allowedNamespaces": allowed, "names": "Namespace", "ttlSeconds": 30,
            "rfc2136": {"server": "192.0.2.53:53", "secret": "key"}}});
    vec![Arc::new(serde_json::from_value(zone).unwrap())]
}

/// Returns a Vip that wants the name and is announced; `status` adds to that.
fn vip(status: &Value) -> Vip {
    let mut vip = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": "web", "namespace": "red", "uid": "v1"},
        "spec": {"service": "web", "dns": {"name": NAME}},
        "status": {"addresses": ["203.0.113.7"], "conditions": [condition("Announced", "True", "Announced")]},
    });
    for (field, value) in status.as_object().unwrap() {
        vip["status"][field] = value.clone();
    }
    serde_json::from_value(vip).unwrap()
}

fn condition(kind: &str, status: &str, reason: &str) -> Value {
    json!({"type": kind, "status": status, "reason": reason, "message": "", "lastTransitionTime": ""})
}

fn held() -> Value {
    json!({"dnsName": NAME, "dnsZone": "apps", "dnsTtlSeconds": 30})
}

fn at(seconds: i64) -> Timestamp {
    NOW.parse::<Timestamp>().unwrap() + SignedDuration::from_secs(seconds)
}

type Change = fn(&mut Vip);

/// Tells the step in a word, and what it is about.
fn decided(vip: &Vip, zones: &[Arc<DnsZone>], seconds: i64) -> String {
    match step(vip, zones, &BTreeMap::new(), at(seconds)) {
        Step::Nothing => "nothing".into(),
        Step::Lack(reason) => reason.into(),
        Step::Publish(_, record) => format!("publish {:?} {}", record.addresses, record.ttl_seconds),
        Step::Withdraw(_) => "withdraw".into(),
        Step::Wait(left) => format!("wait {}", left.as_secs()),
        Step::Forget => "forget".into(),
    }
}

#[test]
fn a_name_is_published_once_a_node_announces() {
    let zones = zones(&json!({}));
    let mut new = vip(&json!({}));
    assert_eq!(decided(&new, &zones, 0), "publish [203.0.113.7] 30");
    new.spec.dns.as_mut().unwrap().ttl_seconds = Some(5);
    assert_eq!(decided(&new, &zones, 0), "publish [203.0.113.7] 5");
    let silent = json!({"conditions": [condition("Announced", "False", "NoNode")]});
    assert_eq!(decided(&vip(&silent), &zones, 0), "NotAnnounced");
    assert_eq!(
        decided(&vip(&json!({"addresses": []})), &zones, 0),
        "NotAnnounced"
    );
    // It stays while no node announces.
    let mut held = held();
    held["conditions"] = silent["conditions"].clone();
    assert_eq!(decided(&vip(&held), &zones, 0), "publish [203.0.113.7] 30");
    new.spec.dns = None;
    assert_eq!(decided(&new, &zones, 0), "nothing");
}

#[test]
fn a_namespace_not_admitted_gets_no_name_and_keeps_its_own() {
    let closed = zones(&json!(null));
    assert_eq!(decided(&vip(&json!({})), &closed, 0), "NoZone");
    assert_eq!(decided(&vip(&held()), &closed, 0), "publish [203.0.113.7] 30");
    // It does not go on waiting for another's.
    let mut waits = held();
    waits["conditions"] = json!([condition("DnsReady", "False", "NameTaken")]);
    assert_eq!(decided(&vip(&waits), &closed, 0), "withdraw");
    assert_eq!(
        decided(&vip(&waits), &zones(&json!({})), 0),
        "publish [203.0.113.7] 30"
    );
}

#[test]
fn a_name_that_is_unwanted_is_withdrawn_twice() {
    let zones = zones(&json!({}));
    let late = i64::try_from(LATE_REQUESTS.as_secs()).unwrap();
    let unwanted: [Change; 4] = [
        |vip| vip.spec.dns = None,
        |vip| vip.spec.dns.as_mut().unwrap().name = "other.red.apps.example.com".into(),
        |vip| vip.status.as_mut().unwrap().addresses.clear(),
        |vip| vip.metadata.deletion_timestamp = serde_json::from_value(json!(NOW)).unwrap(),
    ];
    for (index, change) in unwanted.into_iter().enumerate() {
        let mut vip = vip(&held());
        change(&mut vip);
        assert_eq!(decided(&vip, &zones, 0), "withdraw", "{index}");
        assert!(note_removal(&mut vip, true, at(0)));
        assert_eq!(decided(&vip, &zones, 0), format!("wait {late}"), "{index}");
        assert_eq!(decided(&vip, &zones, late - 1), "wait 1", "{index}");
        assert_eq!(decided(&vip, &zones, late), "withdraw", "{index}");
        // A late request had brought it again.
        assert!(note_removal(&mut vip, true, at(late)));
        assert_eq!(decided(&vip, &zones, late), format!("wait {late}"), "{index}");
        assert!(note_removal(&mut vip, false, at(2 * late)));
        let status = vip.status.clone().unwrap();
        assert_eq!((status.dns_name.as_str(), status.dns_zone.as_str()), ("", ""));
        assert_eq!(status.dns_ttl_seconds, Some(30), "resolvers may still have it");
        let removed = (index == 3).then(|| at(2 * late).to_string());
        assert_eq!(status.name_removed_at, removed, "{index}");
    }
}

#[test]
fn a_name_that_goes_is_not_published_meanwhile() {
    let zones = zones(&json!({}));
    let mut going = held();
    going["nameRemovedAt"] = json!(NOW);
    assert_eq!(decided(&vip(&going), &zones, 1), "wait 14", "it is wanted again");
    assert_eq!(decided(&vip(&going), &zones, 15), "withdraw");
    // A clock that jumped.
    assert_eq!(decided(&vip(&going), &zones, -5), "withdraw");
    let mut vip = vip(&going);
    assert!(note_removal(&mut vip, false, at(-5)));
    assert_eq!(vip.status.unwrap().name_removed_at, Some(at(-5).to_string()));
}

#[test]
fn a_name_whose_dns_zone_is_gone_is_forgotten() {
    let mut vip = vip(&held());
    assert_eq!(decided(&vip, &[], 0), "forget");
    assert!(forget(&mut vip, at(0)));
    assert_eq!(decided(&vip, &[], 0), "NoZone");
    vip.metadata.deletion_timestamp = serde_json::from_value(json!(NOW)).unwrap();
    assert_eq!(decided(&vip, &[], 0), "nothing");
}

#[test]
fn the_longest_ttl_is_remembered() {
    let zones = zones(&json!({}));
    let mut vip = vip(&json!({}));
    let record = |ttl_seconds| Record {
        name: NAME.into(),
        addresses: Vec::new(),
        ttl_seconds,
    };
    for (ttl, changes, expected) in [(30, true, 30), (30, false, 30), (60, true, 60), (5, false, 60)] {
        assert_eq!(note_name(&mut vip, &zones[0], &record(ttl)), changes, "{ttl}");
        assert_eq!(vip.status.as_ref().unwrap().dns_ttl_seconds, Some(expected));
    }
}
