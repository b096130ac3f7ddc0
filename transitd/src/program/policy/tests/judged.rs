//! Rows and entries say the same of every packet.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fastrand::Rng;
use thuban_common::policy::point;
use thuban_rows::{Class, PolicyId, PolicySet};

use super::super::{Outside, Points, PolicyTables};
use super::maps::Maps;
use super::oracle::{self, Packet, Peer};
use super::random::{self, one, seeded};
use super::{VNI, by_maps, id};

const DECISIONS: usize = 100_000;
/// Decisions by each world of rows.
const OF_A_WORLD: usize = 200;

pub struct World {
    pub classes: Vec<Class>,
    pub sets: Vec<PolicySet>,
}

impl World {
    fn new(random: &mut Rng) -> Self {
        let count = random.u32(1..6);
        Self {
            classes: (2..random.u32(2..8))
                .map(|n| random::class(random, VNI, id(n)))
                .collect(),
            sets: (1..=count).map(|n| random::set(random, VNI, id(n))).collect(),
        }
    }
}

/// Returns a packet of a class, known or not, or from outside, and the class that its stamp says.
pub fn packet<'a>(
    random: &mut Rng,
    classes: impl Iterator<Item = &'a Class>,
    plain: &'a Class,
) -> (Packet<'a>, u32) {
    let address = random::address(random);
    let (mut protocol, mut port) = random::port_of_packet(random);
    let classes: Vec<&Class> = classes.chain([plain]).collect();
    let (peer, class) = if !random::ranges().iter().any(|range| range.contains(&address)) {
        (Peer::Outside, 0)
    } else if random.u32(..4) == 0 {
        (Peer::Unknown, one(random, &[0, 99]))
    } else {
        let class = one(random, &classes);
        let names: Vec<_> = class.names.iter().collect();
        if !names.is_empty() && random.bool() {
            let named = one(random, &names);
            (protocol, port) = (named.protocol, named.port);
        }
        (Peer::Class(class), class.id.get())
    };
    let packet = Packet {
        peer,
        address,
        protocol,
        port,
    };
    (packet, class)
}

#[test]
fn rows_and_entries_say_the_same_of_every_packet() {
    let mut random = seeded();
    let plain = super::super::entries::plain(VNI);
    let (mut said, mut sizes) = (BTreeSet::new(), BTreeSet::new());
    for _ in 0..DECISIONS / OF_A_WORLD {
        let World { classes, mut sets } = World::new(&mut random);
        let mut tables = PolicyTables::default();
        let knows_ranges = random.u32(..4) != 0;
        let mut late = classes.clone();
        random.shuffle(&mut sets);
        let early = late.split_off(random.usize(..=late.len()));
        tables.set_ranges(VNI, knows_ranges.then(random::ranges).as_deref());
        for class in early {
            tables.put_class(class).unwrap();
        }
        for set in &sets {
            tables.put_set(set.clone()).unwrap();
        }
        for class in late {
            tables.put_class(class).unwrap();
        }
        let mut maps = Maps::default();
        maps.apply_all(&tables.flush().0);
        assert_eq!(tables.full().chain(tables.lacking()).count(), 0);
        for grant in maps.grants.values() {
            sizes.insert(maps.ranges(grant.list).len());
        }
        for _ in 0..OF_A_WORLD {
            let set = one(&mut random, &sets);
            let (packet, class) = packet(&mut random, classes.iter(), &plain);
            let expected = oracle::judge(&set, packet);
            assert_eq!(
                by_maps(&maps, &set, packet, class),
                expected,
                "{packet:?} {set:#?}"
            );
            let peer = match packet.peer {
                Peer::Class(_) => "class",
                Peer::Unknown => "unknown",
                Peer::Outside => "outside",
            };
            said.insert((peer, set.is_isolated, expected.0));
        }
    }
    assert!(sizes.range(11..=100).next().is_some() && sizes.range(101..).next().is_some());
    assert_eq!(said.len(), 3 * 2 * 2, "what can be said: {said:?}");
}

/// Returns whether the ranges for the node's own stack let a packet from outside pass.
fn by_ranges(outside: &Outside, packet: Packet<'_>) -> bool {
    let holds = |(first, last, _): &&(IpAddr, IpAddr, Points)| {
        first.is_ipv4() == packet.address.is_ipv4() && (*first..=*last).contains(&packet.address)
    };
    let mut found = outside.ranges.iter().filter(holds);
    let points = found.next().map_or(&outside.rest, |(.., points)| points);
    assert!(found.next().is_none(), "disjoint: {:?}", outside.ranges);
    let point = point(packet.protocol, packet.port);
    points
        .iter()
        .any(|(first, last)| (*first..=*last).contains(&point))
}

#[test]
fn rows_and_ranges_for_the_stack_say_the_same_of_whom_outside() {
    let mut random = seeded();
    let mut said = BTreeSet::new();
    for _ in 0..DECISIONS / OF_A_WORLD {
        let sets = World::new(&mut random).sets;
        let mut tables = PolicyTables::default();
        for set in &sets {
            tables.put_set(set.clone()).unwrap();
        }
        for _ in 0..OF_A_WORLD {
            let set = one(&mut random, &sets);
            let outside = tables.outside(VNI, set.id).unwrap();
            let (protocol, port) = random::port_of_packet(&mut random);
            let packet = Packet {
                peer: Peer::Outside,
                address: random::address(&mut random),
                protocol,
                port,
            };
            let expected = oracle::judge(&set, packet).0;
            assert_eq!(
                by_ranges(&outside, packet),
                expected,
                "{packet:?} {set:#?} {outside:#?}"
            );
            said.insert((set.is_isolated, outside.ranges.len().min(3), expected));
        }
    }
    assert_eq!(said.len(), 2 * 4 * 2, "what can be said: {said:?}");
}

#[test]
fn a_set_says_nothing_of_other_vpcs_and_other_sets() {
    let mut random = seeded();
    let plain = super::super::entries::plain(VNI);
    let mut tables = PolicyTables::default();
    let mut accept = random::set(&mut random, VNI, id(1));
    accept.is_isolated = false;
    accept.rules.clear();
    tables.put_set(accept.clone()).unwrap();
    let mut maps = Maps::default();
    maps.apply_all(&tables.flush().0);
    let (packet, class) = packet(&mut random, [].iter(), &plain);
    assert!(by_maps(&maps, &accept, packet, class).0);
    let other = |vni, id: PolicyId| PolicySet {
        vni,
        id,
        ..accept.clone()
    };
    let vni = thuban_rows::builders::vni(8);
    assert!(!by_maps(&maps, &other(vni, id(1)), packet, class).0);
    assert!(!by_maps(&maps, &other(VNI, id(2)), packet, class).0);
}
