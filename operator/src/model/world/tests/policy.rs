//! Network policy in a world: who gets which rows, and when.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use thuban_rows::{Kind, LocalEndpoint, PolicyId, PolicySet};

use super::super::EndpointName;
use super::*;
use crate::model::policy::{Node, Profile};

/// Longer than a row rests, milliseconds.
pub(super) const REST: u64 = 31_000;

pub(super) fn name(host: u64) -> EndpointName {
    ("ns".to_owned(), format!("e{host}"))
}

pub(super) fn add(world: &mut World, app: &str, droplet: u64, host: u64) {
    let mut endpoint = endpoint("web", droplet, host);
    let labels = [("app".to_owned(), app.to_owned())].into();
    let profile = Profile {
        labels,
        ..Profile::default()
    };
    endpoint.profile = Some(Arc::new(profile));
    world.set_endpoint(&name(host), Some(endpoint));
}

pub(super) fn set(world: &mut World, policy: &str, spec: &Value) {
    let spec = serde_json::from_value(spec.clone()).unwrap();
    world.set_network_policy("ns", policy, 0, Some(&spec)).unwrap();
}

/// Lets `db` take packets of `web` alone.
fn of_web() -> Value {
    json!({
        "podSelector": {"matchLabels": {"app": "db"}},
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}],
    })
}

pub(super) fn local(world: &World, host: u64) -> LocalEndpoint {
    let droplet = world.endpoint(&name(host)).unwrap().droplet.clone();
    let address = IpAddr::from(Ipv4Addr::from(0x0a00_0000 + host as u32));
    let row = world.row(&droplet, &Key::Local(vni(7), address)).unwrap();
    match Row::try_from(row.unpack()) {
        Ok(Row::Local(local)) => local,
        other => panic!("{other:?}"),
    }
}

fn count(world: &World, droplet: &str, kind: Kind) -> usize {
    let program = world.program(droplet);
    program.keys().filter(|key| key.kind() == kind).count()
}

#[test]
fn rows_of_policy_go_to_droplets_with_endpoints_of_the_vpc() {
    let mut world = small(6);
    world.set_vpc("blue", Some(vpc(8)));
    world.set_network("shop", Some(network("blue", 1)));
    for (number, app) in ["web", "db", "other"].into_iter().enumerate() {
        add(&mut world, app, 2 + number as u64, number as u64 + 10);
    }
    let blue = ("blue".to_owned(), "e".to_owned());
    world.set_endpoint(&blue, Some(endpoint("shop", 5, 10)));
    set(&mut world, "db", &of_web());
    world.roll_out(0);
    world.flush();
    // d0 divides and d1 bounces; d5 has the other VPC's endpoint.
    for (droplet, expected) in [("d0", 0), ("d1", 0), ("d2", 1), ("d3", 1), ("d4", 1), ("d5", 0)] {
        for kind in [Kind::Class, Kind::PolicySet] {
            assert_eq!(count(&world, droplet, kind), expected, "{droplet} {kind}");
        }
    }
    let [web, db, other] = [10, 11, 12].map(|host| local(&world, host));
    assert_eq!(
        (db.class, other.class),
        (Some(PolicyId::PLAIN), Some(PolicyId::PLAIN))
    );
    assert!(web.class.is_some() && web.class != db.class);
    assert!(db.ingress_set.is_some() && db.egress_set.is_none());
    assert_eq!((web.ingress_set, other.ingress_set), (None, None));
    // A droplet that comes later gets all rows with its first endpoint, one that loses its last one has none.
    add(&mut world, "other", 5, 13);
    world.set_endpoint(&name(12), None);
    world.flush();
    assert_eq!(
        (count(&world, "d4", Kind::Class), count(&world, "d5", Kind::Class)),
        (0, 1)
    );
}

#[test]
fn rows_of_policy_follow_droplets_and_number_of_their_vpc() {
    let mut world = small(4);
    let mut mirror = programs(&world);
    let mut flush = |world: &mut World, what: &str| {
        take(&mut mirror, world.flush());
        mirror.retain(|_, program| !program.is_empty());
        assert_eq!(mirror, programs(world), "{what}");
        for (droplet, program) in &mirror {
            for (key, row) in program {
                assert_eq!(world.row(droplet, key).as_ref(), Some(row), "{what}");
            }
        }
    };
    add(&mut world, "db", 2, 10);
    set(&mut world, "db", &of_web());
    world.roll_out(0);
    flush(&mut world, "a policy");
    let sets =
        |world: &World, droplet| count(world, droplet, Kind::Class) + count(world, droplet, Kind::PolicySet);
    assert!(sets(&world, "d2") > 0 && sets(&world, "d3") == 0);
    add(&mut world, "web", 3, 11);
    world.roll_out(0);
    flush(&mut world, "another droplet, a class");
    assert_eq!(sets(&world, "d2"), sets(&world, "d3"));
    let before = sets(&world, "d3");
    // Another VPC takes the number.
    world.set_vpc("red", Some(vpc(9)));
    world.set_vpc("blue", Some(vpc(7)));
    world.set_network("shop", Some(network("blue", 1)));
    let blue = ("ns".to_owned(), "blue".to_owned());
    let mut endpoint = endpoint("shop", 1, 11);
    endpoint.profile = world.endpoint(&name(10)).and_then(|db| db.profile.clone());
    world.set_endpoint(&blue, Some(endpoint));
    world.roll_out(0);
    flush(&mut world, "the number is another VPC's");
    assert!(sets(&world, "d3") == before && sets(&world, "d1") > 0);
    world.set_endpoint(&name(11), None);
    flush(&mut world, "the last endpoint of a droplet is gone");
    assert!(sets(&world, "d3") == 0 && sets(&world, "d2") > 0);
    world.set_vpc("red", None);
    flush(&mut world, "the VPC is gone");
    assert_eq!(sets(&world, "d2"), 0);
    world.set_vpc("red", Some(vpc(9)));
    flush(&mut world, "the VPC is back");
    assert!(sets(&world, "d2") > 0);
}

#[test]
fn a_vpc_without_policies_has_rows_as_before() {
    let mut world = small(4);
    add(&mut world, "web", 2, 10);
    add(&mut world, "db", 3, 11);
    world.flush();
    let before = programs(&world);
    set(&mut world, "db", &of_web());
    // A policy of pods of no VPC but this one's namespace changes nothing either.
    set(
        &mut world,
        "none",
        &json!({"podSelector": {"matchLabels": {"app": "absent"}}}),
    );
    world.roll_out(0);
    assert_eq!(world.flush().len(), 2);
    world.set_network_policy("ns", "db", 0, None).unwrap();
    for step in 0..8 {
        world.roll_out(step * REST);
        world.flush();
    }
    assert_eq!(programs(&world), before);
    world.set_network_policy("ns", "none", 0, None).unwrap();
    for step in 8..16 {
        world.roll_out(step * REST);
        world.flush();
    }
    assert!(!world.has_policies() && !world.has_policy_news());
    assert_eq!(programs(&world), before);
}

#[test]
fn policies_of_another_vpc_cost_a_vpc_nothing() {
    let mut world = small(5);
    world.set_vpc("blue", Some(vpc(8)));
    world.set_network("shop", Some(network("blue", 1)));
    add(&mut world, "web", 2, 10);
    add(&mut world, "db", 3, 11);
    let mut foreign = endpoint("shop", 4, 10);
    foreign.profile = Some(Arc::default());
    world.set_endpoint(&("blue".to_owned(), "e".to_owned()), Some(foreign));
    set(&mut world, "db", &of_web());
    world.roll_out(0);
    world.flush();
    let before = [2, 3].map(|number| world.program(&format!("d{number}")));
    // They name all pods of all namespaces, one by one.
    let peer = |app: &str| json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": app}}});
    let spec = json!({
        "podSelector": {}, "policyTypes": ["Ingress", "Egress"],
        "ingress": [{"from": [peer("web"), peer("db")]}],
        "egress": [{"to": [peer("web")], "ports": [{"port": "http"}]}],
    });
    let spec = serde_json::from_value(spec).unwrap();
    world.set_network_policy("blue", "all", 0, Some(&spec)).unwrap();
    world.roll_out(1);
    let told: Vec<String> = world.flush().into_keys().collect();
    assert_eq!(told, ["d4"]);
    let after = [2, 3].map(|number| world.program(&format!("d{number}")));
    assert_eq!(before, after);
}

#[test]
fn another_endpoint_of_a_known_class_costs_the_same_rows() {
    let mut world = small(100);
    add(&mut world, "web", 2, 10);
    add(&mut world, "db", 3, 11);
    set(&mut world, "db", &of_web());
    world.roll_out(0);
    world.flush();
    for (host, app, expected) in [(12, "web", 2), (13, "db", 2), (14, "other", 2)] {
        add(&mut world, app, 2, host);
        let rows: usize = world.flush().values().map(BTreeMap::len).sum();
        assert_eq!(rows, expected, "{app}");
    }
}

/// A pod that takes the labels of a class that its VPC has already costs its own droplet's row, however many droplets
/// and policies there are.
#[test]
fn another_label_of_an_endpoint_costs_one_row() {
    let mut world = small(100);
    for (app, droplet, host) in [("web", 2, 10), ("db", 3, 11), ("other", 4, 12)] {
        add(&mut world, app, droplet, host);
    }
    set(&mut world, "db", &of_web());
    world.roll_out(0);
    world.flush();
    let mut now = 0;
    for app in ["web", "other"] {
        add(&mut world, app, 4, 12);
        let mut changed: BTreeMap<String, usize> = BTreeMap::new();
        for _ in 0..4 {
            now += REST;
            for vpc in world.roll_out(now) {
                while world.policies_acked(&vpc) {}
            }
            for (droplet, rows) in world.flush() {
                *changed.entry(droplet.clone()).or_default() += rows.len();
            }
        }
        assert_eq!(changed, [("d4".to_owned(), 1)].into(), "{app}");
    }
}

/// A policy that selected nobody came and went before the pods, and left nothing that the next one goes by.
#[test]
fn pods_that_came_between_policies_are_judged() {
    for is_looked_at in [false, true] {
        let mut world = small(4);
        set(&mut world, "db", &of_web());
        world.roll_out(0);
        world.flush();
        world.set_network_policy("ns", "db", 0, None).unwrap();
        if is_looked_at {
            world.roll_out(1);
        }
        add(&mut world, "db", 3, 11);
        world.flush();
        set(&mut world, "db", &of_web());
        world.roll_out(2);
        world.flush();
        assert!(
            local(&world, 11).ingress_set.is_some(),
            "looked at: {is_looked_at}"
        );
    }
}

#[test]
fn policy_waits_until_all_droplets_of_the_vpc_know_it() {
    let mut world = small(5);
    add(&mut world, "web", 2, 10);
    add(&mut world, "db", 3, 11);
    // Its endpoints are of no concern.
    world.set_enforcing("d4", false);
    world.set_enforcing("d3", false);
    world.flush();
    let before = programs(&world);
    set(&mut world, "db", &of_web());
    world.roll_out(0);
    assert!(world.flush().is_empty() && world.has_outdated());
    assert_eq!(programs(&world), before);
    world.set_enforcing("d3", true);
    world.roll_out(1);
    world.flush();
    assert!(local(&world, 11).ingress_set.is_some());
    // An older droplet that comes later does not open the others.
    add(&mut world, "db", 4, 12);
    world.roll_out(2);
    world.flush();
    assert!(local(&world, 11).ingress_set.is_some());
}

#[test]
fn nodes_are_also_what_their_own_endpoints_have() {
    let mut world = small(4);
    add(&mut world, "web", 2, 10);
    let node = Node {
        addresses: vec!["192.0.2.1".parse().unwrap()],
        ..Node::default()
    };
    world.set_policy_node("d3", Some(node));
    let rules = json!([{"action": "Deny", "to": [{"nodes": {}}]}]);
    let guard = json!({"tier": "Admin", "priority": 0, "subject": {"namespaces": {}}, "egress": rules});
    let guard = serde_json::from_value(guard).unwrap();
    world.set_cluster_policy("guard", Some(&guard)).unwrap();
    let mut now = 0;
    let mut denied = |world: &mut World| {
        for _ in 0..4 {
            now += REST;
            for vpc in world.roll_out(now) {
                while world.policies_acked(&vpc) {}
            }
            world.flush();
        }
        let set = local(world, 10).egress_set.unwrap();
        let row = world.row("d2", &Key::PolicySet(vni(7), set)).unwrap();
        let Ok(Row::PolicySet(PolicySet { rules, .. })) = Row::try_from(row.unpack()) else {
            panic!("not a set");
        };
        let blocks = rules[0].blocks.iter();
        blocks.map(|block| block.range.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(denied(&mut world), ["192.0.2.1/32"]);
    // It gets its addresses later, then others, and goes with the node's part in the VPC.
    let mut host = Endpoint {
        is_host: true,
        membership: Membership::Waiting,
        ..dual("web", 3, 3)
    };
    world.set_endpoint(&name(3), Some(host.clone()));
    assert_eq!(denied(&mut world), ["192.0.2.1/32"]);
    host.membership = dual("web", 3, 3).membership;
    world.set_endpoint(&name(3), Some(host.clone()));
    let both = ["10.0.0.3/32", "192.0.2.1/32", "fd00:1::3/128"];
    assert_eq!(denied(&mut world), both);
    host.membership = endpoint("web", 3, 4).membership;
    world.set_endpoint(&name(3), Some(host));
    assert_eq!(denied(&mut world), ["10.0.0.4/32", "192.0.2.1/32"]);
    world.set_endpoint(&name(3), None);
    assert_eq!(denied(&mut world), ["192.0.2.1/32"]);
}

#[test]
fn a_pod_that_was_not_seen_yet_is_pending() {
    let mut world = small(3);
    set(&mut world, "db", &of_web());
    world.set_endpoint(&name(10), Some(endpoint("web", 2, 10)));
    world.stage_policies(0);
    world.flush();
    assert!(world.is_policy_pending(&name(10)));
    add(&mut world, "other", 2, 10);
    world.flush();
    assert!(!world.is_policy_pending(&name(10)));
}
