//! Tests of what droplets are told of a service's fronts.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use thuban_rows::builders::vni;
use thuban_rows::{Front, Row};

use super::super::super::tests::droplet_address;
use crate::model::service::Clients;

use super::{Key, Service, World, exposed, kept_local, name, shared};

const FRONT: IpAddr = IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1));

/// Returns a service of VPC 8 with a front, a backend on d2 and one on d3.
fn fronted(uid: &str) -> Service {
    let mut service = Service {
        network: "blue".into(),
        exposed: exposed(30080),
        outside: vec![FRONT],
        born: (None, uid.into()),
        ..kept_local()
    };
    let mut ports = service.tables[0].1.clone();
    ports[0].local = false;
    service.fronts = vec![(FRONT, ports)];
    service
}

fn told(world: &World, droplet: u64, of: u32) -> Option<Front> {
    let row = world.row(&format!("d{droplet}"), &Key::Front(vni(of), FRONT))?;
    match Row::try_from(row.unpack()).unwrap() {
        Row::Front(front) => Some(front),
        other => panic!("{other:?}"),
    }
}

fn holders(world: &World, of: u32) -> Vec<u64> {
    (0..5)
        .filter(|droplet| told(world, *droplet, of).is_some())
        .collect()
}

#[test]
fn all_droplets_are_told_the_droplet_of_each_backend() {
    let mut world = shared();
    world.set_service(&name("s"), Some(fronted("1")));
    world.flush();
    assert_eq!(holders(&world, 8), [0, 1, 2, 3, 4]);
    let front = told(&world, 0, 8).unwrap();
    let homes: Vec<_> = front.ports[0]
        .backends
        .iter()
        .map(|(backend, droplet)| (backend.address.to_string(), droplet.0))
        .collect();
    let of = |last, droplet| (format!("10.0.0.{last}"), droplet_address(droplet));
    assert_eq!(homes, [of(20, 2), of(30, 3)]);
    // A backend whose droplet isn't known is none.
    let mut lost = fronted("1");
    lost.homes.remove(&IpAddr::from([10, 0, 0, 30]));
    world.set_service(&name("s"), Some(lost));
    let deltas = world.flush();
    assert_eq!(deltas.len(), 5);
    assert_eq!(told(&world, 4, 8).unwrap().ports[0].backends.len(), 1);
    world.set_service(&name("s"), None);
    world.flush();
    assert!(holders(&world, 8).is_empty());
}

#[test]
fn backends_on_suspect_droplets_rest_if_there_are_others() {
    let mut world = shared();
    world.set_service(&name("s"), Some(fronted("1")));
    world.flush();
    let mut resting = |suspects: &[&str]| {
        world.set_suspects(suspects.iter().map(ToString::to_string).collect());
        let deltas = world.flush().len();
        let port = told(&world, 4, 8).unwrap().ports.remove(0);
        assert_eq!(port.backends.len(), 2);
        let resting = port.resting.iter().map(ToString::to_string);
        (resting.collect::<Vec<_>>(), deltas)
    };
    let [second, third] = ["10.0.0.20", "10.0.0.30"].map(str::to_owned);
    assert_eq!(resting(&["d2"]), (vec![second], 5));
    assert_eq!(resting(&["d2"]).1, 0);
    assert_eq!(resting(&["d0", "d2"]).1, 0, "it has no backend");
    assert_eq!(resting(&["d2", "d3"]), (Vec::new(), 5));
    assert_eq!(resting(&["d3"]), (vec![third], 5));
    assert_eq!(resting(&[]), (Vec::new(), 5));
}

#[test]
fn a_droplet_that_comes_gets_them_and_one_that_cannot_ends_them() {
    let mut world = shared();
    world.set_service(&name("s"), Some(fronted("1")));
    world.set_droplet("d5", Some(droplet_address(5)));
    world.flush();
    assert!(told(&world, 5, 8).is_some());
    world.set_fronting("unknown", false);
    world.flush();
    assert_eq!(holders(&world, 8).len(), 5, "no droplet has that name");
    world.set_fronting("d5", false);
    world.flush();
    assert!(
        holders(&world, 8).is_empty(),
        "it would drop what fronts send to its backends"
    );
    world.set_droplet("d5", None);
    world.flush();
    assert_eq!(holders(&world, 8).len(), 5);
}

#[test]
fn rows_of_a_load_balancer_name_its_clients() {
    let mut world = shared();
    let range: IpNet = "198.51.100.0/24".parse().unwrap();
    for v4 in [[range].into(), BTreeSet::new()] {
        let clients = Clients {
            v4: v4.clone(),
            ..Clients::default()
        };
        let mut limited = Service {
            clients: Some(clients),
            ..fronted("1")
        };
        let backends = limited.tables[0].1[0].backends.iter().copied();
        limited.exposed[0].1[0].local = Some(backends.collect());
        let cluster = limited.exposed[0].0;
        world.set_service(&name("s"), Some(limited));
        world.flush();
        assert_eq!(told(&world, 0, 8).unwrap().clients, Some(v4.clone()));
        let row = world.row("d2", &Key::Exposed(vni(8), cluster)).unwrap();
        match Row::try_from(row.unpack()).unwrap() {
            Row::Exposed(row) => assert_eq!(row.clients, Some(v4)),
            other => panic!("{other:?}"),
        }
    }
    world.set_service(&name("s"), Some(fronted("1")));
    world.flush();
    assert_eq!(told(&world, 0, 8).unwrap().clients, None);
}

#[test]
fn of_two_services_the_younger_one_has_the_address() {
    let mut world = shared();
    world.set_service(&name("s"), Some(fronted("1")));
    let other = Service {
        network: "web".into(),
        ..fronted("2")
    };
    world.set_service(&name("t"), Some(other));
    world.flush();
    assert_eq!((holders(&world, 8).len(), holders(&world, 7).len()), (0, 5));
    world.set_service(&name("t"), None);
    world.flush();
    assert_eq!((holders(&world, 8).len(), holders(&world, 7).len()), (5, 0));
}
