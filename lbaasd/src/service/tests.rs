use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use k8s_openapi::api::core::v1::Service;
use kube::Client;
use kube::client::Body;
use kube::runtime::controller::Action;
use kube::runtime::reflector::store;
use kube::runtime::watcher::Event;
use serde_json::{Value, json};
use thuban_api::{FRONT_CONDITION, IpFamily, Vip, VipDns, VipSpec};

use super::{
    Context, Step, WAITING_RETRY, front, ingress, is_of_service, is_settled, reconcile, step, wanted,
    wanted_front,
};
use crate::events::Warnings;

fn service(spec: &Value, annotations: &Value) -> Service {
    serde_json::from_value(json!({
        "metadata": {"name": "web", "namespace": "red", "uid": "s1", "annotations": annotations}, "spec": spec,
    }))
    .unwrap()
}

fn balanced() -> Service {
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip", "ipFamilies": ["IPv4"]});
    service(&spec, &json!({}))
}

fn vip(spec: VipSpec, owner: &str) -> Vip {
    let mut vip = Vip::new("web", spec);
    let owner = json!([{"apiVersion": "v1", "kind": "Service", "name": "web", "uid": owner}]);
    vip.metadata.owner_references = serde_json::from_value(owner).unwrap();
    vip
}

fn spec() -> VipSpec {
    wanted(&balanced(), false).unwrap().unwrap()
}

#[test]
fn only_load_balancers_of_the_class_want_a_vip() {
    assert_eq!(spec().service, "web");
    let of = |kind: &str, class: Value| {
        let spec = json!({"type": kind, "loadBalancerClass": class, "ipFamilies": ["IPv4"]});
        service(&spec, &json!({}))
    };
    let none = of("LoadBalancer", Value::Null);
    assert_eq!(wanted(&none, false), Ok(None));
    assert!(wanted(&none, true).unwrap().is_some());
    assert_eq!(
        wanted(&of("LoadBalancer", json!("other/balancer")), true),
        Ok(None)
    );
    assert_eq!(wanted(&of("NodePort", Value::Null), true), Ok(None));
}

#[test]
fn annotations_choose_pool_and_addresses() {
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip",
        "loadBalancerIP": "203.0.113.9", "ipFamilies": ["IPv6", "IPv4"]});
    let plain = wanted(&service(&spec, &json!({})), false).unwrap().unwrap();
    assert_eq!(plain.requested_ips, ["203.0.113.9"]);
    assert_eq!(plain.ip_families, [IpFamily::V6, IpFamily::V4]);
    let annotations =
        json!({"thuban.dev/ip-pool": "gold", "thuban.dev/load-balancer-ips": "203.0.113.7, 2001:db8::7"});
    let chosen = wanted(&service(&spec, &annotations), false).unwrap().unwrap();
    assert_eq!(chosen.pool, "gold");
    assert_eq!(chosen.requested_ips, ["203.0.113.7", "2001:db8::7"]);
    for wrong in ["203.0.113.07", "203.0.113.7, 203.0.113.8", "web"] {
        let annotations = json!({"thuban.dev/load-balancer-ips": wrong});
        assert!(wanted(&service(&spec, &annotations), false).is_err(), "{wrong}");
    }
}

#[test]
fn an_annotation_asks_for_a_health_check() {
    let with = |annotations: &Value| {
        let mut service = balanced();
        service.metadata.annotations = serde_json::from_value(annotations.clone()).unwrap();
        wanted(&service, false)
    };
    let annotation = "thuban.dev/health-check";
    let http = r#"{"type": "HTTP", "port": 8080}"#;
    let checked = with(&json!({annotation: http})).unwrap().unwrap();
    assert_eq!(checked.health_check.as_ref().unwrap().get_path(), Some("/"));
    let step = step(&balanced(), Some(checked.clone()), Some(&vip(spec(), "s1")));
    assert_eq!(step, Step::Change(checked));
    let wrong = with(&json!({annotation: r#"{"port": 0}"#})).unwrap_err();
    assert_eq!(wrong, "thuban.dev/health-check: port must be 1 to 65535");
    let in_mode = |mode: &str| with(&json!({annotation: http, "thuban.dev/load-balancer-mode": mode}));
    assert!(in_mode("Node").unwrap_err().contains("has no effect"));
    assert_eq!(in_mode("Tunnel"), in_mode("Dsr"));
}

#[test]
fn a_vip_is_made_changed_and_deleted_as_its_service_wants() {
    let balanced = balanced();
    let step = |wanted: Option<VipSpec>, vip: Option<&Vip>| super::step(&balanced, wanted, vip);
    assert_eq!(step(Some(spec()), None), Step::Create(spec()));
    assert_eq!(step(Some(spec()), Some(&vip(spec(), "s1"))), Step::Keep);
    assert_eq!(
        step(None, Some(&vip(spec(), "s1"))),
        Step::Keep,
        "another default"
    );
    let other = service(&json!({"type": "ClusterIP"}), &json!({}));
    assert_eq!(super::step(&other, None, Some(&vip(spec(), "s1"))), Step::Delete);
    assert_eq!(step(None, None), Step::Keep);
    let grown = VipSpec {
        ip_families: vec![IpFamily::V4, IpFamily::V6],
        ..spec()
    };
    assert_eq!(
        step(Some(grown.clone()), Some(&vip(spec(), "s1"))),
        Step::Change(grown.clone())
    );
    assert_eq!(step(Some(spec()), Some(&vip(grown, "s1"))), Step::Keep);
    let named = VipSpec {
        requested_ips: vec!["203.0.113.7".into()],
        ..spec()
    };
    let mut has = vip(spec(), "s1");
    assert_eq!(step(Some(named.clone()), Some(&has)), Step::Delete);
    has.status = serde_json::from_value(json!({"addresses": ["203.0.113.7"]})).unwrap();
    assert_eq!(step(Some(named), Some(&has)), Step::Keep);
    let moved = VipSpec {
        pool: "gold".into(),
        ..spec()
    };
    assert_eq!(step(Some(moved), Some(&vip(spec(), "s1"))), Step::Delete);
}

#[test]
fn anothers_vip_of_the_name_is_waited_for_and_not_told() {
    let service = balanced();
    let others = vip(spec(), "s2");
    assert_eq!(step(&service, Some(spec()), Some(&others)), Step::Wait);
    assert_eq!(step(&service, None, Some(&others)), Step::Keep);
    let mut told = others.clone();
    told.status = serde_json::from_value(json!({"addresses": ["203.0.113.7"]})).unwrap();
    assert!(ingress(&service, Some(&told)).is_empty());
    let mut goes = vip(spec(), "s1");
    goes.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(step(&service, Some(spec()), Some(&goes)), Step::Wait);
}

/// Returns a Service that lbaasd made for a Vip of its name.
fn made_for(vip_uid: &str) -> Service {
    let mut made = balanced();
    let owner = json!([{"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "name": "web", "uid": vip_uid,
        "controller": true}]);
    made.metadata.owner_references = serde_json::from_value(owner).unwrap();
    made
}

fn users_vip() -> Vip {
    let mut vip = Vip::new("web", VipSpec::default());
    vip.metadata.uid = Some("v1".into());
    vip.status = serde_json::from_value(json!({"addresses": ["203.0.113.7"]})).unwrap();
    vip
}

#[test]
fn a_service_made_for_a_vip_gets_no_vip() {
    let made = made_for("v1");
    assert_eq!(wanted(&made, true), Ok(None));
    assert_eq!(step(&made, None, None), Step::Keep);
    assert_eq!(step(&made, None, Some(&users_vip())), Step::Keep);
    // A Vip that a user made to look like the Service's.
    let mut other = made;
    other.spec.as_mut().unwrap().type_ = Some("ClusterIP".into());
    assert_eq!(step(&other, None, Some(&vip(spec(), "s1"))), Step::Keep);
}

#[test]
fn a_service_tells_the_addresses_of_the_vip_it_is_for() {
    let told = |service: &Service| ingress(service, Some(&users_vip()));
    assert_eq!(told(&made_for("v1")), ["203.0.113.7"]);
    assert!(told(&made_for("v2")).is_empty(), "of a former Vip of the name");
    assert!(told(&balanced()).is_empty(), "somebody's");
    let mut private = users_vip();
    private.status.as_mut().unwrap().vpc = "red".into();
    assert!(
        ingress(&made_for("v1"), Some(&private)).is_empty(),
        "of a VPC alone"
    );
    let mut goes = users_vip();
    goes.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(ingress(&made_for("v1"), Some(&goes)), ["203.0.113.7"]);
    goes.status.as_mut().unwrap().withdrawn_at = Some("2026-01-01T00:00:30Z".into());
    assert!(ingress(&made_for("v1"), Some(&goes)).is_empty());
}

#[test]
fn only_a_service_of_its_name_can_have_made_a_vip() {
    let mut own = vip(spec(), "s1");
    assert!(is_of_service(&own));
    own.spec.service = "other".into();
    assert!(!is_of_service(&own));
    assert!(!is_of_service(&users_vip()));
    let mut charts = vip(spec(), "s1");
    charts.metadata.owner_references.as_mut().unwrap()[0].kind = "Chart".into();
    assert!(!is_of_service(&charts));
}

#[test]
fn a_services_addresses_stay_until_nobody_announces_them() {
    let service = balanced();
    let mut own = vip(spec(), "s1");
    assert!(ingress(&service, Some(&own)).is_empty());
    let status = json!({"addresses": ["203.0.113.7"], "announcers": [{"node": "node-a", "sequence": 1}]});
    own.status = serde_json::from_value(status).unwrap();
    assert_eq!(ingress(&service, Some(&own)), ["203.0.113.7"]);
    own.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert_eq!(ingress(&service, Some(&own)), ["203.0.113.7"]);
    own.status.as_mut().unwrap().withdrawn_at = Some("2026-01-01T00:00:30Z".into());
    assert_eq!(ingress(&service, Some(&own)), ["203.0.113.7"]);
    own.status.as_mut().unwrap().announcers.clear();
    assert!(ingress(&service, Some(&own)).is_empty());
    // Clients still come by the name.
    own.status.as_mut().unwrap().withdrawn_at = None;
    assert_eq!(ingress(&service, Some(&own)), ["203.0.113.7"]);
}

#[test]
fn a_service_chooses_how_clients_reach_its_backends() {
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip"});
    let with = |mode: &str| service(&spec, &json!({"thuban.dev/load-balancer-mode": mode}));
    assert!(wanted(&with("Dsr"), false).is_ok() && wanted(&with("Node"), false).is_ok());
    assert!(wanted(&with("Tunnel"), false).is_ok());
    let error = wanted(&with("Nat"), false).unwrap_err();
    assert_eq!(
        error,
        "thuban.dev/load-balancer-mode: Nat is none of Dsr, Tunnel, Node"
    );
    assert_eq!(wanted_front(&balanced(), true), Some("Dsr"));
    assert_eq!(wanted_front(&with("Dsr"), true), Some("Dsr"));
    assert_eq!(wanted_front(&with("Tunnel"), true), Some("Tunnel"));
    assert_eq!(wanted_front(&with("Node"), true), None);
    for mode in [balanced(), with("Tunnel")] {
        assert_eq!(wanted_front(&mode, false), None);
    }
    let mut told = balanced();
    assert_eq!(front(&told), None);
    let condition = |status: &str, mode: &str| {
        json!({"conditions": [{"type": "thuban.dev/Front", "status": status, "reason": mode, "message": "",
            "lastTransitionTime": "2026-11-27T00:00:00Z"}]})
    };
    for mode in ["Dsr", "Tunnel"] {
        told.status = Some(serde_json::from_value(condition("True", mode)).unwrap());
        assert_eq!(front(&told), Some(mode));
        told.status = Some(serde_json::from_value(condition("False", mode)).unwrap());
        assert_eq!(front(&told), None);
    }
}

#[test]
fn annotations_name_a_service_in_dns() {
    let named = |name: &str, drain: &str| {
        let mut service = balanced();
        let annotations = service.metadata.annotations.get_or_insert_default();
        annotations.insert("thuban.dev/dns-name".into(), name.into());
        annotations.insert("thuban.dev/drain-seconds".into(), drain.into());
        service
    };
    let spec = wanted(&named("shop.red.apps.example.com", "60"), false)
        .unwrap()
        .unwrap();
    assert_eq!(spec.dns.as_ref().unwrap().name, "shop.red.apps.example.com");
    assert_eq!(spec.drain_seconds, 60);
    let long = format!("{}.example.com", "a".repeat(64));
    for name in [
        "",
        "shop",
        "shop.",
        ".shop",
        "Shop.example.com",
        "-a.b",
        "a-.b",
        "a..b",
        "a_b.c",
        "*.b.c",
        &long,
    ] {
        assert!(wanted(&named(name, "0"), false).is_err(), "{name}");
    }
    for drain in ["", "-1", "3601", "1m"] {
        assert!(wanted(&named("a.b", drain), false).is_err(), "{drain}");
    }
}

#[test]
fn a_vips_name_follows_the_services_annotation() {
    let service = balanced();
    let with = |name: Option<&str>, ttl| VipSpec {
        dns: name.map(|name| VipDns {
            name: name.into(),
            ttl_seconds: ttl,
        }),
        ..spec()
    };
    let changed = |wanted, has| step(&service, Some(wanted), Some(&vip(has, "s1")));
    assert_eq!(
        changed(with(Some("a.b"), None), spec()),
        Step::Change(with(Some("a.b"), None))
    );
    // A TTL that an administrator gave the Vip stays.
    assert_eq!(
        changed(with(Some("a.b"), None), with(Some("a.b"), Some(5))),
        Step::Keep
    );
    assert_eq!(
        changed(with(Some("c.b"), None), with(Some("a.b"), Some(5))),
        Step::Change(with(Some("c.b"), Some(5)))
    );
    assert_eq!(changed(spec(), with(Some("a.b"), None)), Step::Change(spec()));
    let drains = VipSpec {
        drain_seconds: 60,
        ..spec()
    };
    assert_eq!(changed(drains.clone(), spec()), Step::Change(drains));
}

#[test]
fn a_service_is_settled_once_it_tells_its_vips_addresses() {
    let mut vip = vip(spec(), "s1");
    vip.status = serde_json::from_value(json!({"addresses": ["203.0.113.7"]})).unwrap();
    let mut service = balanced();
    let is_done = |service: &Service, vip: Option<&Vip>| {
        is_settled(service, wanted(service, false).unwrap(), vip, false)
    };
    assert!(!is_done(&service, None), "it lacks a Vip");
    assert!(!is_done(&service, Some(&vip)), "it tells no address");
    let front = json!({"type": FRONT_CONDITION, "status": "True", "reason": "Dsr", "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z"});
    let ingress = json!([{"ip": "203.0.113.7", "ipMode": "VIP"}]);
    let status = json!({"loadBalancer": {"ingress": ingress}, "conditions": [front]});
    service.status = serde_json::from_value(status).unwrap();
    assert!(is_done(&service, Some(&vip)));
    vip.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert!(!is_done(&service, Some(&vip)), "it needs another Vip");
    service.spec.as_mut().unwrap().type_ = Some("ClusterIP".to_owned());
    assert!(
        is_done(&service, Some(&vip)),
        "the Vip goes, and is still announced"
    );
    vip.status.as_mut().unwrap().withdrawn_at = Some("2026-01-01T00:00:30Z".to_owned());
    assert!(!is_done(&service, Some(&vip)), "nobody announces it");
}

/// Returns what becomes of a Service whose Vip an API server does not make, for this reason.
async fn refused(reason: &'static str) -> Result<Action, kube::Error> {
    let answer = move |_: Request<Body>| async move {
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": "", "reason": reason, "code": 409});
        let mut answer = Response::new(Body::from(status.to_string().into_bytes()));
        *answer.status_mut() = http::StatusCode::CONFLICT;
        Ok::<_, Infallible>(answer)
    };
    let client = Client::new(tower::service_fn(answer), "default");
    let (vips, mut writer) = store::<Vip>();
    writer.apply_watcher_event(&Event::InitDone);
    let context = Context {
        client: client.clone(),
        vips,
        warnings: Warnings::new(client),
        is_default: false,
        asked: Mutex::default(),
    };
    reconcile(Arc::new(balanced()), Arc::new(context)).await
}

#[tokio::test]
async fn only_a_vip_of_the_name_is_waited_for() {
    let waits = refused("AlreadyExists").await.unwrap();
    assert_eq!(waits, Action::requeue(WAITING_RETRY));
    assert!(
        refused("Conflict").await.is_err(),
        "others have written the quota"
    );
}
