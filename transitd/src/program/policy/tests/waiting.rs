//! Sets and classes that wait for room.

use std::net::Ipv4Addr;

use thuban_common::policy::of_vpc;
use thuban_rows::{PolicyPorts, PolicyRule, PolicySet};

use super::super::{NoRoom, PolicyTables, Usage};
use super::directed::{apply, class, of_block, of_group, rule, set};
use super::maps::Maps;
use super::{VNI, id};
use crate::dataplane::policy::{GRANTS, LISTS};

const TCP: u8 = 6;

fn full(tables: &PolicyTables) -> Vec<u32> {
    tables.full().map(|((_, id), _)| id.get()).collect()
}

/// Whether set 2 accepts packets of a class.
fn accepts(maps: &Maps, class: u32) -> bool {
    let (set, peer) = (of_vpc(VNI.get(), 2), of_vpc(VNI.get(), class));
    maps.judge(set, peer, [0; 16], 0).0
}

fn of_port(number: u32, port: u16) -> PolicySet {
    let anyone = PolicyRule {
        anyone: true,
        ports: vec![PolicyPorts::Range(TCP, port, port)],
        ..rule()
    };
    set(number, vec![anyone])
}

/// Returns a set of blocks for each of which it compares as many spans.
fn nested(number: u32, blocks: u32) -> PolicySet {
    let wide = |_| PolicyRule {
        ports: vec![PolicyPorts::Range(TCP, 1, 1)],
        ..of_block("0.0.0.0/0", &[])
    };
    let narrow = |n: u32| of_block(&format!("{}/32", Ipv4Addr::from_bits(n)), &[]);
    set(
        number,
        (0..blocks).map(wide).chain((0..blocks).map(narrow)).collect(),
    )
}

#[test]
fn a_class_without_room_leaves_the_others_as_they_are() {
    let capacity = Usage {
        grants: 16,
        ..Usage::CAPACITY
    };
    let (mut tables, mut maps) = (PolicyTables::new(capacity), Maps::default());
    for number in [3, 4] {
        tables.put_class(class(number, 1)).unwrap();
    }
    tables.put_set(set(2, vec![of_group(1)])).unwrap();
    tables.put_class(class(5, 1)).unwrap();
    apply(&mut maps, &mut tables);
    let lacking: Vec<_> = tables.lacking().collect();
    assert_eq!(lacking, [((VNI, id(2)), NoRoom::Share(GRANTS))]);
    assert!(full(&tables).is_empty());
    assert!(accepts(&maps, 3) && accepts(&maps, 4) && !accepts(&maps, 5));
    tables.remove_class(VNI, id(3));
    apply(&mut maps, &mut tables);
    assert_eq!(tables.lacking().count(), 0);
    assert!(!accepts(&maps, 3) && accepts(&maps, 4) && accepts(&maps, 5));
}

#[test]
fn a_class_without_room_that_goes_is_not_missed() {
    let capacity = Usage {
        grants: 16,
        ..Usage::CAPACITY
    };
    let (mut tables, mut maps) = (PolicyTables::new(capacity), Maps::default());
    tables.put_set(set(2, vec![of_group(1)])).unwrap();
    for number in [3, 4, 5] {
        tables.put_class(class(number, 1)).unwrap();
    }
    apply(&mut maps, &mut tables);
    assert_eq!(tables.lacking().count(), 1);
    tables.remove_class(VNI, id(5));
    apply(&mut maps, &mut tables);
    assert_eq!(tables.lacking().count(), 0, "though nothing was freed");
    assert!(accepts(&maps, 3) && accepts(&maps, 4));
}

#[test]
fn a_restart_without_room_for_a_new_class_tears_nothing_down() {
    let capacity = Usage {
        grants: 20,
        ..Usage::CAPACITY
    };
    let (mut tables, mut maps) = (PolicyTables::new(capacity), Maps::default());
    // The new class is the first one by its id.
    for number in [4, 5, 6] {
        tables.put_class(class(number, 1)).unwrap();
    }
    tables.put_set(set(2, vec![of_group(1)])).unwrap();
    apply(&mut maps, &mut tables);
    let mut tables = PolicyTables::import(capacity, maps.entries());
    for number in [3, 4, 5, 6] {
        tables.put_class(class(number, 1)).unwrap();
    }
    tables.put_set(set(2, vec![of_group(1)])).unwrap();
    assert_eq!(tables.flush().0, []);
    assert_eq!((tables.full().count(), tables.lacking().count()), (0, 1));
    assert!(!accepts(&maps, 3) && accepts(&maps, 4) && accepts(&maps, 5) && accepts(&maps, 6));
}

#[test]
fn a_set_that_is_too_large_by_itself_is_not_tried_again() {
    let mut tables = PolicyTables::default();
    tables.put_class(class(3, 1)).unwrap();
    tables.put_set(nested(2, 800)).unwrap();
    tables.put_set(set(3, vec![of_group(1)])).unwrap();
    assert_eq!(tables.full().collect::<Vec<_>>(), [((VNI, id(2)), NoRoom::Set)]);
    tables.remove_class(VNI, id(3));
    tables.flush();
    tables.remove_set(VNI, id(3));
    tables.flush();
    assert_eq!((full(&tables), tables.tried), (vec![2], None));
}

#[test]
fn a_set_of_more_than_a_share_is_too_large_by_itself() {
    let few_blocks = Usage {
        blocks: 40,
        ..Usage::CAPACITY
    };
    let few_lists = Usage {
        lists: 40,
        ..Usage::CAPACITY
    };
    for capacity in [few_blocks, few_lists] {
        let mut tables = PolicyTables::new(capacity);
        tables.put_set(nested(2, 20)).unwrap();
        assert_eq!(tables.full().collect::<Vec<_>>(), [((VNI, id(2)), NoRoom::Set)]);
    }
}

#[test]
fn a_flush_compiles_no_more_than_one_large_set() {
    let capacity = Usage {
        blocks: 4 * 1000,
        ..Usage::CAPACITY
    };
    let (mut tables, mut maps) = (PolicyTables::new(capacity), Maps::default());
    for number in 2..6 {
        tables.put_set(nested(number, 400)).unwrap();
    }
    apply(&mut maps, &mut tables);
    assert_eq!(full(&tables), [4, 5], "two have 802 blocks");
    tables.remove_set(VNI, id(2));
    tables.remove_set(VNI, id(3));
    apply(&mut maps, &mut tables);
    assert_eq!(full(&tables), [5]);
    apply(&mut maps, &mut tables);
    assert!(full(&tables).is_empty());
}

#[test]
fn it_is_told_when_a_grace_that_ends_makes_room() {
    let capacity = Usage {
        lists: 4,
        ..Usage::CAPACITY
    };
    let (mut tables, mut maps) = (PolicyTables::new(capacity), Maps::default());
    tables.put_set(of_port(2, 80)).unwrap();
    tables.put_set(of_port(3, 81)).unwrap();
    apply(&mut maps, &mut tables);
    tables.remove_set(VNI, id(2));
    let retired = apply(&mut maps, &mut tables);
    let share = NoRoom::Share(LISTS);
    assert_eq!(tables.full().collect::<Vec<_>>(), [((VNI, id(3)), share)]);
    let before = tables.full_changes();
    apply(&mut maps, &mut tables);
    assert_eq!(tables.full_changes(), before);
    tables.expire(retired);
    apply(&mut maps, &mut tables);
    assert!(full(&tables).is_empty());
    assert_ne!(tables.full_changes(), before);
}
