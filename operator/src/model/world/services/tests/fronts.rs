//! Tests of what droplets are told of a service's fronts.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use thuban_api::{MAX_VIP_MEMBERS, MemberState};
use thuban_rows::builders::{health_check, vni};
use thuban_rows::{Backend, Front, Row};

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

/// Returns the service of [`fronted`] with a check.
fn checked() -> Service {
    Service {
        check: Some(health_check()),
        ..fronted("1")
    }
}

/// Has a droplet say of 10.0.0.x whether it fails.
fn say(world: &mut World, droplet: &str, last: u8, fails: bool) {
    let why = fails.then(|| "the pod refuses the connection".to_owned());
    world.note_check(droplet, (vni(8), FRONT), IpAddr::from([10, 0, 0, last]), why);
}

/// Returns the backends that rest, and how many droplets were told so.
fn resting(world: &mut World) -> (Vec<String>, usize) {
    world.follow_checks(0);
    let deltas = world.flush().len();
    let port = told(world, 4, 8).unwrap().ports.remove(0);
    assert_eq!(port.backends.len(), 2, "droplets go on checking them");
    (port.resting.iter().map(ToString::to_string).collect(), deltas)
}

#[test]
fn backends_that_fail_their_check_rest_if_there_are_others() {
    let mut world = shared();
    world.set_service(&name("s"), Some(checked()));
    world.flush();
    assert_eq!(told(&world, 0, 8).unwrap().check, Some(health_check()));
    let [second, third] = ["10.0.0.20", "10.0.0.30"].map(str::to_owned);
    say(&mut world, "d2", 20, true);
    assert!(world.flush().is_empty(), "rows follow in their own time");
    assert_eq!(resting(&mut world), (vec![second.clone()], 5));
    say(&mut world, "d2", 20, true);
    assert_eq!(resting(&mut world).1, 0, "nothing new");
    say(&mut world, "d3", 30, true);
    assert_eq!(resting(&mut world), (Vec::new(), 5), "all fail");
    say(&mut world, "d2", 20, false);
    assert_eq!(resting(&mut world), (vec![third.clone()], 5));
    // With a backend on a suspect droplet nobody is left.
    world.set_suspects(["d2".to_owned()].into());
    assert_eq!(resting(&mut world), (Vec::new(), 5));
    world.set_suspects(BTreeSet::new());
    assert_eq!(resting(&mut world), (vec![third], 5));
    world.set_service(&name("s"), Some(fronted("1")));
    assert_eq!(resting(&mut world).0, [""; 0], "nothing is checked any more");
    world.set_service(&name("s"), Some(checked()));
    assert_eq!(resting(&mut world).0, [""; 0], "nothing is known yet");
}

#[test]
fn a_failure_that_its_droplet_does_not_repeat_is_forgotten() {
    let mut world = shared();
    world.set_service(&name("s"), Some(checked()));
    world.flush();
    let later = |world: &mut World, second: u64, is_connected: bool| {
        world.forget_unrepeated(second * 1000, |droplet| droplet == "d2" && is_connected);
        resting(world).0
    };
    for second in [0, 60, 120] {
        say(&mut world, "d2", 20, true);
        assert_eq!(later(&mut world, second, true), ["10.0.0.20"]);
    }
    assert_eq!(later(&mut world, 209, true), ["10.0.0.20"]);
    // While the droplet is away it can say nothing.
    assert_eq!(later(&mut world, 300, false), ["10.0.0.20"]);
    assert_eq!(later(&mut world, 301, true), ["10.0.0.20"]);
    assert_eq!(later(&mut world, 390, true), ["10.0.0.20"]);
    assert_eq!(later(&mut world, 391, true), [""; 0]);
}

#[test]
fn a_change_that_waits_is_made_with_the_latest_state() {
    let mut world = shared();
    world.set_service(&name("s"), Some(checked()));
    world.flush();
    let follow = |world: &mut World, second: u64| {
        world.follow_checks(second * 1000);
        !world.flush().is_empty()
    };
    for second in 0..5 {
        say(&mut world, "d2", 20, second % 2 == 0);
        assert!(follow(&mut world, second), "change {second}");
    }
    say(&mut world, "d2", 20, false);
    assert!(!follow(&mut world, 5), "too many");
    say(&mut world, "d2", 20, true);
    assert!(!follow(&mut world, 11), "the rows say so already");
    say(&mut world, "d3", 30, true);
    say(&mut world, "d2", 20, false);
    assert!(follow(&mut world, 12), "nothing was spent for nothing");
    say(&mut world, "d2", 20, true);
    say(&mut world, "d3", 30, false);
    assert!(!follow(&mut world, 13));
    assert!(!follow(&mut world, 19));
    // Another change of the world does not make it early.
    world.set_suspects(["d0".to_owned()].into());
    world.set_droplet("d5", Some(droplet_address(5)));
    world.flush();
    let of_front = |world: &World| {
        let port = told(world, 4, 8).unwrap().ports.remove(0);
        port.resting.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(of_front(&world), ["10.0.0.30"]);
    assert!(follow(&mut world, 20), "nothing more was said");
    assert_eq!(of_front(&world), ["10.0.0.20"]);
}

/// Returns the service of [`checked`] in another network, with no other address than 203.0.113.x.
fn checked_at(last: u8, network: &str) -> Service {
    let front = IpAddr::from([203, 0, 113, last]);
    let ports = checked().fronts.remove(0).1;
    Service {
        network: network.into(),
        tables: Vec::new(),
        exposed: Vec::new(),
        outside: vec![front],
        fronts: vec![(front, ports)],
        ..checked()
    }
}

#[test]
fn many_services_of_a_vpc_change_rows_in_turn() {
    let mut world = shared();
    for last in 1..=100 {
        world.set_service(&name(&format!("s{last}")), Some(checked_at(last, "blue")));
    }
    world.set_service(&name("z"), Some(checked_at(101, "green")));
    world.flush();
    let say = |world: &mut World, last: u8, of: u32, fails: bool| {
        let why = fails.then(|| "the pod refuses the connection".to_owned());
        let front = (vni(of), IpAddr::from([203, 0, 113, last]));
        world.note_check("d2", front, IpAddr::from([10, 0, 0, 20]), why);
    };
    let follow = |world: &mut World, second: u64| {
        world.follow_checks(second * 1000);
        world.flush().get("d4").map_or(0, BTreeMap::len)
    };
    for last in 1..=100 {
        say(&mut world, last, 8, true);
    }
    assert_eq!(follow(&mut world, 0), 50);
    say(&mut world, 101, 9, true);
    assert_eq!(follow(&mut world, 0), 1, "another VPC's does not wait");
    // The first service alternates. Those that wait come before it.
    let rests = |world: &World| {
        let key = Key::Front(vni(8), IpAddr::from([203, 0, 113, 1]));
        let row = world.row("d4", &key).unwrap().unpack();
        matches!(Row::try_from(row), Ok(Row::Front(front)) if !front.ports[0].resting.is_empty())
    };
    say(&mut world, 1, 8, false);
    assert_eq!((follow(&mut world, 40), rests(&world)), (40, true));
    assert_eq!((follow(&mut world, 50), rests(&world)), (10, true));
    assert_eq!((follow(&mut world, 51), rests(&world)), (1, false));
    assert_eq!(follow(&mut world, 1000), 0);
}

#[test]
fn a_droplet_is_heard_of_its_own_backends_alone() {
    let mut world = shared();
    world.set_service(&name("s"), Some(checked()));
    world.flush();
    say(&mut world, "d3", 20, true);
    say(&mut world, "d2", 40, true);
    let backend = IpAddr::from([10, 0, 0, 20]);
    for front in [(vni(7), FRONT), (vni(8), backend)] {
        world.note_check("d2", front, backend, Some("forged".to_owned()));
    }
    assert_eq!(resting(&mut world), (Vec::new(), 0));
    say(&mut world, "d2", 20, true);
    assert_eq!(resting(&mut world).0, ["10.0.0.20"]);
    // The backend moves to another droplet, which has said nothing of it.
    let mut moved = checked();
    moved.homes.insert(backend, "d3".into());
    world.set_service(&name("s"), Some(moved));
    assert_eq!(resting(&mut world).0, [""; 0]);
}

#[test]
fn a_vip_says_why_members_get_no_connections() {
    let mut world = shared();
    let taken = |world: &mut World| {
        world.follow_checks(0);
        let mut taken = world.take_unwritten_members(9);
        assert!(taken.len() <= 1);
        taken.pop().map(|(of, members)| {
            assert_eq!(of, ("ns".to_owned(), "web".to_owned()));
            members
        })
    };
    world.set_service(&name("s"), Some(checked()));
    let members = taken(&mut world).unwrap();
    assert_eq!((members.count, members.failing, members.listed.len()), (2, 0, 2));
    assert_eq!(taken(&mut world), None, "nothing is news");
    say(&mut world, "d3", 30, true);
    world.set_suspects(["d2".to_owned()].into());
    let members = taken(&mut world).unwrap();
    assert_eq!((members.count, members.failing), (2, 1));
    let [failing, suspect] = &members.listed[..] else {
        panic!("{members:?}");
    };
    assert_eq!(
        (failing.address.as_str(), failing.state),
        ("10.0.0.30", MemberState::Failing)
    );
    assert_eq!(
        (failing.droplet.as_str(), failing.why.as_str()),
        ("d3", "the pod refuses the connection")
    );
    assert_eq!(
        (suspect.address.as_str(), suspect.state),
        ("10.0.0.20", MemberState::Suspect)
    );
    world.set_service(&name("s"), None);
    assert_eq!(taken(&mut world).unwrap().count, 0, "the Service is gone");
}

#[test]
fn a_vip_lists_the_members_that_fail_first() {
    let mut world = shared();
    let mut large = checked();
    let addresses = (1..=100_u8).map(|last| IpAddr::from([10, 0, 0, last]));
    let port = &mut large.fronts[0].1[0];
    let number = port.backends.iter().next().unwrap().port;
    port.backends = addresses
        .clone()
        .map(|address| Backend {
            address,
            port: number,
        })
        .collect();
    large.homes = addresses.map(|address| (address, "d2".to_owned())).collect();
    world.set_service(&name("s"), Some(large));
    for last in 81..=100 {
        say(&mut world, "d2", last, true);
    }
    world.follow_checks(0);
    let (_, members) = world.take_unwritten_members(1).remove(0);
    assert_eq!((members.count, members.failing), (100, 20));
    assert_eq!(members.listed.len(), MAX_VIP_MEMBERS);
    let is_failing = |member: &&thuban_api::VipMember| member.state == MemberState::Failing;
    assert_eq!(members.listed.iter().take_while(is_failing).count(), 20);
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
fn a_droplet_without_tunnels_ends_fronts_of_that_mode_alone() {
    let mut world = shared();
    let tunnel = Service {
        tunnel: true,
        ..fronted("1")
    };
    world.set_service(&name("s"), Some(tunnel));
    world.set_tunnelling("unknown", false);
    world.flush();
    assert!(told(&world, 0, 8).unwrap().tunnel);
    world.set_tunnelling("d4", false);
    world.flush();
    assert!(
        holders(&world, 8).is_empty(),
        "nodes' own stacks serve the address"
    );
    world.set_service(&name("s"), Some(fronted("1")));
    world.flush();
    assert_eq!(holders(&world, 8).len(), 5);
    assert!(!told(&world, 4, 8).unwrap().tunnel);
    let tunnel = Service {
        tunnel: true,
        ..fronted("1")
    };
    world.set_service(&name("s"), Some(tunnel));
    world.set_tunnelling("d4", true);
    world.flush();
    assert!(told(&world, 4, 8).unwrap().tunnel);
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

#[test]
fn vips_that_change_all_the_time_hold_up_no_others() {
    let mut world = shared();
    let of = |name: &str| (name.to_owned(), "web".to_owned());
    let take = |world: &mut World| {
        // These change again and again.
        for name in ["a", "b"] {
            world.give_members_back(of(name));
        }
        let taken = world.take_unwritten_members(2).into_iter();
        taken.map(|(name, _)| name.0).collect::<Vec<_>>()
    };
    world.take_unwritten_members(9);
    world.give_members_back(of("z"));
    let taken = [take(&mut world), take(&mut world)].concat();
    assert!(taken.contains(&"z".to_owned()), "{taken:?}");
}
