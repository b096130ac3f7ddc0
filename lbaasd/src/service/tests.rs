use k8s_openapi::api::core::v1::Service;
use serde_json::{Value, json};
use thuban_api::{IpFamily, Vip, VipSpec};

use super::{Step, ingress, is_front, step, wanted, wants_front};

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
    own.status.as_mut().unwrap().announcers.clear();
    assert!(ingress(&service, Some(&own)).is_empty());
}

#[test]
fn a_service_chooses_how_clients_reach_its_backends() {
    let spec = json!({"type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip"});
    let with = |mode: &str| service(&spec, &json!({"thuban.dev/load-balancer-mode": mode}));
    assert!(wanted(&with("Dsr"), false).is_ok() && wanted(&with("Node"), false).is_ok());
    let error = wanted(&with("Tunnel"), false).unwrap_err();
    assert_eq!(
        error,
        "thuban.dev/load-balancer-mode: Tunnel is neither of Dsr, Node"
    );
    assert!(wants_front(&balanced(), true) && wants_front(&with("Dsr"), true));
    assert!(!wants_front(&with("Node"), true) && !wants_front(&balanced(), false));
    let mut told = balanced();
    assert!(!is_front(&told));
    let condition = |status: &str| {
        json!({"conditions": [{"type": "thuban.dev/Front", "status": status, "reason": "Dsr", "message": "",
            "lastTransitionTime": "2026-11-27T00:00:00Z"}]})
    };
    told.status = Some(serde_json::from_value(condition("True")).unwrap());
    assert!(is_front(&told));
    told.status = Some(serde_json::from_value(condition("False")).unwrap());
    assert!(!is_front(&told));
}
