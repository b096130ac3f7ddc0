//! Tests of Services that nodes serve, of the cluster's DNS among them, and of what stays closed to pods that reach
//! outside.

use std::net::IpAddr;

use thuban_proto::transit::row;
use thuban_rows::builders::vni;

use super::super::super::tests::{endpoint, vpc};
use super::{ADDRESS, Key, Service, Vpc, World, has, name, names_it, served, service, shared};

/// Returns (droplet, VNI) of the droplets that serve the service.
fn servers(world: &World) -> Vec<(String, u32)> {
    let droplets = (0..5).map(|number| format!("d{number}"));
    let keys = droplets.flat_map(|droplet| {
        let keys = world.program(&droplet).into_keys();
        keys.map(move |key| (droplet.clone(), key))
    });
    let served = keys.filter_map(|(droplet, key)| match key {
        Key::NodeService(vni, ADDRESS) => Some((droplet, vni.get())),
        _ => None,
    });
    served.collect()
}

#[test]
fn sharing_vpcs_are_those_that_a_walk_finds() {
    let mut world = World::default();
    for step in 0..100 {
        let named = [("web", step % 4 > 0), ("db", step % 7 > 2)];
        let named = named.into_iter().filter(|(_, is_named)| *is_named);
        let known = Vpc {
            shared: named
                .map(|(service, _)| ("ns".to_owned(), service.to_owned()))
                .collect(),
            ..vpc(step % 3 + 1)
        };
        world.set_vpc(&format!("v{}", step % 3), (step % 5 > 0).then_some(known));
        for service in ["web", "db"] {
            let key = ("ns".to_owned(), service.to_owned());
            let walked = world.vpcs.values().filter(|vpc| vpc.shared.contains(&key));
            let walked: Vec<_> = walked.map(|vpc| vpc.vni).collect();
            assert_eq!(world.sharing("ns", service), walked, "step {step}");
        }
    }
}

#[test]
fn node_service_is_on_droplets_of_own_and_sharing_vpcs() {
    let mut world = shared();
    let of = |droplet: &str, vni| (droplet.to_owned(), vni);
    let roles = [of("d0", 7), of("d1", 7), of("d2", 8)];
    assert_eq!(servers(&world), roles);
    assert!(
        (0..5).all(|number| !has(&world, &format!("d{number}"), 7)),
        "agents don't"
    );
    let rows: Vec<_> = world.service_rows(&name("s"));
    let rows: Vec<_> = rows.iter().map(|(droplet, _)| droplet.as_str()).collect();
    assert_eq!(rows, ["d0", "d1"], "its own VPC's");
    // An endpoint adds its droplet.
    world.set_endpoint(&name("e"), Some(endpoint("blue", 4, 20)));
    world.flush();
    assert!(servers(&world).contains(&of("d4", 8)));
    // The VPC no longer names the service.
    world.set_vpc("blue", Some(vpc(8)));
    world.flush();
    assert_eq!(servers(&world), [of("d0", 7), of("d1", 7)]);
    // The backends are endpoints of the service's VPC: agents serve it, and nodes only send on to it from other VPCs.
    world.set_service(&name("s"), Some(service("web", "1", 10)));
    world.flush();
    assert!(servers(&world).is_empty() && has(&world, "d1", 7));
    world.set_vpc("blue", Some(names_it(8)));
    world.flush();
    assert_eq!(servers(&world), [of("d2", 8), of("d4", 8)]);
    match &world.program("d2")[&Key::NodeService(vni(8), ADDRESS)]
        .unpack()
        .row
    {
        Some(row::Row::NodeService(row)) => assert!(row.inside && row.ports.is_empty()),
        other => panic!("{other:?}"),
    }
    world.set_vpc("blue", Some(vpc(8)));
    world.set_service(&name("s"), Some(served("1", 10)));
    world.flush();
    assert!(servers(&world).len() == 2 && !has(&world, "d1", 7));
    world.set_service(&name("s"), None);
    world.flush();
    assert!(servers(&world).is_empty());
}

#[test]
fn sharing_and_outside_backends_need_vpc_with_host_access() {
    let mut world = shared();
    let outside: IpAddr = "192.0.2.1".parse().unwrap();
    assert!(world.is_outside("web", outside, false));
    world.set_closed_ranges(vec!["172.16.0.0/24".into()]);
    let node = "172.16.0.9".parse().unwrap();
    let is_outside = |address| world.is_outside("web", address, true);
    assert!(!is_outside(outside), "a pod of another VPC");
    assert!(is_outside(node), "one on host network");
    for inside in ["10.96.0.1", "10.1.2.3", "169.254.169.254", "127.0.0.1"] {
        world.set_service_ranges(vec!["10.96.0.0/16".into()]);
        assert!(
            !world.is_outside("web", inside.parse().unwrap(), false),
            "{inside}"
        );
    }
    assert!(!world.is_outside("blue", outside, false));
    // A tenant's own service with a name that another VPC shares.
    let of_green = Service {
        network: "green".into(),
        ..served("2", 11)
    };
    world.set_service(&name("s"), Some(of_green));
    world.flush();
    assert!(
        servers(&world).iter().all(|(_, vni)| *vni == 9),
        "{:?}",
        servers(&world)
    );
}

#[test]
fn who_gets_outside_is_told_what_stays_closed() {
    let mut world = shared();
    world.set_closed_ranges(vec!["172.16.0.0/24".into()]);
    let out = Vpc {
        egress: true,
        ..vpc(8)
    };
    world.set_vpc("blue", Some(out));
    world.flush();
    let row = |world: &World, droplet: &str, number| match world.program(droplet)[&Key::Vpc(vni(number))]
        .unpack()
        .row
    {
        Some(row::Row::Vpc(row)) => row,
        other => panic!("{other:?}"),
    };
    let blue = row(&world, "d2", 8);
    assert!(
        blue.egress && blue.closed_cidrs == ["172.16.0.0/24", "10.0.0.0/12"],
        "{blue:?}"
    );
    assert!(
        row(&world, "d3", 9).closed_cidrs.is_empty(),
        "it doesn't get there"
    );
    let red = row(&world, "d1", 7);
    assert!(red.egress && red.host_access && red.closed_cidrs.is_empty());
    // Nodes have addresses elsewhere, too.
    let nodes = ["172.16.0.1", "192.0.2.7", "fd00:9::1"].map(|node| node.parse().unwrap());
    world.set_nodes(nodes.into());
    world.flush();
    let closed = row(&world, "d2", 8).closed_cidrs;
    assert_eq!(
        closed,
        ["172.16.0.0/24", "10.0.0.0/12", "192.0.2.7/32", "fd00:9::1/128"]
    );
    world.set_nodes([].into());
    // The VPC of nodes gets another range.
    let more = Vpc {
        host_access: true,
        cidrs: vec!["10.0.0.0/12".into(), "fd00::/48".into()],
        ..vpc(7)
    };
    world.set_vpc("red", Some(more));
    world.flush();
    let blue = row(&world, "d2", 8);
    assert_eq!(blue.closed_cidrs, ["172.16.0.0/24", "10.0.0.0/12", "fd00::/48"]);
}

#[test]
fn cluster_dns_is_refused_to_pods_of_vpcs_that_do_not_share_it() {
    let mut world = shared();
    world.set_cluster_dns(vec![ADDRESS]);
    let refused = |world: &World, droplet: &str, number| {
        let program = world.program(droplet);
        let row = program.get(&Key::Service(vni(number), ADDRESS))?;
        match row.unpack().row {
            Some(row::Row::Service(row)) => Some(row.ports.is_empty()),
            other => panic!("{other:?}"),
        }
    };
    // The Service comes anew, after its address is known as the DNS's.
    world.set_service(&name("s"), None);
    world.flush();
    assert_eq!(refused(&world, "d3", 9), None, "nobody has the address");
    world.set_service(&name("s"), Some(served("1", 10)));
    world.flush();
    assert_eq!(refused(&world, "d3", 9), Some(true));
    assert_eq!(refused(&world, "d2", 8), None, "it shares it");
    assert_eq!(refused(&world, "d1", 7), None, "nodes serve its own VPC");
    // The VPC begins to share it, and ends.
    for (vpc, expected) in [
        (names_it(9), None),
        (
            Vpc {
                shared: Vec::new(),
                ..names_it(9)
            },
            Some(true),
        ),
    ] {
        world.set_vpc("green", Some(vpc));
        world.flush();
        assert_eq!(refused(&world, "d3", 9), expected);
    }
    // A Service of the VPC itself.
    let own = Service {
        network: "green".into(),
        ..service("green", "2", 20)
    };
    world.set_service(&name("s"), Some(own));
    world.flush();
    assert_eq!(refused(&world, "d3", 9), Some(false));
}
