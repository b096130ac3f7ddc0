//! A transitd that ends at any change, and the next one, which finds what the maps hold.

use std::collections::BTreeSet;

use fastrand::Rng;
use thuban_common::policy::ListKey;
use thuban_rows::PolicySet;

use super::super::entries::key;
use super::super::{Change, PolicyTables, Usage};
use super::maps::Maps;
use super::random::{self, one, seeded};
use super::steps::{Asked, IDS, Site, asked, vnis};
use super::{VNI, id};

const RESTARTS: usize = 300;
/// Packets that are judged after each change.
const PACKETS: usize = 12;

fn ask(maps: &Maps, (set, peer, address, point): Asked) -> (bool, u16) {
    maps.judge(set, peer, address, point)
}

impl Site {
    /// Begins anew with the maps, and gets all rows by a snapshot.
    fn restart(&mut self, random: &mut Rng, capacity: Usage) {
        self.tables = PolicyTables::import(capacity, self.maps.entries());
        self.graces.clear();
        for (vni, has) in &self.has_ranges {
            self.tables.set_ranges(*vni, has.then(random::ranges).as_deref());
        }
        let mut classes: Vec<_> = self.classes.values().cloned().collect();
        random.shuffle(&mut classes);
        for class in classes {
            self.tables.put_class(class).unwrap();
        }
        let mut sets: Vec<_> = self.sets.values().cloned().collect();
        random.shuffle(&mut sets);
        for set in sets {
            self.tables.put_set(set).unwrap();
        }
        self.tables.remove_strangers();
    }

    /// Changes some rows while no transitd is there. An id may get other content.
    fn change_rows_alone(&mut self, random: &mut Rng) {
        for number in IDS {
            let (vni, id) = (one(random, &vnis()), id(number));
            match random.u32(..6) {
                0 => drop(self.classes.remove(&(vni, id))),
                1 => drop(self.sets.remove(&(vni, id))),
                2 => drop(self.classes.insert((vni, id), random::class(random, vni, id))),
                3 => drop(self.sets.insert((vni, id), random::set(random, vni, id))),
                _ => {}
            }
        }
    }

    /// Makes the changes one by one. Every packet is judged as before or as after; a set that got other content may
    /// deny all meanwhile.
    fn apply_safely(&mut self, random: &mut Rng, changes: &[Change], is_lasting: impl Fn(u64) -> bool) {
        let old = self.maps.clone();
        let mut new = old.clone();
        new.apply_all(changes);
        for change in changes {
            self.maps.apply(change);
            let begun = Maps {
                lists: self.maps.lists.clone(),
                ..old.clone()
            };
            for _ in 0..PACKETS {
                let packet = asked(random);
                let (before, now, after) = (ask(&old, packet), ask(&self.maps, packet), ask(&new, packet));
                assert_eq!(ask(&begun, packet), before, "a list got other content");
                let is_either = now == before || now == after;
                let is_safe = is_either || !now.0 && !is_lasting(packet.0);
                assert!(is_safe, "{packet:?}: {before:?}, {now:?}, {after:?}");
            }
        }
    }
}

#[test]
fn whatever_change_is_the_last_the_next_start_is_safe() {
    let mut random = seeded();
    let mut site = Site::new(Usage::CAPACITY);
    let mut cut_short = 0;
    for _ in 0..RESTARTS {
        for _ in 0..random.usize(..4) {
            let number = one(&mut random, &IDS);
            site.step(&mut random, number);
            let changes = site.flush();
            site.maps.apply_all(&changes);
            site.end_graces(random.usize(..3));
        }
        let sets = site.sets.clone();
        let mut ids = IDS;
        random.shuffle(&mut ids);
        for number in &ids[..random.usize(1..4)] {
            site.step(&mut random, *number);
        }
        let changes = site.flush();
        let made = random.usize(..=changes.len());
        cut_short += usize::from(made < changes.len());
        site.maps.apply_all(&changes[..made]);
        if random.bool() {
            site.change_rows_alone(&mut random);
        }
        let after = site.sets.clone();
        site.restart(&mut random, Usage::CAPACITY);
        let changes = site.flush();
        let lasting = sets.iter().filter(|(of, set)| after.get(of) == Some(set));
        let lasting: BTreeSet<u64> = lasting.map(|((vni, id), _)| key(*vni, *id)).collect();
        site.apply_safely(&mut random, &changes, |set| lasting.contains(&set));
        assert_eq!(site.maps.meaning(), site.made_at_once(&mut random).meaning());
        site.assert_lean(&mut random);
    }
    assert!(cut_short > RESTARTS / 3, "{cut_short}");
}

#[test]
fn a_restart_with_the_same_rows_changes_nothing() {
    let mut random = seeded();
    let tight = Usage {
        grants: 60,
        blocks: 120,
        lists: 240,
    };
    let mut was_full = 0;
    for capacity in [Usage::CAPACITY, tight] {
        let mut site = Site::new(capacity);
        // Some seeds fill the tables rarely.
        for _ in 0..3 * RESTARTS {
            let number = one(&mut random, &IDS);
            site.step(&mut random, number);
            for _ in 0..2 {
                let changes = site.flush();
                site.maps.apply_all(&changes);
                site.end_graces(0);
            }
            let changes = site.flush();
            site.maps.apply_all(&changes);
            let without = |tables: &PolicyTables| {
                let sets = tables.full().chain(tables.lacking());
                sets.map(|(set, _)| set).collect::<Vec<_>>()
            };
            let full = without(&site.tables);
            was_full += full.len();
            site.restart(&mut random, capacity);
            assert_eq!(site.flush(), []);
            assert_eq!(without(&site.tables), full);
            assert_eq!(site.tables.usage(), site.maps.usage());
        }
    }
    assert!(was_full > 20, "{was_full}");
}

/// Returns a set that has a list of several parts, maps with it, and the number of such a list.
fn of_parted_list(random: &mut Rng) -> (PolicySet, Maps, u32) {
    loop {
        let set = random::set(random, VNI, id(2));
        let (mut tables, mut maps) = (PolicyTables::default(), Maps::default());
        tables.put_set(set.clone()).unwrap();
        maps.apply_all(&tables.flush().0);
        let parted = maps.lists.keys().find(|key| key.part == 1).copied();
        if let Some(ListKey { list, .. }) = parted {
            return (set, maps, list);
        }
    }
}

#[test]
fn a_list_that_is_not_whole_is_named_by_nobody_and_goes() {
    let mut random = seeded();
    let (_, mut maps, list) = of_parted_list(&mut random);
    // The set is removed, and of one of its lists only the second part is left.
    maps.grants.clear();
    maps.blocks.clear();
    maps.lists.retain(|key, _| *key == ListKey { list, part: 1 });
    let mut tables = PolicyTables::import(Usage::CAPACITY, maps.entries());
    assert_eq!(tables.usage().lists, 1);
    let (changes, retired) = tables.flush();
    assert_eq!(changes, []);
    tables.expire(retired);
    maps.apply_all(&tables.flush().0);
    assert_eq!((maps.usage(), tables.usage()), Default::default());
}

#[test]
fn a_list_that_lacks_its_first_part_is_written_anew() {
    let (set, mut maps, list) = of_parted_list(&mut seeded());
    let wanted = maps.meaning();
    maps.lists.remove(&ListKey { list, part: 0 });
    let mut tables = PolicyTables::import(Usage::CAPACITY, maps.entries());
    tables.put_set(set).unwrap();
    maps.apply_all(&tables.flush().0);
    assert_eq!(maps.meaning(), wanted);
}

#[test]
fn a_set_that_the_snapshot_lacks_goes_with_its_lists() {
    let mut random = seeded();
    let (_, mut maps, _) = of_parted_list(&mut random);
    let kept = random::set(&mut random, VNI, id(3));
    let mut tables = PolicyTables::import(Usage::CAPACITY, maps.entries());
    tables.put_set(kept.clone()).unwrap();
    let (changes, none) = tables.flush();
    maps.apply_all(&changes);
    tables.remove_strangers();
    let (changes, retired) = tables.flush();
    maps.apply_all(&changes);
    tables.expire(none);
    tables.expire(retired);
    maps.apply_all(&tables.flush().0);
    let mut only = PolicyTables::default();
    only.put_set(kept).unwrap();
    let mut wanted = Maps::default();
    wanted.apply_all(&only.flush().0);
    assert_eq!(maps.meaning(), wanted.meaning());
    assert_eq!(maps.usage(), wanted.usage());
}
