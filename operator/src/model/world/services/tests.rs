//! Rows of services: who has them, and what a change costs.

use std::net::{IpAddr, Ipv4Addr};

use thuban_proto::transit::{ServiceBackend, ServicePort, row};

use super::super::tests::{endpoint, network, settled, small, vpc};
use super::{EndpointName, Key, Service, World};

const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 10));

fn name(service: &str) -> EndpointName {
    ("ns".to_owned(), service.to_owned())
}

/// At 10.96.0.10, with this one backend.
pub fn service(network: &str, uid: &str, backend: u8) -> Service {
    let backend = ServiceBackend {
        address: thuban_api::identifiers::mapped(Ipv4Addr::new(10, 0, 0, backend)).to_vec(),
        port: 8080,
    };
    let port = ServicePort {
        protocol: 6,
        port: 80,
        backends: vec![backend],
        affinity_seconds: 0,
    };
    Service {
        network: network.into(),
        born: (None, uid.into()),
        tables: vec![(ADDRESS, vec![port])],
    }
}

fn has(world: &World, droplet: &str, vni: u32) -> bool {
    world.program(droplet).contains_key(&Key::Service(vni, ADDRESS))
}

/// The last byte of its backend's address.
fn backend(world: &World, droplet: &str) -> u8 {
    match &world.program(droplet)[&Key::Service(7, ADDRESS)].row {
        Some(row::Row::Service(row)) => row.ports[0].backends[0].address[15],
        other => panic!("{other:?}"),
    }
}

#[test]
fn bouncers_of_all_networks_of_the_vpc_have_a_service_and_nobody_else() {
    let mut world = small(6);
    world.set_network("db", Some(network("red", 2)));
    world.set_bouncer("db-b0", Some(settled("db", "d2")));
    world.set_vpc("blue", Some(vpc(8)));
    world.set_network("shop", Some(network("blue", 1)));
    world.set_bouncer("shop-b0", Some(settled("shop", "d3")));
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
        ["d1", "d2"].map(|droplet| (droplet.to_owned(), Key::Service(7, ADDRESS)))
    );
    // A network that comes, and one that goes.
    world.set_network("cache", Some(network("red", 3)));
    world.set_bouncer("cache-b0", Some(settled("cache", "d5")));
    world.set_network("db", None);
    world.flush();
    assert!(has(&world, "d5", 7) && !has(&world, "d2", 7));
    // Its own goes: it is in no VPC.
    world.set_network("web", None);
    world.flush();
    assert!((0..6).all(|number| !has(&world, &format!("d{number}"), 7)));
}

#[test]
fn subscribers_have_a_service_while_they_ask_and_while_it_is_there() {
    let mut world = small(5);
    assert!(world.subscribe("d3", 7, ADDRESS, true), "before there is one");
    world.set_service(&name("s"), Some(service("web", "1", 10)));
    world.flush();
    assert!(world.subscribe("d4", 7, ADDRESS, true), "and after");
    assert!(world.subscribe("d2", 8, ADDRESS, true), "of another VPC");
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
    world.subscribe("d4", 7, ADDRESS, false);
    let deltas = world.flush();
    assert_eq!(deltas["d4"].get(&Key::Service(7, ADDRESS)), Some(&None));
    world.set_service(&name("s"), Some(service("web", "1", 11)));
    let deltas = world.flush();
    assert_eq!(deltas.keys().collect::<Vec<_>>(), ["d1", "d3"]);
    assert_eq!((backend(&world, "d1"), backend(&world, "d3")), (11, 11));
    world.set_service(&name("s"), None);
    let deltas = world.flush();
    for droplet in ["d1", "d3"] {
        assert_eq!(deltas[droplet].get(&Key::Service(7, ADDRESS)), Some(&None));
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
    world.list_bouncer("web-b0");
    world.set_divider("red-d0", Some(settled("red", "d4")));
    world.subscribe("d4", 7, IpAddr::from([10, 0, 0, 10]), true);
    assert_eq!(touched(&world), 0);
    world.set_endpoint(&name("e"), None);
    assert_eq!(touched(&world), 0);
    world.set_bouncer("web-b1", Some(settled("web", "d4")));
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
        ..settled("web", "d3")
    };
    world.set_bouncer("web-b1", Some(role));
    world.flush();
    let row = ("d3".to_owned(), Key::Service(7, ADDRESS));
    assert!(world.bouncer_tables("web", "d3").contains(&row));
    world.leave_bouncer("web-b1");
    world.flush();
    assert!(has(&world, "d3", 7), "until nobody asks it any more");
    world.forget_bouncer("web-b1");
    world.flush();
    assert!(!has(&world, "d3", 7));
}

#[test]
fn every_vpc_knows_where_services_have_their_addresses() {
    let mut world = small(2);
    world.set_service_ranges(vec!["10.96.0.0/16".into(), "fd00:96::/112".into()]);
    world.flush();
    let Some(row::Row::Vpc(row)) = world.program("d1")[&Key::Vpc(7)].row.clone() else {
        panic!("no VPC row")
    };
    assert_eq!(row.service_cidrs, ["10.96.0.0/16", "fd00:96::/112"]);
    assert_eq!(row.cidrs6.len(), 0, "they are no ranges of the VPC");
}
