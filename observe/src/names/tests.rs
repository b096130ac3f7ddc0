//! Tests of names, and the names that tests of other modules have.

use super::*;

/// Returns a pod with an address.
pub fn pod(namespace: &str, name: &str, vpc: &str, network: &str, address: &str) -> Member {
    Member {
        kind: Kind::Pod,
        namespace: Some(namespace.to_owned()),
        name: Some(name.to_owned()),
        vpc: vpc.to_owned(),
        network: network.to_owned(),
        droplet: Some("node-a".to_owned()),
        since: 0,
        addresses: vec![address.parse().unwrap()],
    }
}

fn service(namespace: &str, name: &str, vpc: &str, network: &str, address: &str) -> Member {
    Member {
        kind: Kind::Service,
        droplet: None,
        ..pod(namespace, name, vpc, network, address)
    }
}

pub fn vpc(vni: u32, ranges: &[&str]) -> Vpc {
    Vpc {
        vni: Some(vni),
        ranges: ranges.iter().map(|range| range.parse().unwrap()).collect(),
        shared: None,
    }
}

fn holder(names: &Names, vni: u32, address: &str) -> Option<String> {
    let vpc = names.vpc(vni)?;
    let who = names.resolve(vpc, address.parse().unwrap()).who();
    who.map(|who| who.full_name())
}

fn is_outside(names: &Names, vni: u32, address: &str) -> bool {
    names.resolve(names.vpc(vni).unwrap(), address.parse().unwrap()) == Holder::Outside
}

#[test]
fn equal_addresses_of_two_vpcs_have_two_names() {
    let mut names = Names::default();
    // Endpoints may come before their VPCs.
    names.set_endpoint("red/web", &pod("red", "web", "red", "red-web", "10.0.1.3"));
    names.set_endpoint("blue/till", &pod("blue", "till", "blue", "blue-shop", "10.0.1.3"));
    names.set_vpc("red", vpc(7, &["10.0.0.0/16"]));
    names.set_vpc("blue", vpc(8, &["10.0.0.0/16"]));
    assert_eq!(holder(&names, 7, "10.0.1.3").as_deref(), Some("red/web"));
    assert_eq!(holder(&names, 8, "10.0.1.3").as_deref(), Some("blue/till"));
    assert_eq!(holder(&names, 9, "10.0.1.3"), None);
    assert!(!is_outside(&names, 7, "10.0.1.9"), "nobody's, but within the VPC");
    assert!(is_outside(&names, 7, "8.8.8.8"));
}

#[test]
fn an_address_that_moves_on_has_the_name_of_its_new_owner() {
    let mut names = Names::default();
    names.set_vpc("red", vpc(7, &["10.0.0.0/16"]));
    names.set_endpoint("red/old", &pod("red", "old", "red", "red-web", "10.0.1.3"));
    names.set_endpoint("red/new", &pod("red", "new", "red", "red-web", "10.0.1.3"));
    names.remove_endpoint("red/old");
    assert_eq!(holder(&names, 7, "10.0.1.3").as_deref(), Some("red/new"));
    names.set_endpoint("red/new", &pod("red", "new", "red", "red-web", "10.0.1.4"));
    assert_eq!(holder(&names, 7, "10.0.1.3"), None);
    names.remove_endpoint("red/new");
    assert!(names.holders.is_empty() && names.endpoints.is_empty());
}

#[test]
fn a_vni_and_an_address_that_went_to_another_keep_the_new_owner() {
    let mut names = Names::default();
    names.set_vpc("red", vpc(7, &[]));
    names.set_vpc("blue", vpc(7, &[]));
    names.remove_vpc("red");
    assert_eq!(names.vpc(7).map(|name| &**name), Some("blue"));
    let address = "192.0.2.1".parse().unwrap();
    names.set_droplet("a", Some(address));
    names.set_droplet("b", Some(address));
    names.remove_droplet("a");
    assert_eq!(names.droplet(address).map(|name| &**name), Some("b"));
    names.set_droplet("b", None);
    assert_eq!(names.droplet(address), None);
}

#[test]
fn a_shared_service_is_named_and_no_other_of_the_default_vpc() {
    let mut names = Names::default();
    names.set_vpc("default", vpc(1, &["10.244.0.0/16"]));
    names.set_vpc("red", vpc(7, &["10.0.0.0/16"]));
    for (namespace, name, address) in [
        ("kube-system", "kube-dns", "10.96.0.10"),
        ("shop", "mirror", "10.96.0.11"),
        ("shop", "till", "10.96.0.12"),
    ] {
        let key = format!("{namespace}/{name}");
        names.set_endpoint(&key, &service(namespace, name, "default", "default", address));
    }
    names.set_endpoint(
        "shop/pod",
        &pod("shop", "pod", "default", "default", "10.244.0.7"),
    );
    let shared =
        |names: &Names| ["10.96.0.10", "10.96.0.11", "10.96.0.12"].map(|at| holder(names, 7, at).is_some());
    assert_eq!(shared(&names), [true, false, false]);
    let shares = |entries: &[&str]| Vpc {
        shared: Some(entries.iter().map(|entry| (*entry).to_owned()).collect()),
        ..vpc(7, &["10.0.0.0/16"])
    };
    names.set_vpc("red", shares(&["shop/mirror"]));
    assert_eq!(shared(&names), [true, true, false]);
    names.set_vpc("red", shares(&["shop/mirror", "-kube-system/kube-dns"]));
    assert_eq!(shared(&names), [false, true, false]);
    names.set_vpc("red", shares(&[]));
    assert_eq!(shared(&names), [false; 3]);
    assert_eq!(holder(&names, 7, "10.244.0.7"), None, "a pod is never shared");
    assert!(is_outside(&names, 7, "10.244.0.7"));
}

#[test]
fn names_that_come_and_go_take_bounded_memory() {
    let mut names = Names::default();
    for number in 0..10 * SWEEP_FROM {
        let namespace = format!("ns-{number}");
        names.set_endpoint("x", &pod(&namespace, "web", "red", "red-web", "10.0.1.3"));
    }
    assert!(names.pool.known.len() <= SWEEP_FROM, "{}", names.pool.known.len());
    assert_eq!(names.endpoints.len(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_address_of_another_namespace_has_no_name_for_a_while() {
    let mut names = Names::default();
    names.set_vpc("red", vpc(7, &["10.0.0.0/16"]));
    names.set_endpoint("blue/old", &pod("blue", "old", "red", "red-web", "10.0.1.3"));
    names.remove_endpoint("blue/old");
    let at = |names: &Names| names.resolve(&"red".into(), "10.0.1.3".parse().unwrap());
    assert_eq!(at(&names), Holder::Departed);
    names.set_endpoint("red/new", &pod("red", "new", "red", "red-web", "10.0.1.3"));
    assert_eq!(at(&names), Holder::Departed, "flows of blue may be told late");
    tokio::time::advance(std::time::Duration::from_secs(90)).await;
    assert_eq!(holder(&names, 7, "10.0.1.3").as_deref(), Some("red/new"));
    names.remove_endpoint("red/new");
    tokio::time::advance(std::time::Duration::from_secs(90)).await;
    assert_eq!(at(&names), Holder::Nobody);
}

#[test]
fn droplets_are_where_endpoints_and_roles_are() {
    let mut names = Names::default();
    names.set_endpoint("red/web", &pod("red", "web", "red", "red-web", "10.0.1.3"));
    names.set_divider("red-d0", "red", Some("node-b"));
    let is_in = |names: &Names, droplet: &str, vpc: &str| names.is_in_vpc(&droplet.into(), &vpc.into());
    assert!(is_in(&names, "node-a", "red") && is_in(&names, "node-b", "red"));
    assert!(!is_in(&names, "node-a", "blue") && !is_in(&names, "node-c", "red"));
    assert!(names.has_namespace(&"node-a".into(), "red"));
    assert!(!names.has_namespace(&"node-b".into(), "red"));
    names.remove_endpoint("red/web");
    assert!(!is_in(&names, "node-a", "red") && !names.has_namespace(&"node-a".into(), "red"));
}
