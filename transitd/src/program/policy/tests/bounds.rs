//! Maps that are too small for all rows.

use std::collections::BTreeSet;

use thuban_common::policy::of_vpc;

use super::super::{PolicyTables, Usage};
use super::by_maps;
use super::judged::packet;
use super::maps::Maps;
use super::oracle::{self, Packet, Peer};
use super::random::{one, seeded};
use super::steps::{IDS, Site, vnis};

const FLUSHES: usize = 300;

fn assert_fits(maps: &Maps, capacity: Usage) {
    let fits = |used: Usage, share: usize| {
        used.grants <= capacity.grants / share
            && used.blocks <= capacity.blocks / share
            && used.lists <= capacity.lists / share
    };
    assert!(fits(maps.usage(), 1), "{:?}", maps.usage());
    for vni in vnis() {
        let is_its = |set: u64| set >> 24 == u64::from(vni.get());
        let grants = maps.grants.iter().filter(|(key, _)| is_its(key.set));
        let grants: Vec<u32> = grants.map(|(_, grant)| grant.list).collect();
        let blocks = maps.blocks.values().flatten();
        let blocks = blocks.filter(|(key, _)| is_its(u64::from_be_bytes(key.set)));
        let blocks: Vec<u32> = blocks.map(|(_, grant)| grant.list).collect();
        let lists: BTreeSet<u32> = grants.iter().chain(&blocks).copied().collect();
        let used = Usage {
            grants: grants.len(),
            blocks: blocks.len(),
            lists: maps.lists.keys().filter(|key| lists.contains(&key.list)).count(),
        };
        assert!(fits(used, 4), "{used:?}");
    }
}

#[test]
fn without_room_a_set_denies_all_and_others_are_as_they_were() {
    let mut random = seeded();
    let (mut was_full, mut lacked, mut had_room) = (0, 0, 0);
    for capacity in [(40, 400, 4000), (400, 60, 4000), (400, 400, 100)] {
        let (grants, blocks, lists) = capacity;
        let capacity = Usage {
            grants,
            blocks,
            lists,
        };
        let mut site = Site::new(capacity);
        for _ in 0..FLUSHES {
            for _ in 0..random.usize(1..4) {
                let number = one(&mut random, &IDS);
                site.step(&mut random, number);
            }
            for change in site.flush() {
                site.maps.apply(&change);
                assert_fits(&site.maps, capacity);
            }
            site.end_graces(random.usize(..2));
            let full: Vec<_> = site.tables.full().map(|(set, _)| set).collect();
            let lacking: Vec<_> = site.tables.lacking().map(|(set, _)| set).collect();
            lacked += lacking.len();
            was_full += full.len();
            had_room += site.sets.len() - full.len();
            for (key, set) in &site.sets {
                let (is_full, is_lacking) = (full.contains(key), lacking.contains(key));
                assert!(!is_full || !is_lacking);
                let own = of_vpc(key.0.get(), key.1.get());
                let has = site.maps.grants.keys().filter(|grant| grant.set == own).count();
                assert!(!is_full || has <= 1);
                for _ in 0..8 {
                    let plain = super::super::entries::plain(key.0);
                    let classes = site.classes.values().filter(|class| class.vni == key.0);
                    let (packet, class) = packet(&mut random, classes, &plain);
                    let expected = if is_full {
                        false
                    } else {
                        oracle::judge(set, packet).0
                    };
                    let passes = by_maps(&site.maps, set, packet, class).0;
                    let unknown = Packet {
                        peer: Peer::Unknown,
                        ..packet
                    };
                    let is_as_unknown = is_lacking
                        && matches!(packet.peer, Peer::Class(_))
                        && passes == oracle::judge(set, unknown).0;
                    assert!(passes == expected || is_as_unknown, "{packet:?} {set:#?}");
                    assert!(expected || !passes, "more than the rules accept");
                }
            }
        }
        empty(&mut site);
    }
    assert!(
        was_full > 100 && lacked > 100 && had_room > 100,
        "{was_full} full, {lacked} without all classes, {had_room} not full"
    );
}

/// Removes all rows: nothing may be left.
fn empty(site: &mut Site) {
    for (vni, id) in site.sets.keys() {
        site.tables.remove_set(*vni, *id);
    }
    for (vni, id) in site.classes.keys() {
        site.tables.remove_class(*vni, *id);
    }
    for vni in vnis() {
        site.tables.set_ranges(vni, None);
    }
    for _ in 0..2 {
        let changes = site.flush();
        site.maps.apply_all(&changes);
        site.end_graces(0);
    }
    assert_eq!(site.maps.usage(), Usage::default());
    let PolicyTables {
        vpcs,
        store,
        full,
        lacking,
        untried,
        ..
    } = &site.tables;
    assert!(vpcs.is_empty() && full.is_empty() && store.is_empty());
    assert!(lacking.is_empty() && untried.is_empty());
}
