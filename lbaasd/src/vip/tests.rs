use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use thuban_api::condition::find;
use thuban_api::{AnnounceBy, ConditionStatus, IpFamily, IpPool, PoolDriver, Vip};

use super::{Outcome, Terms, accepted, choose, describe, refused_retry, sum_up};

fn pool(name: &str, more: &Value) -> IpPool {
    let mut pool = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "IpPool", "metadata": {"name": name},
        "spec": {"class": "public", "cidrs": ["203.0.113.0/24"], "allowedNamespaces": {}, "driver": "Xdp"},
        "status": {"free": 7, "conditions": [{"type": "Accepted", "status": "True", "reason": "Valid",
            "message": "", "lastTransitionTime": ""}]},
    });
    for (path, value) in more.as_object().unwrap() {
        *pool.pointer_mut(path).unwrap() = value.clone();
    }
    serde_json::from_value(pool).unwrap()
}

#[test]
fn the_first_pool_that_can_give_an_address_is_chosen() {
    let chosen = |pools: &[IpPool], families: &[IpFamily]| {
        let names = choose(pools, &BTreeMap::new(), families);
        names.first().map(|name| (*name).to_owned())
    };
    let v4 = [IpFamily::V4];
    let good = pool("m", &json!({}));
    assert_eq!(chosen(std::slice::from_ref(&good), &v4).as_deref(), Some("m"));
    for other in [
        pool(
            "a",
            &json!({"/spec/allowedNamespaces": {"matchLabels": {"tier": "gold"}}}),
        ),
        pool("a", &json!({"/spec/allowedNamespaces": null})),
        pool("a", &json!({"/spec/class": "private"})),
        pool("a", &json!({"/spec/driver": "Haproxy"})),
        pool("a", &json!({"/spec/cidrs": ["2001:db8::/120"]})),
        pool("a", &json!({"/status/free": 0})),
        pool("a", &json!({"/status/conditions/0/status": "False"})),
    ] {
        assert_eq!(chosen(std::slice::from_ref(&other), &v4), None, "{other:?}");
        assert_eq!(chosen(&[good.clone(), other], &v4).as_deref(), Some("m"));
    }
    assert_eq!(chosen(&[good, pool("b", &json!({}))], &v4).as_deref(), Some("b"));
    let both = pool("d", &json!({"/spec/cidrs": ["203.0.113.0/24", "2001:db8::/120"]}));
    assert_eq!(
        chosen(&[both], &[IpFamily::V4, IpFamily::V6]).as_deref(),
        Some("d")
    );
}

fn vip(status: &Value) -> Vip {
    serde_json::from_value(json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": "web", "namespace": "red", "generation": 3},
        "spec": {"service": "web", "ipFamilies": ["IPv4"]}, "status": status,
    }))
    .unwrap()
}

fn valid() -> super::Said {
    (ConditionStatus::True, "Valid", String::new())
}

#[test]
fn a_cidrd_that_is_away_takes_no_address() {
    let away = Outcome::Away;
    let now = Timestamp::now();
    let mut has = vip(&json!({"addresses": ["203.0.113.7"], "pool": "public"}));
    assert!(describe(&mut has, valid(), None, &away, now));
    let status = has.status.clone().unwrap();
    assert_eq!(status.addresses, ["203.0.113.7"]);
    assert!(
        find(&status.conditions, "Leased").is_none(),
        "another may know better"
    );
    assert!(!describe(&mut has, valid(), None, &away, now), "nothing new");
    let lost = Outcome::Refused("Taken".into(), String::new(), Vec::new());
    describe(&mut has, valid(), None, &lost, now);
    assert!(has.status.unwrap().addresses.is_empty(), "another has it");
    let mut has_none = vip(&json!({}));
    describe(&mut has_none, valid(), None, &away, now);
    let status = has_none.status.unwrap();
    assert_eq!(
        find(&status.conditions, "Leased").unwrap().status,
        ConditionStatus::False
    );
}

/// A watch of lbaasd's or cidrd's may show a pool only after another one has woken the Vip.
#[test]
fn a_vip_that_is_refused_is_looked_at_again_soon_at_first() {
    let now: Timestamp = "2026-11-27T08:01:00Z".parse().unwrap();
    let seconds = |status: &str, since: &str| {
        let leased = json!({"type": "Leased", "status": status, "reason": "NoPool", "message": "",
            "lastTransitionTime": since});
        refused_retry(&vip(&json!({"conditions": [leased]})), now).as_secs()
    };
    assert_eq!(
        refused_retry(&vip(&json!({})), now).as_secs(),
        2,
        "for the first time"
    );
    assert_eq!(seconds("False", "2026-11-27T08:00:59Z"), 2);
    assert_eq!(seconds("False", "2026-11-27T08:00:52Z"), 8);
    assert_eq!(seconds("False", "2026-11-27T07:00:00Z"), 30);
    assert_eq!(
        seconds("True", "2026-11-27T07:00:00Z"),
        2,
        "it had leases until now"
    );
    assert_eq!(
        seconds("False", "2026-11-27T08:02:00Z"),
        2,
        "another clock is ahead"
    );
    assert_eq!(seconds("False", ""), 2);
}

#[test]
fn healthy_follows_from_the_members() {
    let said = |check: &Value, count: u32, failing: u32| {
        let old = json!({"type": "Healthy", "status": "True", "reason": "Passing", "message": "",
            "lastTransitionTime": ""});
        let mut vip = vip(&json!({"memberCount": count, "failingMembers": failing, "conditions": [old]}));
        vip.spec.health_check = serde_json::from_value(check.clone()).unwrap();
        describe(&mut vip, valid(), None, &Outcome::Away, Timestamp::now());
        let status = vip.status.unwrap();
        assert_eq!(
            (status.member_count, status.failing_members),
            (count, failing),
            "the operator's"
        );
        find(&status.conditions, "Healthy").map(|condition| (condition.status, condition.reason.clone()))
    };
    let check = json!({"port": 8080});
    let of = |count, failing| said(&check, count, failing).unwrap();
    assert_eq!(of(3, 0), (ConditionStatus::True, "Passing".to_owned()));
    assert_eq!(of(3, 1), (ConditionStatus::False, "MembersFail".to_owned()));
    assert_eq!(of(3, 3), (ConditionStatus::False, "AllMembersFail".to_owned()));
    assert_eq!(of(0, 0), (ConditionStatus::False, "NoMembers".to_owned()));
    assert_eq!(said(&Value::Null, 3, 0), None);
}

#[test]
fn healthy_says_that_an_annotation_is_not_valid() {
    for check in [json!({"port": 8080}), Value::Null] {
        let mut vip = vip(&json!({"memberCount": 3}));
        vip.spec.health_check = serde_json::from_value(check.clone()).unwrap();
        let now = Timestamp::now();
        describe(&mut vip, valid(), None, &Outcome::Away, now);
        let error = Some("thuban.dev/health-check: port must be 1 to 65535");
        assert!(describe(&mut vip, valid(), error, &Outcome::Away, now));
        let conditions = vip.status.clone().unwrap().conditions;
        let healthy = find(&conditions, "Healthy").unwrap();
        let said = (healthy.status, healthy.reason.as_str());
        assert_eq!(said, (ConditionStatus::False, "InvalidAnnotation"));
        assert_eq!(
            healthy.message,
            "no backend is checked: correct or remove the Service's annotation thuban.dev/health-check: port must be \
             1 to 65535"
        );
        assert!(
            !describe(&mut vip, valid(), error, &Outcome::Away, now),
            "said once"
        );
        describe(&mut vip, valid(), None, &Outcome::Away, now);
        let conditions = vip.status.unwrap().conditions;
        let reason = find(&conditions, "Healthy").map(|condition| condition.reason.as_str());
        assert_eq!(reason, (!check.is_null()).then_some("Passing"));
    }
}

#[test]
fn a_pools_terms_stay_while_a_node_announces() {
    let terms = Terms {
        announce: AnnounceBy::L2,
        driver: PoolDriver::Haproxy,
    };
    let mut announced = vip(&json!({"announcers": [{"node": "node-a", "sequence": 1}]}));
    assert!(!terms.set(&mut announced), "another pool's");
    let mut new = vip(&json!({}));
    assert!(terms.set(&mut new));
    assert!(!terms.set(&mut new), "nothing new");
    let status = new.status.unwrap();
    assert_eq!(
        (status.announce, status.driver),
        (AnnounceBy::L2, PoolDriver::Haproxy)
    );
}

#[test]
fn ready_has_the_reason_of_what_is_first_untrue() {
    let judged = |kinds: &[(&str, &str, &str)], dns: &Value| {
        let condition = |(kind, status, reason): &(&str, &str, &str)| json!({"type": kind, "status": status, "reason": reason, "message": "so", "lastTransitionTime": ""});
        let conditions: Vec<Value> = kinds.iter().map(condition).collect();
        let mut vip = vip(&json!({"announcedBy": ["a", "b"], "conditions": conditions}));
        vip.spec.dns = serde_json::from_value(dns.clone()).unwrap();
        sum_up(&mut vip, Timestamp::now());
        let status = vip.status.unwrap();
        assert_eq!(status.nodes, 2);
        let ready = find(&status.conditions, "Ready").unwrap();
        (ready.status, ready.reason.clone(), ready.message.clone())
    };
    let (accepted, leased) = (("Accepted", "True", "Valid"), ("Leased", "True", "Held"));
    let announced = ("Announced", "True", "Announced");
    let reason = |kinds: &[(&str, &str, &str)]| judged(kinds, &Value::Null).1;
    assert_eq!(reason(&[accepted, leased, announced]), "Ready");
    assert_eq!(reason(&[accepted, leased]), "Pending");
    assert_eq!(
        reason(&[("Accepted", "False", "NameTaken"), leased, announced]),
        "NameTaken"
    );
    let named = json!({"name": "shop.example.com"});
    assert_eq!(judged(&[accepted, leased, announced], &named).1, "Pending");
    let no_zone = ("DnsReady", "False", "NoZone");
    let (status, reason, message) = judged(&[accepted, leased, announced, no_zone], &named);
    assert_eq!((status, reason.as_str()), (ConditionStatus::False, "NoZone"));
    assert_eq!(message, "DnsReady: so");
}

#[test]
fn a_vip_without_its_service_is_not_accepted() {
    let vip = vip(&json!({}));
    assert_eq!(accepted(&vip, None).1, "ServiceNotFound");
    let service = |kind: &str, class: Value| {
        serde_json::from_value(json!({"metadata": {"name": "web", "uid": "s1"},
            "spec": {"type": kind, "loadBalancerClass": class}}))
        .unwrap()
    };
    let reason = |vip: &Vip, kind: &str, class: Value| accepted(vip, Some(&service(kind, class))).1;
    assert_eq!(
        reason(&vip, "LoadBalancer", Value::Null),
        "ServiceNotServed",
        "another's"
    );
    let mut own = vip.clone();
    let owner = json!([{"apiVersion": "v1", "kind": "Service", "name": "web", "uid": "s1"}]);
    own.metadata.owner_references = serde_json::from_value(owner).unwrap();
    assert_eq!(reason(&own, "ClusterIP", Value::Null), "ServiceNotServed");
    assert_eq!(
        reason(&own, "LoadBalancer", json!("other/balancer")),
        "ServiceNotServed"
    );
    assert_eq!(reason(&own, "LoadBalancer", Value::Null), "Valid");
    assert_eq!(reason(&own, "LoadBalancer", json!("thuban.dev/vip")), "Valid");
}

#[test]
fn a_private_vip_is_ready_without_an_announcement() {
    let condition = |kind: &str, status: &str, reason: &str| {
        let mut condition = json!({"type": kind, "status": status, "reason": reason});
        condition["message"] = json!("");
        condition["lastTransitionTime"] = json!("");
        condition
    };
    let conditions = [
        condition("Accepted", "True", "Valid"),
        condition("Leased", "True", "Held"),
        condition("Announced", "False", "NoNode"),
    ];
    let status = |vpc: &str| json!({"addresses": ["10.7.0.9"], "vpc": vpc, "conditions": conditions});
    let described = |vpc: &str| {
        let mut vip = vip(&status(vpc));
        describe(&mut vip, valid(), None, &Outcome::Away, Timestamp::now());
        let status = vip.status.unwrap();
        let ready = find(&status.conditions, "Ready").unwrap().reason.clone();
        (ready, find(&status.conditions, "Announced").is_some())
    };
    assert_eq!(described(""), ("NoNode".to_owned(), true));
    assert_eq!(described("red"), ("Ready".to_owned(), false));
}
