//! Tests of the rows of services: which droplets have them, and what a change costs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use thuban_proto::transit::{ServicePort, row};
use thuban_rows::builders::vni;
use thuban_rows::{Backend, ExposedPort, Port};

use super::super::RoleKind;
use super::super::tests::{bouncer, endpoint, network, serving, small, vpc};
use super::{EndpointName, Hints, Key, Service, Vpc, World};

mod fronts;
mod nodes;
mod policies;
mod ways_in;

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10));

fn name(service: &str) -> EndpointName {
    ("ns".to_owned(), service.to_owned())
}

/// Returns a service at 10.96.0.10 with this one backend.
pub fn service(network: &str, uid: &str, backend: u8) -> Service {
    let backend = Backend {
        address: Ipv4Addr::new(10, 0, 0, backend).into(),
        port: 8080,
    };
    let port = Port {
        protocol: 6,
        port: 80,
        backends: [backend].into(),
        affinity: 0,
        local: false,
    };
    Service {
        network: network.into(),
        name: "web".into(),
        by_node: false,
        by_peers: false,
        born: (None, uid.into()),
        tables: vec![(ADDRESS, vec![port])],
        own_addresses: Vec::new(),
        exposed: Vec::new(),
        outside: Vec::new(),
        fronts: Vec::new(),
        tunnel: false,
        clients: None,
        check: None,
        homes: BTreeMap::new(),
        hints: BTreeMap::new(),
        health_port: None,
        recorded: None,
    }
}

/// Returns the service's address as nodes are told it.
pub fn exposed(node_port: u16) -> Vec<(IpAddr, Vec<ExposedPort>)> {
    let port = ExposedPort {
        protocol: 6,
        port: 80,
        node_port: Some(node_port),
        local: None,
        ending: BTreeSet::new(),
        peers: BTreeSet::new(),
        affinity: 0,
        members: BTreeSet::new(),
    };
    vec![(ADDRESS, vec![port])]
}

fn has(world: &World, droplet: &str, number: u32) -> bool {
    let key = Key::Service(vni(number), ADDRESS);
    world.program(droplet).contains_key(&key)
}

/// Returns the last byte of the address of the service's backend.
fn backend(world: &World, droplet: &str) -> u8 {
    match &world.program(droplet)[&Key::Service(vni(7), ADDRESS)]
        .unpack()
        .row
    {
        Some(row::Row::Service(row)) => row.ports[0].backends[0].address[15],
        other => panic!("{other:?}"),
    }
}

#[test]
fn only_bouncers_of_the_vpcs_networks_hold_a_service() {
    let mut world = small(6);
    world.set_network("db", Some(network("red", 2)));
    world.set_role(RoleKind::Bouncer, "db-b0", Some(serving("db", "d2")));
    world.set_vpc("blue", Some(vpc(8)));
    world.set_network("shop", Some(network("blue", 1)));
    world.set_role(RoleKind::Bouncer, "shop-b0", Some(serving("shop", "d3")));
    world.set_endpoint(&name("e"), Some(endpoint("web", 4, 10)));
    world.set_service(&name("s"), Some(service("web", "1", 10)));
    world.flush();
    let holders: Vec<bool> = (0..6)
        .map(|number| has(&world, &format!("d{number}"), 7))
        .collect();
    assert_eq!(holders, [false, true, true, false, false, false]);
    assert!(!has(&world, "d3", 8), "another VPC's");
    let rows = world.service_rows(&name("s"));
    assert_eq!(
        rows,
        ["d1", "d2"].map(|droplet| (droplet.to_owned(), Key::Service(vni(7), ADDRESS)))
    );
    // Another network arrives, and one goes.
    world.set_network("cache", Some(network("red", 3)));
    world.set_role(RoleKind::Bouncer, "cache-b0", Some(serving("cache", "d5")));
    world.set_network("db", None);
    world.flush();
    assert!(has(&world, "d5", 7) && !has(&world, "d2", 7));
    // The service's own network goes: the service is in no VPC.
    world.set_network("web", None);
    world.flush();
    assert!((0..6).all(|number| !has(&world, &format!("d{number}"), 7)));
}

#[test]
fn subscribers_hold_service_while_subscribed_and_it_exists() {
    let mut world = small(5);
    assert!(
        world.subscribe("d3", vni(7), ADDRESS, true),
        "before there is one"
    );
    world.set_service(&name("s"), Some(service("web", "1", 10)));
    world.flush();
    assert!(world.subscribe("d4", vni(7), ADDRESS, true), "and after");
    assert!(world.subscribe("d2", vni(8), ADDRESS, true), "of another VPC");
    world.flush();
    let holders: Vec<bool> = (0..5)
        .map(|number| has(&world, &format!("d{number}"), 7))
        .collect();
    assert_eq!(holders, [false, true, false, true, true]);
    assert!(
        world
            .service_rows(&name("s"))
            .iter()
            .all(|(droplet, _)| droplet == "d1"),
        "nobody waits for subscribers"
    );
    world.subscribe("d4", vni(7), ADDRESS, false);
    let deltas = world.flush();
    assert_eq!(deltas["d4"].get(&Key::Service(vni(7), ADDRESS)), Some(&None));
    world.set_service(&name("s"), Some(service("web", "1", 11)));
    let deltas = world.flush();
    assert_eq!(deltas.keys().collect::<Vec<_>>(), ["d1", "d3"]);
    assert_eq!((backend(&world, "d1"), backend(&world, "d3")), (11, 11));
    world.set_service(&name("s"), None);
    let deltas = world.flush();
    for droplet in ["d1", "d3"] {
        assert_eq!(deltas[droplet].get(&Key::Service(vni(7), ADDRESS)), Some(&None));
    }
}

#[test]
fn an_endpoint_that_comes_moves_or_goes_makes_no_service_anew() {
    let mut world = small(5);
    for number in 0..50 {
        world.set_service(&name(&format!("s{number}")), Some(service("web", "1", number)));
    }
    world.flush();
    let touched = |world: &World| {
        let services = world
            .dirty
            .iter()
            .filter(|owner| matches!(owner, super::Owner::Service(_)));
        services.count()
    };
    world.set_endpoint(&name("e"), Some(endpoint("web", 2, 10)));
    assert_eq!(touched(&world), 0);
    world.set_endpoint(&name("e"), Some(endpoint("web", 3, 10)));
    world.publish_role(bouncer("web-b0"));
    world.set_role(RoleKind::Divider, "red-d0", Some(serving("red", "d4")));
    world.subscribe("d4", vni(7), IpAddr::from([10, 0, 0, 10]), true);
    assert_eq!(touched(&world), 0);
    world.set_endpoint(&name("e"), None);
    assert_eq!(touched(&world), 0);
    world.set_role(RoleKind::Bouncer, "web-b1", Some(serving("web", "d4")));
    assert_eq!(touched(&world), 50, "a bouncer has them all");
}

#[test]
fn the_youngest_service_has_an_address_that_two_seem_to_have() {
    let mut world = small(3);
    world.set_service(&name("old"), Some(service("web", "1", 1)));
    world.flush();
    world.set_service(&name("new"), Some(service("web", "2", 2)));
    world.flush();
    assert_eq!(backend(&world, "d1"), 2);
    assert!(world.service_rows(&name("old")).is_empty());
    world.set_service(&name("old"), Some(service("web", "1", 3)));
    assert!(world.flush().is_empty());
    world.set_service(&name("old"), None);
    assert!(world.flush().is_empty(), "the one that goes takes nothing along");
    assert_eq!(world.service_at(ADDRESS), Some(&name("new")));
    world.set_service(&name("old"), Some(service("web", "1", 3)));
    world.set_service(&name("new"), None);
    world.flush();
    assert_eq!(backend(&world, "d1"), 3);
}

#[test]
fn a_new_bouncer_has_the_services_before_it_is_listed() {
    let mut world = small(4);
    world.set_service(&name("s"), Some(service("web", "1", 10)));
    world.flush();
    let role = super::super::Role {
        serves_on: None,
        ..serving("web", "d3")
    };
    world.set_role(RoleKind::Bouncer, "web-b1", Some(role));
    world.flush();
    let row = ("d3".to_owned(), Key::Service(vni(7), ADDRESS));
    assert!(world.role_tables(RoleKind::Bouncer, "web", "d3").contains(&row));
    world.unpublish_role(bouncer("web-b1"));
    world.flush();
    assert!(has(&world, "d3", 7), "until nobody asks it any more");
    world.purge_role(bouncer("web-b1"));
    world.flush();
    assert!(!has(&world, "d3", 7));
}

/// Makes a world in which red has access to hosts and a service that nodes serve; blue names the service, green
/// doesn't.
fn shared() -> World {
    let mut world = small(5);
    let hosts = Vpc {
        host_access: true,
        egress: true,
        ..vpc(7)
    };
    world.set_vpc("red", Some(hosts));
    for (name, number, id, droplet) in [("blue", 8, 2, "d2"), ("green", 9, 3, "d3")] {
        let mut vpc = names_it(number);
        if name != "blue" {
            vpc.shared.clear();
        }
        world.set_vpc(name, Some(vpc));
        world.set_network(name, Some(network(name, id)));
        world.set_role(
            RoleKind::Bouncer,
            &format!("{name}-b0"),
            Some(serving(name, droplet)),
        );
    }
    world.set_service(&name("s"), Some(served("1", 10)));
    world.flush();
    world
}

/// Returns a VPC that shares the service.
fn names_it(number: u32) -> Vpc {
    Vpc {
        cidrs: vec!["10.0.0.0/12".into()],
        shared: vec![("ns".to_owned(), "web".to_owned())],
        ..vpc(number)
    }
}

#[test]
fn exposed_service_is_on_all_droplets_only_if_in_nodes_vpc() {
    let mut world = shared();
    let exposing = || Service {
        exposed: exposed(30080),
        ..service("web", "1", 10)
    };
    let told = |world: &World| {
        let is_told = |number: &u64| {
            world
                .program(&format!("d{number}"))
                .contains_key(&Key::Exposed(vni(7), ADDRESS))
        };
        (0..6).filter(is_told).collect::<Vec<_>>()
    };
    world.set_service(&name("s"), Some(exposing()));
    world.flush();
    assert_eq!(told(&world), [0, 1, 2, 3, 4]);
    assert!(
        world
            .service_rows(&name("s"))
            .iter()
            .all(|(_, key)| matches!(key, Key::Service(..))),
        "what is waited for stays as much, however many droplets there are"
    );
    world.set_droplet("d5", Some(Ipv4Addr::new(172, 16, 0, 105)));
    world.set_droplet("d0", None);
    world.flush();
    assert_eq!(told(&world), [1, 2, 3, 4, 5]);
    // A tenant's service.
    let tenants = Service {
        network: "blue".into(),
        ..exposing()
    };
    world.set_service(&name("s"), Some(tenants));
    world.flush();
    assert!(told(&world).is_empty());
}

#[test]
fn vpc_resolves_names_of_its_namespaces_and_services() {
    let mut world = shared();
    let of = |world: &World, droplet: &str, number| match &world.program(droplet)[&Key::Vpc(vni(number))]
        .unpack()
        .row
    {
        Some(row::Row::Vpc(row)) => [
            row.visible_namespaces.join(" "),
            row.visible_services.join(" "),
            row.hidden_services.join(" "),
        ],
        other => panic!("{other:?}"),
    };
    assert_eq!(of(&world, "d2", 8), ["", "ns/web", ""], "what it shares");
    for (namespace, network) in [("shop", "blue"), ("lab", "green"), ("ns", "web")] {
        world.set_namespace(namespace, Some(network));
    }
    // A Service of `shop` is in green by its own annotation.
    let stray = ("shop".to_owned(), "stray-1".to_owned());
    let in_green = Service {
        name: "stray".into(),
        ..service("green", "9", 10)
    };
    world.set_service(&stray, Some(in_green.clone()));
    world.flush();
    assert_eq!(of(&world, "d2", 8), ["shop", "ns/web", "shop/stray"]);
    assert_eq!(of(&world, "d3", 9), ["lab", "shop/stray", ""]);
    assert_eq!(of(&world, "d1", 7), ["", "", ""], "the VPC of nodes finds all");
    world.set_service(
        &stray,
        Some(Service {
            network: "blue".into(),
            ..in_green
        }),
    );
    world.set_namespace("lab", None);
    world.flush();
    assert_eq!(of(&world, "d2", 8), ["shop", "ns/web", ""]);
    assert_eq!(of(&world, "d3", 9), ["", "", ""]);
}

/// Returns a service of network `web` with traffic that stays on its node; 10.0.0.20 is a backend on d2, and 10.0.0.30
/// one on d3.
fn kept_local() -> Service {
    let mut kept = service("web", "1", 20);
    let more = service("web", "1", 30).tables[0].1[0].backends.clone();
    kept.tables[0].1[0].backends.extend(more);
    kept.tables[0].1[0].local = true;
    let home = |last: u8, droplet: &str| (Ipv4Addr::new(10, 0, 0, last).into(), droplet.to_owned());
    kept.homes = [home(20, "d2"), home(30, "d3")].into();
    kept
}

fn ports_told(world: &World, droplet: &str) -> Option<Vec<ServicePort>> {
    let program = world.program(droplet);
    match program.get(&Key::Service(vni(7), ADDRESS))?.unpack().row {
        Some(row::Row::Service(row)) => Some(row.ports),
        other => panic!("{other:?}"),
    }
}

/// Returns the last bytes of the addresses of the backends that a droplet is told.
fn backends_told(world: &World, droplet: &str) -> Option<Vec<u8>> {
    let ports = ports_told(world, droplet)?;
    let last = ports[0].backends.iter().map(|backend| backend.address[15]);
    Some(last.collect())
}

/// Does the same for backends that are the droplet's own.
fn told(world: &World, droplet: &str) -> Option<Vec<u8>> {
    assert!(ports_told(world, droplet)?[0].local);
    backends_told(world, droplet)
}

#[test]
fn first_endpoint_touches_local_services_of_its_vpc_alone() {
    let mut world = small(4);
    world.set_vpc("blue", Some(vpc(8)));
    world.set_network("shop", Some(network("blue", 1)));
    let foreign = Service {
        network: "shop".into(),
        ..kept_local()
    };
    world.set_service(&name("own"), Some(kept_local()));
    world.set_service(&name("foreign"), Some(foreign));
    world.set_service(&name("spread"), Some(service("web", "1", 1)));
    world.flush();
    let touched = |world: &World| {
        let owners = world.dirty.iter().filter_map(|owner| match owner {
            super::Owner::Service(name) => Some(name.clone()),
            _ => None,
        });
        owners.collect::<Vec<_>>()
    };
    world.set_endpoint(&name("e"), Some(endpoint("web", 3, 40)));
    assert_eq!(touched(&world), [name("own")]);
    // A service without its network is in no VPC.
    world.set_network("web", None);
    world.flush();
    world.set_endpoint(&name("e"), None);
    assert!(touched(&world).is_empty());
}

#[test]
fn each_vpc_droplet_gets_its_own_backends_of_local_service() {
    let mut world = small(5);
    for (endpoint_name, droplet, address) in [("e2", 2, 20), ("e4", 4, 40)] {
        world.set_endpoint(&name(endpoint_name), Some(endpoint("web", droplet, address)));
    }
    world.set_service(&name("s"), Some(kept_local()));
    world.flush();
    let of = |world: &World| [0, 1, 2, 3, 4].map(|number| told(world, &format!("d{number}")));
    // d1, which has the bouncer, and d4 are told no backend.
    assert_eq!(
        of(&world),
        [None, Some(vec![]), Some(vec![20]), None, Some(vec![])]
    );
    let mut rows = world.service_rows(&name("s"));
    rows.sort();
    let droplets: Vec<_> = rows.into_iter().map(|(droplet, _)| droplet).collect();
    assert_eq!(droplets, ["d1", "d2", "d4"], "all of them are waited for");
    // A pod comes to d3: a row there, and none elsewhere.
    world.set_endpoint(&name("e3"), Some(endpoint("web", 3, 30)));
    let deltas = world.flush();
    assert_eq!(told(&world, "d3"), Some(vec![30]));
    let changed = deltas
        .iter()
        .filter(|(_, delta)| delta.contains_key(&Key::Service(vni(7), ADDRESS)));
    assert_eq!(
        changed.map(|(droplet, _)| droplet.as_str()).collect::<Vec<_>>(),
        ["d3"]
    );
    // The backend of d2 goes: only its row changes.
    let mut fewer = kept_local();
    fewer.tables[0].1[0].backends.pop_first();
    world.set_service(&name("s"), Some(fewer));
    let deltas = world.flush();
    assert_eq!(deltas.keys().collect::<Vec<_>>(), ["d2"]);
    // The last pod of d4 goes, too.
    world.set_endpoint(&name("e4"), None);
    world.flush();
    assert_eq!(told(&world, "d4"), None);
}

#[test]
fn droplets_are_told_the_backends_that_are_near_them() {
    let mut world = small(4);
    for (droplet, zone) in [("d1", "x"), ("d2", "y"), ("d3", "y")] {
        world.set_zone(droplet, Some(zone));
    }
    let mut hinted = Service {
        hints: [(20, "x"), (30, "y")]
            .map(|(last, zone)| {
                let hints = Hints {
                    zones: [zone.to_owned()].into(),
                    ..Hints::default()
                };
                (Ipv4Addr::new(10, 0, 0, last).into(), hints)
            })
            .into(),
        ..kept_local()
    };
    hinted.tables[0].1[0].local = false;
    for droplet in ["d0", "d2", "d3"] {
        world.subscribe(droplet, vni(7), ADDRESS, true);
    }
    world.set_service(&name("s"), Some(hinted.clone()));
    world.flush();
    let of = |world: &World| ["d0", "d1", "d2", "d3"].map(|droplet| backends_told(world, droplet).unwrap());
    assert_eq!(of(&world), [vec![20, 30], vec![20], vec![30], vec![30]]);
    // A node passes to another zone, and another one to none.
    world.set_zone("d3", Some("x"));
    world.set_zone("d2", None);
    let deltas = world.flush();
    assert_eq!(of(&world), [vec![20, 30], vec![20], vec![20, 30], vec![20]]);
    assert_eq!(deltas.keys().collect::<Vec<_>>(), ["d2", "d3"]);
    // The last near one goes.
    hinted.tables[0].1[0].backends.pop_first();
    hinted.hints.pop_first();
    world.set_service(&name("s"), Some(hinted));
    world.flush();
    assert_eq!(of(&world), [vec![30], vec![30], vec![30], vec![30]]);
}

#[test]
fn a_vpc_knows_no_service_range_that_touches_its_own() {
    let mut world = small(2);
    let address = ADDRESS;
    let range_of = |world: &World| match world.program("d1")[&Key::Vpc(vni(7))].unpack().row {
        Some(row::Row::Vpc(row)) => row.service_cidrs,
        other => panic!("{other:?}"),
    };
    assert!(world.set_service_ranges(vec!["10.96.0.0/16".into(), "10.0.3.0/24".into()]));
    world.flush();
    assert_eq!(range_of(&world), ["10.96.0.0/16"]);
    assert!(world.is_in_service_ranges("web", address));
    assert!(!world.is_in_service_ranges("web", Ipv4Addr::new(10, 0, 3, 1).into()));
    assert!(!world.set_service_ranges(vec!["10.96.0.0/16".into(), "10.0.3.0/24".into()]));
    assert!(world.set_service_ranges(Vec::new()));
    world.flush();
    assert!(range_of(&world).is_empty());
    assert!(!world.is_in_service_ranges("web", address));
}

#[test]
fn own_service_address_is_in_vpc_row_and_vpcs_may_reuse_it() {
    let own: IpAddr = Ipv4Addr::new(10, 0, 0, 99).into();
    let with_own = |network: &str, uid: &str, cluster: u8| {
        let mut made = service(network, uid, 10);
        let ports = made.tables[0].1.clone();
        made.tables[0].0 = Ipv4Addr::new(10, 96, 0, cluster).into();
        made.tables.push((own, ports));
        made.own_addresses = vec![own];
        made
    };
    let mut world = shared();
    world.set_service(&name("s"), Some(with_own("web", "1", 1)));
    world.set_service(&name("t"), Some(with_own("blue", "2", 2)));
    world.flush();
    let of = |world: &World, droplet: &str, number: u32| {
        let program = world.program(droplet);
        let named = match &program[&Key::Vpc(vni(number))].unpack().row {
            Some(row::Row::Vpc(row)) => row.service_addresses.len(),
            other => panic!("{other:?}"),
        };
        (named, program.contains_key(&Key::Service(vni(number), own)))
    };
    assert_eq!([of(&world, "d1", 7), of(&world, "d2", 8)], [(1, true), (1, true)]);
    assert_eq!(world.service_at(own), None, "of no service of the cluster");
    let rows = world.service_rows(&name("t"));
    assert!(rows.contains(&("d2".to_owned(), Key::Vpc(vni(8)))), "{rows:?}");
    world.set_service(&name("t"), None);
    world.flush();
    assert_eq!(
        [of(&world, "d1", 7), of(&world, "d2", 8)],
        [(1, true), (0, false)]
    );
}

/// Returns a service of network `web` that nodes serve.
fn served(uid: &str, backend: u8) -> Service {
    Service {
        by_node: true,
        ..service("web", uid, backend)
    }
}

#[test]
fn every_vpc_knows_where_services_have_their_addresses() {
    let mut world = small(2);
    world.set_service_ranges(vec!["10.96.0.0/16".into(), "fd00:96::/112".into()]);
    world.flush();
    let Some(row::Row::Vpc(row)) = world.program("d1")[&Key::Vpc(vni(7))].unpack().row else {
        panic!("no VPC row")
    };
    assert_eq!(row.service_cidrs, ["10.96.0.0/16", "fd00:96::/112"]);
    assert_eq!(row.cidrs6.len(), 0, "they are no ranges of the VPC");
}
