//! What policies of a namespace at its limits cost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use thuban_rows::Kind;

use super::policy::{REST, add, local, name, set};
use super::*;
use crate::model::policy::Profile;

/// Makes eight pods, each with a set of its own of about 15,000 entries: there is room for six sets.
fn crowded() -> World {
    let mut world = small(4);
    let ports: Vec<Value> = (1..=15_000).map(|port| json!({"port": port})).collect();
    set(
        &mut world,
        "all",
        &json!({"podSelector": {}, "ingress": [{"ports": ports}]}),
    );
    for host in 10..18 {
        add(&mut world, &format!("a{host}"), 2, host);
        let own = json!({"matchLabels": {"app": format!("a{host}")}});
        set(
            &mut world,
            &format!("p{host}"),
            &json!({"podSelector": own, "ingress": [{}]}),
        );
    }
    world.roll_out(0);
    world.flush();
    world
}

/// Returns the pods that are told that there is no room for their rules.
fn closed(world: &World) -> Vec<u64> {
    let hosts = (10..18).filter(|host| world.too_many_rules(&name(*host)).is_some());
    hosts.collect()
}

#[test]
fn sets_of_a_namespace_are_limited_and_others_closed() {
    let mut world = crowded();
    assert_eq!(
        (closed(&world), world.take_newly_closed().len()),
        (vec![16, 17], 2)
    );
    let judged = |world: &World, host| {
        let id = local(world, host).ingress_set.unwrap();
        let row = world.row("d2", &Key::PolicySet(vni(7), id)).unwrap();
        match Row::try_from(row.unpack()) {
            Ok(Row::PolicySet(set)) => (set.is_isolated, set.rules.len()),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!((judged(&world, 10), judged(&world, 16)), ((true, 2), (true, 0)));
    // Their sets go with the pods, after a rest.
    for host in [10, 11] {
        world.set_endpoint(&name(host), None);
    }
    world.roll_out(REST);
    assert_eq!(closed(&world), [16, 17]);
    for step in 2..5 {
        world.roll_out(step * REST);
        world.flush();
    }
    assert_eq!((closed(&world), judged(&world, 16)), (vec![], (true, 2)));
}

/// Prints what a namespace at its limits costs: compare it with a build before a change.
#[test]
fn a_namespace_at_its_limits_is_applied() {
    const PODS: u64 = 1000;
    let mut world = small(4);
    for host in 0..PODS {
        let mut endpoint = endpoint("web", 2, host + 10);
        let bits = (0..10).filter(|bit| host & (1 << bit) != 0);
        let labels = bits.map(|bit| (format!("b{bit}"), String::new())).collect();
        let profile = Profile {
            labels,
            ..Profile::default()
        };
        endpoint.profile = Some(Arc::new(profile));
        world.set_endpoint(&name(host + 10), Some(endpoint));
    }
    let ports: Vec<Value> = (1..=13).map(|port| json!({"port": port})).collect();
    let specs = (0..500).map(|number| {
        let peer = |side: u8| {
            let values = json!([format!("{number}-{side}")]);
            let label = json!({"key": "x", "operator": "NotIn", "values": values});
            json!({"namespaceSelector": {}, "podSelector": {"matchExpressions": [label]}})
        };
        let subject = json!({"matchLabels": {(format!("b{}", number % 10)): ""}});
        let rules = json!([{"from": [peer(0), peer(1)], "ports": ports}]);
        json!({"podSelector": subject, "ingress": rules, "egress": [{"ports": ports}]})
    });
    let specs: Vec<Value> = specs.collect();
    let start = Instant::now();
    for (number, spec) in specs.iter().enumerate() {
        set(&mut world, &format!("p{number}"), spec);
    }
    let compiled = start.elapsed();
    assert!(world.policies().refused("ns/p499").is_none());
    world.stage_policies(0);
    let staged = start.elapsed();
    world.flush();
    let flushed = start.elapsed();
    let program = world.program("d2");
    let of_policy = program
        .iter()
        .filter(|(key, _)| matches!(key.kind(), Kind::Class | Kind::PolicySet));
    let bytes: usize = of_policy
        .map(|(_, row)| prost::Message::encoded_len(&row.unpack()))
        .sum();
    let closed = (0..PODS).filter(|host| world.too_many_rules(&name(host + 10)).is_some());
    println!(
        "500 policies: read in {compiled:?}; applied to {PODS} pods in {:?}; rows in {:?}: {bytes} bytes of policy for a \
         droplet; {} pods are closed",
        staged.checked_sub(compiled).unwrap(),
        flushed.checked_sub(staged).unwrap(),
        closed.count(),
    );
    let start = Instant::now();
    set(&mut world, "p0", &specs[1]);
    let (mut calls, mut longest) = (0, Duration::ZERO);
    while world.has_policy_news() && calls < 1000 {
        let start = Instant::now();
        world.roll_out(1);
        (calls, longest) = (calls + 1, longest.max(start.elapsed()));
    }
    println!(
        "one change: {calls} calls in {:?}, the longest {longest:?}",
        start.elapsed()
    );
    assert!(calls < 1000 && bytes < 20_000_000);
}
