//! The tables of network policy in the kernel, without a daemon: a transitd that ended at any change.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use thuban_common::policy::{BlockKey, Grant, GrantKey, ListEntry, ListKey, of_vpc};
use thuban_proto::transit as proto;
use thuban_rows::{Row, builders};
use transitd::dataplane::policy::{Change, PolicyMaps};
use transitd::program::policy::PolicyTables;
use transitd::state::policies::Policies;

use crate::policy_rows::{class, set};
use crate::service_tables::Pinned;

fn rows(of: Vec<proto::row::Row>) -> Vec<Row> {
    let read = |row| Row::try_from(proto::Row { row: Some(row) }).unwrap();
    of.into_iter().map(read).collect()
}

/// Returns the changes by which the rows come to empty maps.
fn changes(of: Vec<Row>) -> Vec<Change> {
    let mut tables = PolicyTables::default();
    for row in of {
        match row {
            Row::Class(class) => tables.put_class(class).unwrap(),
            Row::PolicySet(set) => tables.put_set(set).unwrap(),
            other => panic!("{other:?}"),
        }
    }
    tables.flush().0
}

/// What the grants say, whatever numbers the lists have.
type Said = BTreeMap<GrantKey, (u32, Vec<u32>)>;

fn said(pinned: &Pinned) -> (Said, usize) {
    let lists = pinned.map::<ListKey, ListEntry>("LISTS");
    let content = |list: u32| match list {
        0 => vec![],
        list => {
            let part = lists.get(&ListKey { list, part: 0 }, 0).unwrap();
            part.ranges.iter().map(|range| range.first).collect()
        }
    };
    let grants = pinned.map::<GrantKey, Grant>("GRANTS");
    let grants = grants.iter().map(|entry| {
        let (key, grant): (GrantKey, Grant) = entry.unwrap();
        let grant = grant.read(&key).unwrap();
        (key, (grant.flags, content(grant.list)))
    });
    (grants.collect(), lists.keys().count())
}

fn set_all(policies: &mut Policies, of: &[Row]) {
    for row in of {
        policies.set(row.clone()).unwrap();
    }
    policies.remove_strangers();
    policies.write().unwrap();
}

#[test]
fn a_transitd_that_ended_at_any_change_is_made_good() {
    let pinned = Pinned::new("SLOTS", 1024);
    let earlier = rows(vec![class(3, 11), set(4, 11, 80), set(5, 11, 81)]);
    let later = rows(vec![class(3, 11), class(8, 11), set(4, 11, 80), set(6, 11, 82)]);
    let all = changes(earlier);
    let mut wanted = None;
    for made in (0..=all.len()).rev() {
        let (mut maps, _) = PolicyMaps::open(&pinned.maps).unwrap();
        maps.apply(all[..made].to_vec()).unwrap();
        drop(maps);
        let mut policies = Policies::open(&pinned.maps).unwrap();
        set_all(&mut policies, &later);
        let (grants, _) = said(&pinned);
        let wanted = wanted.get_or_insert_with(|| grants.clone());
        assert_eq!(&grants, wanted, "after {made} changes");
        assert_eq!(grants.len(), 2 * 4);
        drop(policies);
        clear(&pinned);
    }
}

#[test]
fn lists_that_an_earlier_transitd_left_go_after_a_grace() {
    let pinned = Pinned::new("SLOTS", 1024);
    let kept = rows(vec![class(3, 11), set(4, 11, 80)]);
    let (mut maps, _) = PolicyMaps::open(&pinned.maps).unwrap();
    maps.apply(changes(rows(vec![class(3, 11), set(4, 11, 80), set(5, 11, 81)])))
        .unwrap();
    drop(maps);
    let mut policies = Policies::open(&pinned.maps).unwrap();
    set_all(&mut policies, &kept);
    assert_eq!(said(&pinned).1, 3);
    policies.expire().unwrap();
    assert_eq!(said(&pinned).1, 3, "a program may still read it");
    std::thread::sleep(std::time::Duration::from_millis(1100));
    policies.expire().unwrap();
    assert_eq!(said(&pinned).1, 2);
    // What is in use doesn't go. The next start finds the same.
    let before = said(&pinned);
    drop(policies);
    let mut policies = Policies::open(&pinned.maps).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(1100));
    policies.expire().unwrap();
    assert_eq!(said(&pinned), before);
    assert_eq!(policies.usage().grants, 3);
    policies.remove(&Row::PolicySet(builders::policy_set()).key());
    policies.remove_strangers();
    policies.write().unwrap();
    assert!(said(&pinned).0.is_empty());
}

#[test]
fn what_a_snapshot_does_not_name_goes_after_a_while() {
    let pinned = Pinned::new("SLOTS", 1024);
    let earlier = rows(vec![class(3, 11), class(8, 11), set(4, 11, 80), set(5, 11, 81)]);
    let mut policies = Policies::open(&pinned.maps).unwrap();
    set_all(&mut policies, &earlier);
    let all = said(&pinned).0;
    // The snapshot names a class and a set, and later the other class.
    let [_, second_class, _, second_set] = [0, 1, 2, 3].map(|row| earlier[row].key());
    policies.linger(&[second_class, second_set]);
    policies.set(earlier[1].clone()).unwrap();
    let mut grants_at = |is_kept, seconds: u64| {
        let now = Instant::now() + Duration::from_secs(seconds);
        policies.end_lingering(is_kept, now);
        policies.write().unwrap();
        said(&pinned).0
    };
    assert_eq!(grants_at(false, 0), all);
    // Endpoints keep what an earlier operator told of.
    assert_eq!(grants_at(true, 40), all);
    assert_eq!(grants_at(false, 60), all, "20 s later");
    let rest = grants_at(false, 80);
    assert_eq!(
        rest,
        all.into_iter()
            .filter(|(key, _)| key.set == of_vpc(7, 4))
            .collect()
    );
    assert_eq!(rest.len(), 4, "of both classes, others, and outside");
}

#[test]
fn changes_that_fail_wait_and_lists_wait_with_them() {
    // The map has room for one list, and the tables believe that it has room for all.
    let pinned = Pinned::new("LISTS", 1);
    let (mut maps, _) = PolicyMaps::open(&pinned.maps).unwrap();
    let all = changes(rows(vec![class(3, 11), set(4, 11, 80)]));
    let error = maps.apply(all.clone()).unwrap_err().to_string();
    assert_eq!(error, "table LISTS is full");
    assert!(maps.is_behind());
    assert!(
        said(&pinned).0.is_empty(),
        "nothing names a list that isn't there"
    );
    let (grants, lists) = (
        pinned.map::<GrantKey, Grant>("GRANTS"),
        pinned.map::<ListKey, ListEntry>("LISTS"),
    );
    assert_eq!((grants.keys().count(), lists.keys().count()), (0, 1));
    let mut lists = lists;
    let first = lists.keys().next().unwrap().unwrap();
    lists.remove(&first).unwrap();
    maps.apply(vec![]).unwrap();
    assert!(!maps.is_behind());
    assert_eq!(grants.keys().count(), 3);
}

#[test]
fn the_epoch_rises_with_what_packets_are_judged_by() {
    let pinned = Pinned::new("SLOTS", 1024);
    let epoch = || pinned.array::<u32>("POLICY").get(&0, 0).unwrap();
    let (mut maps, _) = PolicyMaps::open(&pinned.maps).unwrap();
    maps.apply(vec![]).unwrap();
    assert_eq!(epoch(), 1, "an earlier transitd may have ended before");
    maps.apply(vec![]).unwrap();
    assert_eq!(epoch(), 1);
    let all = changes(rows(vec![class(3, 11), set(4, 11, 80)]));
    maps.apply(all).unwrap();
    maps.judge_anew().unwrap();
    assert_eq!(epoch(), 3);
    pinned.array::<u32>("POLICY").set(0, u32::MAX, 0).unwrap();
    maps.judge_anew().unwrap();
    assert_eq!(epoch(), 0);
}

/// Empties the maps.
fn clear(pinned: &Pinned) {
    let (mut maps, held) = PolicyMaps::open(&pinned.maps).unwrap();
    let grants = held.grants.iter().map(|(key, _)| Change::Grant(*key, None));
    let blocks = held.blocks.iter();
    let blocks = blocks.map(|(key, length, _): &(BlockKey, u32, Grant)| Change::Block(*key, *length, None));
    let lists = held.lists.iter().map(|(key, _)| Change::List(*key, None));
    maps.apply(grants.chain(blocks).chain(lists).collect()).unwrap();
}
