//! Rows that come and go in any order: each step of the changes is safe, and what is reached is what the rows say.

use std::collections::{BTreeMap, VecDeque};

use fastrand::Rng;
use thuban_api::identifiers::Vni;
use thuban_common::policy::{PEER_OUTSIDE, of_vpc, point};
use thuban_rows::{Class, PolicyId, PolicySet, Row, builders};

use super::super::blocks::Prefix;
use super::super::entries::key;
use super::super::{Change, PolicyTables, Retired, Usage};
use super::id;
use super::maps::Maps;
use super::random::{self, one, seeded};

/// The ids of classes and sets.
pub const IDS: [u32; 5] = [2, 3, 4, 5, 6];
const FLUSHES: usize = 400;
/// Packets that are judged after each change.
const PACKETS: usize = 12;

/// Rows, the entries that were made of them, and the maps.
pub struct Site {
    pub tables: PolicyTables,
    pub maps: Maps,
    pub classes: BTreeMap<(Vni, PolicyId), Class>,
    pub sets: BTreeMap<(Vni, PolicyId), PolicySet>,
    pub has_ranges: BTreeMap<Vni, bool>,
    pub graces: VecDeque<Retired>,
}

pub fn vnis() -> [Vni; 2] {
    [7, 8].map(builders::vni)
}

impl Site {
    pub fn new(capacity: Usage) -> Self {
        Self {
            tables: PolicyTables::new(capacity),
            maps: Maps::default(),
            classes: BTreeMap::new(),
            sets: BTreeMap::new(),
            has_ranges: BTreeMap::new(),
            graces: VecDeque::new(),
        }
    }

    /// Puts or removes a row of the id.
    pub fn step(&mut self, random: &mut Rng, number: u32) {
        let (vni, id) = (one(random, &vnis()), id(number));
        match random.u32(..9) {
            0..4 => {
                if self.classes.remove(&(vni, id)).is_some() {
                    self.tables.remove_class(vni, id);
                } else {
                    let class = random::class(random, vni, id);
                    self.classes.insert((vni, id), class.clone());
                    self.tables.put_class(class).unwrap();
                }
            }
            4..8 => {
                if self.sets.remove(&(vni, id)).is_some() {
                    self.tables.remove_set(vni, id);
                } else {
                    let set = random::set(random, vni, id);
                    self.sets.insert((vni, id), set.clone());
                    self.tables.put_set(set).unwrap();
                }
            }
            _ => {
                let has = random.bool();
                self.has_ranges.insert(vni, has);
                self.tables.set_ranges(vni, has.then(random::ranges).as_deref());
            }
        }
    }

    /// Returns the changes of a flush. The grace of lists begins when [`Self::apply`] has made them.
    pub fn flush(&mut self) -> Vec<Change> {
        let (changes, retired) = self.tables.flush();
        self.graces.push_back(retired);
        changes
    }

    /// Lets the grace end of all but the last few flushes.
    pub fn end_graces(&mut self, but: usize) {
        while self.graces.len() > but {
            let retired = self.graces.pop_front().unwrap();
            self.tables.expire(retired);
        }
    }

    /// Returns maps that are made of the rows at once.
    pub fn made_at_once(&self, random: &mut Rng) -> Maps {
        let classes = self.classes.values().cloned().map(Row::Class);
        let sets = self.sets.values().cloned().map(Row::PolicySet);
        let mut rows: Vec<Row> = classes.chain(sets).collect();
        random.shuffle(&mut rows);
        let mut tables = PolicyTables::default();
        let put_ranges = |tables: &mut PolicyTables| {
            for (vni, has) in &self.has_ranges {
                tables.set_ranges(*vni, has.then(random::ranges).as_deref());
            }
        };
        let is_early = random.bool();
        if is_early {
            put_ranges(&mut tables);
        }
        for row in rows {
            match row {
                Row::Class(class) => tables.put_class(class).unwrap(),
                Row::PolicySet(set) => tables.put_set(set).unwrap(),
                other => panic!("{other:?}"),
            }
        }
        if !is_early {
            put_ranges(&mut tables);
        }
        let mut maps = Maps::default();
        maps.apply_all(&tables.flush().0);
        maps
    }

    /// Asserts that there are no other lists than those in use.
    pub fn assert_lean(&mut self, random: &mut Rng) {
        for _ in 0..2 {
            let changes = self.flush();
            self.maps.apply_all(&changes);
            self.end_graces(0);
        }
        assert_eq!(self.maps.usage(), self.made_at_once(random).usage());
    }
}

/// A packet as programs look it up.
pub type Asked = (u64, u64, [u8; 16], u32);

pub fn asked(random: &mut Rng) -> Asked {
    let vni = one(random, &vnis()).get();
    let address = random::address(random);
    let is_inside = random::ranges().iter().any(|range| range.contains(&address));
    let class = of_vpc(vni, one(random, &[0, 1, 2, 3, 4, 5, 6]));
    let (protocol, port) = random::port_of_packet(random);
    let set = of_vpc(vni, one(random, &IDS));
    let peer = if is_inside { class } else { PEER_OUTSIDE };
    (
        set,
        peer,
        Prefix::from(ipnet::IpNet::from(address)).address,
        point(protocol, port),
    )
}

#[test]
fn rows_in_any_order_mean_what_they_mean_at_once() {
    let mut random = seeded();
    let mut site = Site::new(Usage::CAPACITY);
    for _ in 0..FLUSHES {
        let steps = random.usize(1..8);
        for _ in 0..steps {
            let number = one(&mut random, &IDS);
            site.step(&mut random, number);
        }
        let changes = site.flush();
        site.maps.apply_all(&changes);
        site.end_graces(random.usize(..3));
        assert_eq!(site.maps.meaning(), site.made_at_once(&mut random).meaning());
        if random.u32(..8) == 0 {
            site.assert_lean(&mut random);
        }
    }
    assert_eq!(site.tables.full().chain(site.tables.lacking()).count(), 0);
}

#[test]
fn each_change_leaves_a_packet_judged_as_before_or_after() {
    assert_steps_are_safe(Usage::CAPACITY);
}

#[test]
fn each_change_is_safe_where_sets_find_no_room() {
    let (grants, blocks, lists) = (60, 120, 240);
    assert_steps_are_safe(Usage {
        grants,
        blocks,
        lists,
    });
}

fn assert_steps_are_safe(capacity: Usage) {
    let mut random = seeded();
    let mut site = Site::new(capacity);
    for _ in 0..FLUSHES {
        // Where there is little room, a step may end by another what a set says.
        let has_room = capacity == Usage::CAPACITY;
        let steps = if has_room { random.usize(1..4) } else { 1 };
        let mut lasting = site.sets.clone();
        // Each row changes once: else it is judged by what is between, too.
        let mut ids = IDS;
        random.shuffle(&mut ids);
        for number in &ids[..steps] {
            site.step(&mut random, *number);
        }
        lasting.retain(|key, _| site.sets.contains_key(key));
        let changes = site.flush();
        let old = site.maps.clone();
        let mut new = old.clone();
        new.apply_all(&changes);
        let ask = |maps: &Maps, (set, peer, address, point): Asked| maps.judge(set, peer, address, point);
        for change in &changes {
            site.maps.apply(change);
            // A program that found its grant and block before the changes finds the same lists.
            let begun = Maps {
                lists: site.maps.lists.clone(),
                ..old.clone()
            };
            for _ in 0..PACKETS {
                let packet = asked(&mut random);
                let (before, now, after) = (ask(&old, packet), ask(&site.maps, packet), ask(&new, packet));
                assert_eq!(ask(&begun, packet), before);
                let is_lasting = lasting.keys().any(|(vni, id)| key(*vni, *id) == packet.0);
                let is_safe = before.0 || after.0 || !now.0 || !is_lasting;
                let is_either = now == before || now == after || steps > 1 || !has_room;
                assert!(is_safe && is_either, "{packet:?}: {before:?}, {now:?}, {after:?}");
            }
        }
        site.end_graces(random.usize(..3));
    }
}
