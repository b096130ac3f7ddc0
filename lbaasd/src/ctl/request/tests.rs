use clap::Parser;
use serde_json::{Value, json};
use thuban_api::Vip;

use super::{Conflict, merge};
use crate::ctl::arguments::{Arguments, Make, Verb};

fn request(line: &str) -> Make {
    let words = ["lbaasctl", "make"].into_iter().chain(line.split(' '));
    match Arguments::try_parse_from(words).unwrap().verb {
        Verb::Make(make) => make,
        other => panic!("{other:?}"),
    }
}

fn vip(spec: &Value) -> Vip {
    let mut vip = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": "shop", "resourceVersion": "7"}, "spec": {"service": "web"}});
    for (field, value) in spec.as_object().unwrap() {
        vip["spec"][field] = value.clone();
    }
    serde_json::from_value(vip).unwrap()
}

/// Returns the spec that is to be written.
fn written(existing: Option<&Vip>, line: &str) -> Option<Value> {
    let vip = merge(existing, &request(line)).unwrap()?;
    assert_eq!(
        vip.metadata.resource_version,
        existing.and_then(|vip| vip.metadata.resource_version.clone())
    );
    Some(serde_json::to_value(vip).unwrap()["spec"].take())
}

#[test]
fn a_new_vip_has_what_was_asked_for() {
    let expected = json!({"service": "web", "pool": "", "ipFamilies": ["IPv4"], "requestedIPs": [], "mode": "Dsr",
        "ports": [{"port": 443, "protocol": "TCP"}], "drainSeconds": 0});
    assert_eq!(written(None, "shop web 443 tcp"), Some(expected));
    let all = written(
        None,
        "shop web 53 udp office --pool gold --address 203.0.113.7 --family ipv4 --family ipv6 --mode node \
         --dns-name shop.example.com --drain-seconds 9",
    );
    let expected = json!({"service": "web", "pool": "gold", "ipFamilies": ["IPv4", "IPv6"],
        "requestedIPs": ["203.0.113.7"], "mode": "Node", "ports": [{"port": 53, "protocol": "UDP"}],
        "profiles": ["office"], "dns": {"name": "shop.example.com"}, "drainSeconds": 9});
    assert_eq!(all, Some(expected));
}

#[test]
fn a_repeat_changes_nothing() {
    let line = "shop web 443 tcp office --mode node --dns-name shop.example.com";
    let once = merge(None, &request(line)).unwrap().unwrap();
    assert!(merge(Some(&once), &request(line)).unwrap().is_none());
    assert!(
        merge(Some(&once), &request("shop web 443 tcp"))
            .unwrap()
            .is_none()
    );
    let with_all_ports = vip(&json!({}));
    assert!(
        merge(Some(&with_all_ports), &request("shop web 443 tcp"))
            .unwrap()
            .is_none()
    );
}

#[test]
fn a_vip_gets_what_it_lacks() {
    let has = vip(&json!({"ports": [{"port": 80}], "profiles": ["office"],
        "dns": {"name": "shop.example.com", "ttlSeconds": 9}}));
    let spec = written(Some(&has), "shop web 80 udp").unwrap();
    assert_eq!(
        spec["ports"],
        json!([{"port": 80, "protocol": "TCP"}, {"port": 80, "protocol": "UDP"}])
    );
    assert_eq!(spec["profiles"], json!(["office"]));
    let spec = written(Some(&has), "shop web 80 tcp sticky --dns-name new.example.com").unwrap();
    assert_eq!(spec["profiles"], json!(["sticky"]));
    assert_eq!(spec["dns"], json!({"name": "new.example.com", "ttlSeconds": 9}));
}

#[test]
fn a_vip_for_something_else_stays() {
    let has = vip(&json!({}));
    let other = merge(Some(&has), &request("shop other 80 tcp")).unwrap_err();
    assert_eq!(
        other,
        Conflict::OtherService {
            vip: "shop".into(),
            service: "web".into()
        }
    );
    let mut goes = has;
    goes.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let ending = merge(Some(&goes), &request("shop web 80 tcp")).unwrap_err();
    assert_eq!(ending, Conflict::Ending { vip: "shop".into() });
    let mut of_service = vip(&json!({"service": "shop"}));
    let owner = json!([{"apiVersion": "v1", "kind": "Service", "name": "shop", "uid": "s1"}]);
    of_service.metadata.owner_references = serde_json::from_value(owner).unwrap();
    let made = merge(Some(&of_service), &request("shop shop 80 tcp")).unwrap_err();
    assert_eq!(made, Conflict::OfService { vip: "shop".into() });
}
