//! Tests of the world under random changes, and of the cost of an endpoint.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thuban_api::identifiers::MacAddr;
use thuban_proto::transit::row;
use thuban_rows::Row;
use thuban_rows::builders::{network_id, vni};

use super::{
    Address, Bandwidth, Delta, Endpoint, Key, Limits, Membership, Network, PackedRow, Pod, Role, RoleId,
    RoleKind, Vpc, World,
};
use random::Random;

mod policy;
mod policy_droplet;
mod policy_limits;
mod policy_rollout;
mod random;

pub(super) fn droplet_address(number: u64) -> Ipv4Addr {
    Ipv4Addr::from(0xac10_0001 + number as u32)
}

fn address6(host: u64) -> Ipv6Addr {
    Ipv6Addr::new(0xfd00, 1, 0, 0, 0, 0, 0, host as u16)
}

/// Returns an endpoint with an IPv6 address.
fn dual(network: &str, droplet: u64, host: u64) -> Endpoint {
    let mut endpoint = endpoint(network, droplet, host);
    if let Membership::Member(address) = &mut endpoint.membership {
        address.address6 = Some((address6(host), 64));
    }
    endpoint
}

pub(super) fn endpoint(network: &str, droplet: u64, host: u64) -> Endpoint {
    let address = Ipv4Addr::from(0x0a00_0000 + host as u32);
    Endpoint {
        network: network.into(),
        droplet: format!("d{droplet}"),
        previous: None,
        pod: Pod {
            namespace: "ns".into(),
            name: format!("p{host}"),
            uid: format!("u{host}"),
        },
        profile: None,
        asked: Bandwidth::default(),
        is_host: false,
        membership: Membership::Member(Address {
            address,
            prefix_length: 24,
            gateway: Ipv4Addr::new(10, 0, 0, 1),
            mac: MacAddr::of(address),
            address6: None,
        }),
        ready: false,
    }
}

/// Returns a VPC with 10.0.0.0/12 and nothing else.
pub(crate) fn vpc(number: u32) -> Vpc {
    Vpc {
        vni: vni(number),
        cidrs: vec!["10.0.0.0/12".into()],
        host_access: false,
        egress: false,
        reject: false,
        egress_rate: None,
        dscp: None,
        shared: Vec::new(),
    }
}

pub(super) fn network(vpc: &str, id: u32) -> Network {
    Network {
        vpc: vpc.into(),
        id: network_id(id),
        cidrs: vec!["10.0.0.0/24".into()],
        private: false,
        limits: Limits::default(),
    }
}

pub(super) fn divider(name: &str) -> RoleId<'_> {
    RoleId {
        kind: RoleKind::Divider,
        name,
        uid: "",
    }
}

pub(super) fn bouncer(name: &str) -> RoleId<'_> {
    RoleId {
        kind: RoleKind::Bouncer,
        ..divider(name)
    }
}

pub(super) fn serving(parent: &str, droplet: &str) -> Role {
    Role {
        parent: parent.into(),
        serves_on: Some(droplet.into()),
        placed_on: Some(droplet.into()),
        ..Role::default()
    }
}

/// Makes a world with one VPC and one network on `droplets` droplets, its bouncer and divider placed.
pub(super) fn small(droplets: u64) -> World {
    let mut world = World::default();
    for number in 0..droplets {
        world.set_droplet(&format!("d{number}"), Some(droplet_address(number)));
    }
    world.set_vpc("red", Some(vpc(7)));
    world.set_network("web", Some(network("red", 1)));
    world.set_role(RoleKind::Divider, "red-d0", Some(serving("red", "d0")));
    world.set_role(RoleKind::Bouncer, "web-b0", Some(serving("web", "d1")));
    world.flush();
    world
}

#[test]
fn new_endpoint_costs_bouncers_plus_one_rows_at_any_scale() {
    for make in [endpoint, dual] {
        for droplets in [3, 300] {
            let mut world = small(droplets);
            world.set_endpoint(&("ns".into(), "first".into()), Some(make("web", 2, 10)));
            world.flush();
            world.set_endpoint(&("ns".into(), "second".into()), Some(make("web", 2, 11)));
            let rows: usize = world.flush().values().map(BTreeMap::len).sum();
            assert_eq!(
                rows, 2,
                "one bouncer and the endpoint's own droplet, of {droplets}"
            );
        }
    }
}

#[test]
fn droplet_has_network_rows_only_while_it_has_endpoints() {
    let mut world = small(3);
    let name = ("ns".into(), "e".into());
    assert!(!world.program("d2").keys().any(|key| key.vni() == Some(vni(7))));
    world.set_endpoint(&name, Some(endpoint("web", 2, 10)));
    world.flush();
    let program = world.program("d2");
    assert!(
        program.contains_key(&Key::Vpc(vni(7))) && program.contains_key(&Key::Network(vni(7), network_id(1)))
    );
    world.set_endpoint(&name, None);
    world.flush();
    assert!(!world.program("d2").keys().any(|key| key.vni() == Some(vni(7))));
}

#[test]
fn a_subscriber_is_told_and_told_again_when_the_endpoint_goes() {
    let mut world = small(4);
    let name = ("ns".into(), "e".into());
    let address = IpAddr::from([10, 0, 0, 10]);
    assert!(world.subscribe("d3", vni(7), address, true));
    world.set_endpoint(&name, Some(endpoint("web", 2, 10)));
    let deltas = world.flush();
    assert!(matches!(
        deltas["d3"].get(&Key::Direct(vni(7), address)),
        Some(Some(_))
    ));
    world.set_endpoint(&name, None);
    let deltas = world.flush();
    assert_eq!(deltas["d3"].get(&Key::Direct(vni(7), address)), Some(&None));
}

#[test]
fn subscriptions_in_a_vpc_end_with_the_last_part_of_it() {
    let mut world = small(4);
    let (there, here) = (("ns".into(), "there".into()), ("ns".into(), "here".into()));
    let address = IpAddr::from([10, 0, 0, 10]);
    let key = Key::Direct(vni(7), address);
    world.set_endpoint(&there, Some(endpoint("web", 2, 10)));
    world.set_endpoint(&here, Some(endpoint("web", 3, 11)));
    world.flush();
    for droplet in ["d1", "d3"] {
        assert!(world.subscribe(droplet, vni(7), address, true));
    }
    world.flush();
    assert!(world.program("d1").contains_key(&key) && world.program("d3").contains_key(&key));
    world.set_endpoint(&here, None);
    let deltas = world.flush();
    assert_eq!(deltas["d3"].get(&key), Some(&None), "it lost its last endpoint");
    assert!(world.program("d1").contains_key(&key), "a bouncer stays");
    assert!(world.subscriptions_of("d3").is_empty());
    world.set_endpoint(&here, Some(endpoint("web", 3, 11)));
    world.flush();
    assert!(!world.program("d3").contains_key(&key), "it must ask again");
}

#[test]
fn equal_addresses_of_two_vpcs_never_share_a_row() {
    let mut world = small(3);
    world.set_vpc("blue", Some(vpc(8)));
    world.set_network("shop", Some(network("blue", 1)));
    world.set_role(RoleKind::Bouncer, "shop-b0", Some(serving("shop", "d1")));
    world.set_endpoint(&("r".into(), "e".into()), Some(endpoint("web", 2, 10)));
    world.set_endpoint(&("b".into(), "e".into()), Some(endpoint("shop", 0, 10)));
    world.flush();
    let program = world.program("d1");
    let address = IpAddr::from([10, 0, 0, 10]);
    assert_ne!(
        program[&Key::Bouncer(vni(7), address)],
        program[&Key::Bouncer(vni(8), address)]
    );
    assert!(
        world.is_used_on("d2", address)
            && world.is_used_on("d0", address)
            && !world.is_used_on("d1", address)
    );
}

#[test]
fn dual_stack_endpoint_has_one_local_and_one_bouncer_row() {
    let mut world = small(3);
    let name = ("ns".into(), "e".into());
    world.set_endpoint(&name, Some(dual("web", 2, 10)));
    world.flush();
    let key = IpAddr::from([10, 0, 0, 10]);
    let row = |droplet: &str, key: Key| world.program(droplet)[&key].unpack().row;
    let Some(row::Row::Local(local)) = row("d2", Key::Local(vni(7), key)) else {
        panic!("no local row")
    };
    let address = address6(10).octets().to_vec();
    assert_eq!((local.address6, local.prefix_length6), (address.clone(), 64));
    let Some(row::Row::Bouncer(bouncer)) = row("d1", Key::Bouncer(vni(7), key)) else {
        panic!("no bouncer row")
    };
    assert_eq!(bouncer.address6, address);
    assert_eq!(
        bouncer.address,
        thuban_api::identifiers::mapped(Ipv4Addr::new(10, 0, 0, 10))
    );
    let addresses = [key, address6(10).into()];
    for address in addresses {
        assert_eq!(world.holder(vni(7), address), Some(&name));
        assert!(world.is_used_on("d2", address) && !world.is_used_on("d1", address));
    }
    world.set_endpoint(&name, None);
    for address in addresses {
        assert_eq!(world.holder(vni(7), address), None);
        assert!(!world.is_used_on("d2", address));
    }
}

#[test]
fn each_address_of_an_endpoint_has_its_own_subscribers() {
    let mut world = small(5);
    let (v4, v6) = (IpAddr::from([10, 0, 0, 10]), IpAddr::from(address6(10)));
    let name = ("ns".into(), "e".into());
    assert!(
        world.subscribe("d3", vni(7), v6, true),
        "before there is an endpoint"
    );
    world.set_endpoint(&name, Some(dual("web", 2, 10)));
    world.flush();
    assert!(world.subscribe("d4", vni(7), v4, true), "and after");
    assert!(world.subscribe("d4", vni(7), v6, true));
    world.flush();
    let holds = |world: &World, droplet: &str, address| {
        world.program(droplet).contains_key(&Key::Direct(vni(7), address))
    };
    assert!(holds(&world, "d3", v6) && !holds(&world, "d3", v4));
    assert!(holds(&world, "d4", v6) && holds(&world, "d4", v4));
    world.subscribe("d4", vni(7), v6, false);
    let deltas = world.flush();
    assert_eq!(deltas["d4"].get(&Key::Direct(vni(7), v6)), Some(&None));
    assert!(holds(&world, "d4", v4));
    world.set_endpoint(&name, None);
    world.flush();
    assert!(!holds(&world, "d3", v6) && !holds(&world, "d4", v4));
}

#[test]
fn ipv6_ranges_are_sent_beside_the_ipv4_ones() {
    let mut world = small(2);
    let ranges: Vec<String> = vec!["10.0.0.0/12".into(), "fd00:1::/48".into()];
    world.set_vpc(
        "red",
        Some(Vpc {
            cidrs: ranges.clone(),
            ..vpc(7)
        }),
    );
    world.set_network(
        "web",
        Some(Network {
            cidrs: ranges,
            ..network("red", 1)
        }),
    );
    world.flush();
    let program = world.program("d1");
    let Some(row::Row::Vpc(vpc)) = program[&Key::Vpc(vni(7))].unpack().row else {
        panic!("no VPC row")
    };
    let Some(row::Row::Network(network)) = program[&Key::Network(vni(7), network_id(1))].unpack().row else {
        panic!("no network row")
    };
    assert_eq!(
        (vpc.cidrs, vpc.cidrs6),
        (vec!["10.0.0.0/12".to_owned()], vec!["fd00:1::/48".to_owned()])
    );
    assert_eq!((network.cidrs.len(), network.cidrs6.len()), (1, 1));
}

#[test]
fn a_network_becomes_private_on_all_its_droplets() {
    let mut world = small(4);
    world.set_endpoint(&("ns".into(), "e".into()), Some(endpoint("web", 2, 10)));
    let private = |world: &World, droplet: &str| {
        let row = world
            .program(droplet)
            .get(&Key::Network(vni(7), network_id(1)))?
            .unpack();
        match row.row {
            Some(row::Row::Network(row)) => Some(row.private),
            other => panic!("{other:?}"),
        }
    };
    for is_private in [false, true, false] {
        let web = Network {
            private: is_private,
            ..network("red", 1)
        };
        world.set_network("web", Some(web));
        world.flush();
        // The divider, the bouncer, and where the endpoint lives.
        for droplet in ["d0", "d1", "d2"] {
            assert_eq!(private(&world, droplet), Some(is_private), "{droplet}");
        }
        assert_eq!(private(&world, "d3"), None);
    }
}

/// Returns limits with this default in both directions.
fn limits(default: &str) -> Limits {
    let spec = serde_json::json!({
        "vpc": "red", "cidrs": [], "bandwidth": {"defaultEgress": default, "defaultIngress": default},
    });
    Limits::of(&serde_json::from_value(spec).unwrap())
}

#[test]
fn what_limits_a_pod_is_in_its_local_row_alone() {
    let mut world = small(4);
    let name = ("ns".to_owned(), "e".to_owned());
    let asking = |egress: Option<&str>, is_host| Endpoint {
        asked: Bandwidth {
            egress: egress.map(|rate| rate.parse().unwrap()),
            ingress: None,
        },
        is_host,
        ..endpoint("web", 2, 10)
    };
    let rates = |world: &mut World| {
        let deltas = world.flush();
        let rows: Vec<_> = deltas.values().flat_map(BTreeMap::keys).cloned().collect();
        let key = Key::Local(vni(7), Ipv4Addr::new(10, 0, 0, 10).into());
        match world.row("d2", &key).unwrap().unpack().row {
            Some(row::Row::Local(row)) => ([row.egress_rate, row.ingress_rate], rows == [key]),
            other => panic!("{other:?}"),
        }
    };
    world.set_endpoint(&name, Some(asking(None, false)));
    assert_eq!(rates(&mut world).0, [0, 0]);
    world.set_endpoint(&name, Some(asking(Some("10M"), false)));
    assert_eq!(rates(&mut world), ([1_250_000, 0], true));
    let web = Network {
        limits: limits("8M"),
        ..network("red", 1)
    };
    world.set_network("web", Some(web));
    assert_eq!(rates(&mut world), ([1_250_000, 1_000_000], true));
    world.set_endpoint(&name, Some(asking(None, false)));
    assert_eq!(rates(&mut world), ([1_000_000, 1_000_000], true));
    world.set_endpoint(&name, Some(asking(Some("10M"), true)));
    assert_eq!(rates(&mut world).0, [0, 0], "a node is not limited");
}

/// Applies the same objects to a new world at once.
fn from_scratch(world: &World) -> BTreeMap<String, BTreeMap<Key, PackedRow>> {
    let mut fresh = World::default();
    for (namespace, network) in &world.services.namespaces {
        fresh.set_namespace(namespace, Some(network));
    }
    for (name, service) in world.services.iter() {
        fresh.set_service(name, Some(service.clone()));
    }
    for (name, endpoint) in &world.endpoints {
        fresh.set_endpoint(name, Some(endpoint.clone()));
    }
    fresh.bouncers = world.bouncers.copy();
    fresh.dividers = world.dividers.copy();
    for (name, network) in &world.networks {
        fresh.set_network(name, Some(network.clone()));
    }
    for (name, vpc) in &world.vpcs {
        fresh.set_vpc(name, Some(vpc.clone()));
    }
    for (name, address) in &world.droplets {
        fresh.set_droplet(name, Some(*address));
        fresh.set_droplet6(name, world.droplets6.get(name).copied());
    }
    for name in &world.away {
        fresh.set_away(name, true);
    }
    for ((vni, address), droplets) in &world.subscriptions {
        for droplet in droplets {
            fresh.subscribe(droplet, *vni, *address, true);
        }
    }
    fresh.flush();
    programs(&fresh)
}

/// Returns all programs that are not empty.
fn programs(world: &World) -> BTreeMap<String, BTreeMap<Key, PackedRow>> {
    let names = world.programs.keys().chain(world.droplets.keys());
    let names = names.chain(world.shared.droplets());
    let all = names.map(|name| (name.clone(), world.program(name)));
    all.filter(|(_, program)| !program.is_empty()).collect()
}

#[test]
fn incremental_programs_and_deltas_match_a_full_rebuild() {
    let seed = std::env::var("THUBAN_SEED")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0x7468_7562_616e);
    println!("THUBAN_SEED={seed}");
    let mut random = Random(seed);
    let mut world = World::default();
    let mut mirror: BTreeMap<String, BTreeMap<Key, PackedRow>> = BTreeMap::new();
    for step in 0..3000 {
        random.change(&mut world);
        take(&mut mirror, world.flush());
        // NodePorts pass on at once, as if all droplets had acked.
        let over = world.begun_rests().into_iter().collect();
        world.end_rests(&over);
        take(&mut mirror, world.flush());
        assert!(
            world.flush().is_empty(),
            "step {step}: a second flush changes nothing"
        );
        mirror.retain(|_, program| !program.is_empty());
        assert_eq!(mirror, programs(&world), "step {step}: deltas");
        for (key, row) in mirror.values().flatten() {
            let read = Row::try_from(row.unpack()).map(|row| row.key());
            assert_eq!(
                read.as_ref(),
                Ok(key),
                "step {step}: a droplet could not read {row:?}"
            );
        }
        if step % 20 == 0 {
            assert_eq!(programs(&world), from_scratch(&world), "step {step}: incremental");
        }
    }
}

/// Applies what a flush has changed.
fn take(mirror: &mut BTreeMap<String, BTreeMap<Key, PackedRow>>, changes: BTreeMap<String, Delta>) {
    for (droplet, delta) in changes {
        let program = mirror.entry(droplet).or_default();
        for (key, row) in delta {
            match row {
                Some(row) => program.insert(key, row),
                None => program.remove(&key),
            };
        }
    }
}

#[test]
fn an_endpoint_that_moved_is_followed_until_it_is_settled() {
    let mut world = small(4);
    let name = ("ns".into(), "e".into());
    let address = IpAddr::from([10, 0, 0, 10]);
    let mut moved = endpoint("web", 3, 10);
    moved.previous = Some("d2".into());
    world.set_endpoint(&name, Some(moved.clone()));
    world.flush();
    let Some(row::Row::Forward(forward)) = world.program("d2")[&Key::Forward(vni(7), address)].unpack().row
    else {
        panic!("no forward row")
    };
    assert_eq!(forward.droplet, droplet_address(3).octets());
    let Some(row::Row::Local(local)) = world.program("d3")[&Key::Local(vni(7), address)].unpack().row else {
        panic!("no local row")
    };
    assert_eq!(local.moved_from, droplet_address(2).octets());
    let rows = world.endpoint_rows(&name);
    assert!(
        rows.iter().all(|(droplet, _)| droplet != "d2"),
        "nobody waits for the old droplet"
    );
    moved.previous = None;
    world.set_endpoint(&name, Some(moved));
    world.flush();
    assert!(!world.program("d2").contains_key(&Key::Forward(vni(7), address)));
}

#[test]
fn direct_rows_do_not_lead_to_a_droplet_that_is_away() {
    let mut world = small(4);
    let address = IpAddr::from([10, 0, 0, 10]);
    world.subscribe("d3", vni(7), address, true);
    world.set_endpoint(&("ns".into(), "e".into()), Some(endpoint("web", 2, 10)));
    world.flush();
    let key = Key::Direct(vni(7), address);
    assert!(world.program("d3").contains_key(&key));
    world.set_away("d2", true);
    assert_eq!(world.flush()["d3"].get(&key), Some(&None));
    assert!(
        world.program("d1").contains_key(&Key::Bouncer(vni(7), address)),
        "bouncers go on"
    );
    world.set_away("d2", false);
    world.flush();
    assert!(world.program("d3").contains_key(&key));
}

#[test]
fn a_bouncer_is_filled_before_it_is_published() {
    let mut world = small(4);
    world.set_endpoint(&("ns".into(), "e".into()), Some(endpoint("web", 2, 10)));
    world.flush();
    let listed = |world: &World, droplet: &str| match &world.program(droplet)
        [&Key::Network(vni(7), network_id(1))]
        .unpack()
        .row
    {
        Some(row::Row::Network(network)) => (network.bouncers.len(), network.bouncer_here),
        other => panic!("{other:?}"),
    };
    let role = Role {
        serves_on: None,
        ..serving("web", "d3")
    };
    world.set_role(RoleKind::Bouncer, "web-b1", Some(role));
    world.flush();
    assert_eq!(
        (listed(&world, "d2"), listed(&world, "d3")),
        ((1, false), (1, true))
    );
    let tables = world.role_tables(RoleKind::Bouncer, "web", "d3");
    let address = IpAddr::from([10, 0, 0, 10]);
    for key in [
        Key::Bouncer(vni(7), address),
        Key::Network(vni(7), network_id(1)),
        Key::Vpc(vni(7)),
    ] {
        assert!(tables.contains(&("d3".to_owned(), key)));
    }
    world.publish_role(bouncer("web-b1"));
    world.flush();
    assert_eq!(listed(&world, "d2"), (2, false));
    world.unpublish_role(bouncer("web-b1"));
    world.flush();
    assert_eq!(
        (listed(&world, "d2"), listed(&world, "d3")),
        ((1, false), (1, true))
    );
    assert!(world.program("d3").contains_key(&Key::Bouncer(vni(7), address)));
    world.purge_role(bouncer("web-b1"));
    world.flush();
    assert!(!world.program("d3").contains_key(&Key::Bouncer(vni(7), address)));
}
