//! Tests of what droplets are told of a tenant's Service that nodes take connections for.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_proto::transit::{ExposedRow, row};
use thuban_rows::Backend;
use thuban_rows::builders::vni;

use super::super::super::tests::droplet_address;
use super::{ADDRESS, Hints, Key, Service, World, exposed, kept_local, name, shared};

/// Returns a service with NodePort 30080 in VPC 8, with a backend on d2 and one on d3.
fn tenants(by_peers: bool) -> Service {
    let mut tenants = Service {
        network: "blue".into(),
        exposed: exposed(30080),
        by_peers,
        ..kept_local()
    };
    let port = &mut tenants.exposed[0].1[0];
    port.local = Some(tenants.tables[0].1[0].backends.clone());
    tenants
}

fn told(world: &World, droplet: u64) -> Option<ExposedRow> {
    let program = world.program(&format!("d{droplet}"));
    match program.get(&Key::Exposed(vni(8), ADDRESS))?.unpack().row {
        Some(row::Row::Exposed(row)) => Some(row),
        other => panic!("{other:?}"),
    }
}

/// Returns the last bytes of the addresses of their own backends that five droplets are told.
fn own(world: &World) -> [Option<Vec<u8>>; 5] {
    [0, 1, 2, 3, 4].map(|droplet| {
        let row = told(world, droplet)?;
        let backends = row.ports[0].backends.iter();
        Some(backends.map(|backend| backend.address[15]).collect())
    })
}

#[test]
fn what_stays_on_its_node_is_told_where_the_backends_are() {
    let mut world = shared();
    world.set_service(&name("s"), Some(tenants(false)));
    world.flush();
    assert_eq!(own(&world), [None, None, Some(vec![20]), Some(vec![30]), None]);
    assert!(told(&world, 2).unwrap().ports[0].peers.is_empty());
    let closed = Service {
        exposed: Vec::new(),
        ..tenants(false)
    };
    world.set_service(&name("s"), Some(closed));
    world.flush();
    assert_eq!(own(&world), [const { None }; 5]);
}

#[test]
fn nodes_choose_among_members_that_are_near_them() {
    let mut world = shared();
    for (droplet, zone) in [("d1", "x"), ("d2", "y")] {
        world.set_zone(droplet, Some(zone));
    }
    let hints = [(20, "x"), (30, "y")].map(|(last, zone)| {
        let hints = Hints {
            zones: [zone.to_owned()].into(),
            ..Hints::default()
        };
        (IpAddr::from([10, 0, 0, last]), hints)
    });
    let mut service = Service {
        exposed: exposed(30080),
        hints: hints.into(),
        ..kept_local()
    };
    let port = &mut service.exposed[0].1[0];
    port.affinity = 60;
    port.members = service.tables[0].1[0].backends.clone();
    world.set_service(&name("s"), Some(service));
    world.flush();
    let members = |droplet: &str| match world.program(droplet)[&Key::Exposed(vni(7), ADDRESS)]
        .unpack()
        .row
    {
        Some(row::Row::Exposed(row)) => {
            let members = row.ports[0].members.iter();
            members.map(|backend| backend.address[15]).collect::<Vec<_>>()
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(members("d0"), [20, 30]);
    assert_eq!(members("d1"), [20]);
    assert_eq!(members("d2"), [30]);
}

#[test]
fn exposed_row_tells_all_droplets_which_peers_have_backends() {
    let mut world = shared();
    world.set_service(&name("s"), Some(tenants(true)));
    world.flush();
    let none = Some(Vec::new());
    let with = [
        none.clone(),
        none.clone(),
        Some(vec![20]),
        Some(vec![30]),
        none.clone(),
    ];
    assert_eq!(own(&world), with);
    let peers =
        |world: &World, droplet| -> Vec<Vec<u8>> { told(world, droplet).unwrap().ports[0].peers.clone() };
    let of = |droplet: u64| droplet_address(droplet).to_ipv6_mapped().octets().to_vec();
    for droplet in 0..5 {
        assert_eq!(peers(&world, droplet), [of(2), of(3)]);
    }
    // Another backend on the second droplet concerns that droplet alone; the end of the first droplet's backend
    // concerns all droplets.
    let mut more = tenants(true);
    let third = Backend {
        address: Ipv4Addr::new(10, 0, 0, 31).into(),
        port: 8080,
    };
    more.exposed[0].1[0].local.as_mut().unwrap().insert(third);
    more.homes.insert(third.address, "d3".to_owned());
    world.set_service(&name("s"), Some(more.clone()));
    assert_eq!(world.flush().keys().collect::<Vec<_>>(), ["d3"]);
    more.exposed[0].1[0].local.as_mut().unwrap().pop_first();
    world.set_service(&name("s"), Some(more));
    assert_eq!(world.flush().len(), 5);
    assert_eq!(peers(&world, 0), [of(3)]);
    // The droplet gets another address.
    world.set_droplet("d3", Some(droplet_address(77)));
    world.flush();
    assert_eq!(peers(&world, 0), [of(77)]);
}

#[test]
fn droplets_with_ending_backends_are_peers_only_as_fallback() {
    let mut world = shared();
    let mut ending = tenants(true);
    let [first, second] = [20, 30].map(|last| IpAddr::from(Ipv4Addr::new(10, 0, 0, last)));
    ending.exposed[0].1[0].ending = [second].into();
    world.set_service(&name("s"), Some(ending.clone()));
    world.flush();
    let port = |droplet| told(&world, droplet).unwrap().ports[0].clone();
    assert_eq!(port(0).peers.len(), 1);
    assert_eq!((port(3).backends.len(), port(3).ending.len()), (1, 1));
    assert!(port(2).ending.is_empty());
    ending.exposed[0].1[0].ending = [first, second].into();
    world.set_service(&name("s"), Some(ending));
    world.flush();
    assert_eq!(told(&world, 0).unwrap().ports[0].peers.len(), 2);
}

#[test]
fn without_a_port_of_nodes_nothing_is_sent_on() {
    let mut world = shared();
    let mut changed = tenants(true);
    changed.exposed[0].1[0].node_port = None;
    changed.outside = vec![Ipv4Addr::new(192, 0, 2, 1).into()];
    world.set_service(&name("s"), Some(changed));
    world.flush();
    assert_eq!(own(&world), [None, None, Some(vec![20]), Some(vec![30]), None]);
    assert!(told(&world, 2).unwrap().ports[0].peers.is_empty());
}

#[test]
fn all_protocols_are_sent_on() {
    for protocol in [6, 17, 132] {
        let mut world = shared();
        let mut changed = tenants(true);
        changed.exposed[0].1[0].protocol = protocol;
        world.set_service(&name("s"), Some(changed));
        world.flush();
        assert_eq!(told(&world, 0).unwrap().ports[0].peers.len(), 2, "{protocol}");
    }
}

#[test]
fn by_ipv6_only_droplets_whose_nodes_have_it_are_peers() {
    let mut world = shared();
    let service6 = IpAddr::from(Ipv6Addr::from([0xfd00, 0x96, 0, 0, 0, 0, 0, 1]));
    let node6 = Ipv6Addr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, 3]);
    let mut dual = tenants(true);
    let mut second = dual.exposed[0].clone();
    second.0 = service6;
    dual.exposed.push(second);
    dual.own_addresses.push(service6);
    world.set_service(&name("s"), Some(dual));
    world.flush();
    let peers = |world: &World, droplet: &str| -> Option<Vec<Vec<u8>>> {
        let row = world
            .program(droplet)
            .get(&Key::Exposed(vni(8), service6))?
            .unpack()
            .row;
        match row {
            Some(row::Row::Exposed(row)) => Some(row.ports[0].peers.clone()),
            other => panic!("{other:?}"),
        }
    };
    let third = droplet_address(3);
    let known = |world: &World| {
        let row = world.program("d0").get(&Key::Droplet(third.into()))?.unpack().row;
        match row {
            Some(row::Row::Droplet(row)) => Some(row.address6),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(
        (peers(&world, "d0"), peers(&world, "d2")),
        (None, Some(Vec::new()))
    );
    assert_eq!(known(&world), Some(Vec::new()));
    world.set_droplet6("d3", Some(node6));
    let deltas = world.flush();
    assert!(
        deltas["d0"].contains_key(&Key::Droplet(third.into())),
        "{deltas:?}"
    );
    let of = third.to_ipv6_mapped().octets().to_vec();
    assert_eq!(peers(&world, "d0"), Some(vec![of]));
    assert_eq!(known(&world), Some(node6.octets().to_vec()));
    world.set_droplet6("d3", None);
    world.flush();
    assert_eq!((peers(&world, "d0"), known(&world)), (None, Some(Vec::new())));
    // A droplet that is none any more leaves no address behind.
    world.set_droplet6("d3", Some(node6));
    world.set_droplet("d3", None);
    world.set_droplet("d3", Some(third));
    world.flush();
    assert_eq!(known(&world), Some(Vec::new()));
}

#[test]
fn service_with_many_ports_has_fewer_peers_per_port() {
    let mut world = shared();
    let mut wide = tenants(true);
    let port = wide.exposed[0].1[0].clone();
    wide.exposed[0].1 = vec![port; 200];
    // The table for pods is not split by droplet.
    wide.tables[0].1[0].local = false;
    world.set_service(&name("s"), Some(wide));
    world.flush();
    assert!(
        told(&world, 0)
            .unwrap()
            .ports
            .iter()
            .all(|port| port.peers.len() == 1)
    );
}
