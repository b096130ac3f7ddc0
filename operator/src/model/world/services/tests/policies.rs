//! What policies of egress say of services that nodes serve.

use std::sync::Arc;

use serde_json::{Value, json};
use thuban_rows::{PolicyPorts, PolicySet, Row};

use super::super::super::Endpoint;
use super::*;
use crate::model::policy::{Labels, Profile};

/// A pod of `ns` that may have backends' labels.
fn add(world: &mut World, network: &str, host: u64, labels: &[(&str, &str)]) {
    let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    let profile = Profile {
        labels: labels.iter().map(owned).collect::<Labels>(),
        ..Profile::default()
    };
    let endpoint = Endpoint {
        profile: Some(Arc::new(profile)),
        ..endpoint(network, 4, host)
    };
    world.set_endpoint(&name(&format!("{network}{host}")), Some(endpoint));
}

/// Lets all pods of `team`, which are in the VPC blue, send to these peers.
fn allow(world: &mut World, to: &Value, ports: &Value) {
    let spec =
        json!({"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [to], "ports": ports}]});
    let spec = serde_json::from_value(spec).unwrap();
    world.set_network_policy("team", "p", 0, Some(&spec)).unwrap();
}

/// Returns the egress set of the client.
fn egress_set(world: &World) -> PolicySet {
    let program = world.program("d4");
    let row = |key: &Key| {
        let row = program.get(key).unwrap_or_else(|| panic!("no {key:?}"));
        Row::try_from(row.unpack()).unwrap()
    };
    let address = IpAddr::from(Ipv4Addr::new(10, 0, 0, 10));
    let Row::Local(client) = row(&Key::Local(vni(8), address)) else {
        panic!("no local row");
    };
    match row(&Key::PolicySet(vni(8), client.egress_set.unwrap())) {
        Row::PolicySet(set) => set,
        other => panic!("{other:?}"),
    }
}

/// Takes all steps. Returns (address, port) of the addresses that the client's egress set accepts, and how often a set
/// of it came or went.
fn accepted(world: &mut World) -> (Vec<(String, u16)>, usize) {
    let mut changes = 0;
    for step in 1..8 {
        let waiting = world.roll_out(step * 31_000);
        let deltas = world.flush();
        changes += deltas
            .values()
            .flat_map(BTreeMap::keys)
            .filter(|key| matches!(key, Key::PolicySet(..)))
            .count();
        for vpc in waiting {
            while world.policies_acked(&vpc) {
                world.flush();
            }
            world.flush();
        }
    }
    let rules = egress_set(world).rules;
    let mut accepted = Vec::new();
    for rule in rules {
        for block in &rule.blocks {
            for ports in &rule.ports {
                let PolicyPorts::Range(6, first, last) = ports else {
                    panic!("{ports:?}");
                };
                assert_eq!(first, last);
                accepted.push((block.range.to_string(), *first));
            }
        }
    }
    (accepted, changes)
}

/// The VPC blue, with a client in namespace `team`, shares the service `ns/web` of 10.96.0.10, port 80, with one
/// backend on port 8080.
fn sharing() -> World {
    let mut world = shared();
    world.set_service(&name("s"), Some(service("web", "1", 10)));
    add(&mut world, "web", 10, &[("app", "web")]);
    let client = Endpoint {
        profile: Some(Arc::default()),
        ..endpoint("blue", 4, 10)
    };
    world.set_endpoint(&("team".to_owned(), "client".to_owned()), Some(client));
    world.stage_policies(0);
    world
}

fn of_app(app: &str) -> Value {
    json!({"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": app}}})
}

/// Returns the service's own address and port, as [`accepted`] does.
fn own() -> Vec<(String, u16)> {
    vec![(format!("{ADDRESS}/32"), 80)]
}

#[test]
fn a_shared_service_is_judged_by_its_backends_labels_and_ports() {
    let mut world = sharing();
    let port = |number: u16| json!([{"port": number}]);
    for (to, ports, is_accepted) in [
        (of_app("web"), port(8080), true),
        (of_app("web"), json!([]), true),
        (of_app("web"), port(80), false),
        (of_app("db"), port(8080), false),
        (json!({"podSelector": {}}), json!([]), false),
        // The backend's address is of another VPC.
        (json!({"ipBlock": {"cidr": "10.0.0.10/32"}}), port(8080), false),
    ] {
        allow(&mut world, &to, &ports);
        let mut found = accepted(&mut world).0;
        found.retain(|(range, _)| range != "10.0.0.10/32");
        let expected = if is_accepted { own() } else { vec![] };
        assert_eq!(found, expected, "{to} {ports}");
    }
}

#[test]
fn a_shared_service_follows_its_backends() {
    let mut world = sharing();
    allow(&mut world, &of_app("web"), &json!([]));
    assert_eq!(accepted(&mut world).0, own());
    // Another backend that the rule does not select.
    let of = |backends: &[u8]| {
        let mut made = service("web", "1", 10);
        made.tables[0].1[0].backends = backends
            .iter()
            .map(|host| Backend {
                address: Ipv4Addr::new(10, 0, 0, *host).into(),
                port: 8080,
            })
            .collect();
        made
    };
    add(&mut world, "web", 11, &[("app", "other")]);
    world.set_service(&name("s"), Some(of(&[10, 11])));
    assert!(world.has_policy_news());
    assert_eq!(accepted(&mut world).0, []);
    add(&mut world, "web", 11, &[("app", "web"), ("revision", "2")]);
    assert!(world.has_policy_news(), "a backend's labels have changed");
    assert_eq!(accepted(&mut world).0, own());
    // A rollout, and a time without backends, change no set.
    world.set_service(&name("s"), Some(of(&[])));
    assert_eq!(accepted(&mut world), (own(), 0));
    world.set_service(&name("s"), Some(of(&[11])));
    assert_eq!(accepted(&mut world), (own(), 0));
    // A pod that nobody has seen is selected by nobody.
    world.set_service(&name("s"), Some(of(&[12])));
    assert_eq!(accepted(&mut world).0, []);
    world.set_service(&name("s"), Some(of(&[11])));
    assert_eq!(accepted(&mut world).0, own());
    world.set_vpc("blue", Some(vpc(8)));
    assert_eq!(accepted(&mut world).0, [], "the VPC no longer names the service");
}

#[test]
fn a_service_with_backends_outside_is_judged_by_their_addresses() {
    let mut world = sharing();
    let outside = Ipv4Addr::new(192, 0, 2, 7);
    let mut of_hosts = served("1", 10);
    of_hosts.tables[0].1[0].backends = [Backend {
        address: outside.into(),
        port: 6443,
    }]
    .into();
    world.set_service(&name("s"), Some(of_hosts));
    let block = json!({"ipBlock": {"cidr": "192.0.2.0/24"}});
    allow(&mut world, &block, &json!([{"port": 6443}]));
    let range = ("192.0.2.0/24".to_owned(), 6443);
    assert_eq!(accepted(&mut world).0, [vec![range], own()].concat());
    let except = json!({"ipBlock": {"cidr": "192.0.2.0/24", "except": ["192.0.2.7/32"]}});
    allow(&mut world, &except, &json!([{"port": 6443}]));
    assert_eq!(accepted(&mut world).0.len(), 1);
}

#[test]
fn the_first_pod_of_a_vpc_has_its_services_at_once() {
    let mut world = sharing();
    let client = ("team".to_owned(), "client".to_owned());
    let endpoint = world.endpoint(&client).unwrap().clone();
    world.set_endpoint(&client, None);
    allow(&mut world, &of_app("web"), &json!([]));
    world.roll_out(1);
    world.flush();
    world.set_endpoint(&client, Some(endpoint));
    // No step is needed: no packet of it has flowed yet.
    world.flush();
    assert_eq!(egress_set(&world).rules.len(), 2);
}
