//! Classes and sets of an earlier operator's program, while they linger.

use thuban_common::policy::{of_vpc, point};
use thuban_rows::{PolicyAction, PolicyRule, PolicySet, PolicyTier, Row, RowKey, builders};

use super::super::PolicyTables;
use super::directed::{apply, class, of_group, rule, set};
use super::maps::Maps;
use super::{VNI, id};

/// Groups that both programs name, that the first one alone names, and that the second one alone names.
const BOTH: u64 = 11;
const FIRST: u64 = 12;
const SECOND: u64 = 13;

/// Returns a set that denies a group and accepts all others.
fn all_but(number: u32, group: u64) -> PolicySet {
    let denies = PolicyRule {
        tier: PolicyTier::Admin,
        action: PolicyAction::Deny,
        ..of_group(group)
    };
    let accepts = PolicyRule {
        anyone: true,
        ..rule()
    };
    set(number, vec![denies, accepts])
}

struct Site {
    tables: PolicyTables,
    maps: Maps,
}

impl Site {
    /// Has sets 2 and 3 of the first program and class 4 linger; the second one has sets 5 and 6, and class 7.
    fn new() -> Self {
        let mut tables = PolicyTables::default();
        for row in [set(2, vec![of_group(BOTH), of_group(FIRST)]), all_but(3, FIRST)] {
            tables.put_set(row).unwrap();
        }
        tables.put_class(class(4, BOTH)).unwrap();
        let mut site = Self {
            tables,
            maps: Maps::default(),
        };
        site.flush();
        site.tables.linger(VNI, [id(4)].into(), [id(2), id(3)].into());
        for row in [set(5, vec![of_group(BOTH), of_group(SECOND)]), all_but(6, SECOND)] {
            site.tables.put_set(row).unwrap();
        }
        site.tables.put_class(class(7, BOTH)).unwrap();
        site.flush();
        site
    }

    fn flush(&mut self) {
        apply(&mut self.maps, &mut self.tables);
    }

    fn accepts(&self, set: u32, class: u32) -> bool {
        let of = |number| of_vpc(VNI.get(), id(number).get());
        self.maps.judge(of(set), of(class), [0; 16], point(6, 80)).0
    }

    /// Returns whether sets 2, 3, 5 and 6 accept a class.
    fn accepting(&self, class: u32) -> [bool; 4] {
        [2, 3, 5, 6].map(|set| self.accepts(set, class))
    }
}

#[test]
fn a_class_is_not_believed_what_its_program_does_not_name() {
    let mut site = Site::new();
    // Class 4 does not say whether it has SECOND, nor class 7 whether it has FIRST.
    assert_eq!(site.accepting(4), [true, true, true, false]);
    assert_eq!(site.accepting(7), [true, false, true, true]);
    // The second program comes to name FIRST, too.
    site.tables.put_set(set(8, vec![of_group(FIRST)])).unwrap();
    site.flush();
    assert_eq!(site.accepting(7), [true; 4]);
    assert_eq!(site.accepting(4), [true, true, true, false]);
}

#[test]
fn what_is_named_again_is_believed() {
    let mut site = Site::new();
    site.tables.put_class(class(4, BOTH)).unwrap();
    site.tables.put_set(all_but(3, FIRST)).unwrap();
    site.flush();
    // Set 2 alone lingers, which denies nobody.
    assert_eq!(site.accepting(4), [true; 4]);
    assert_eq!(site.accepting(7), [true; 4]);
    site.tables.remove_set(VNI, id(2));
    site.flush();
    assert_eq!(site.accepting(7), [false, true, true, true]);
}

#[test]
fn what_lingers_is_among_the_rows_until_it_is_removed() {
    let mut site = Site::new();
    let has = |tables: &PolicyTables, key: &RowKey| tables.keys().any(|own| own == *key);
    let keys = [
        Row::Class(class(4, BOTH)).key(),
        Row::PolicySet(all_but(3, FIRST)).key(),
    ];
    assert!(keys.iter().all(|key| has(&site.tables, key)));
    site.tables.remove_class(VNI, id(4));
    for number in [2, 3] {
        site.tables.remove_set(VNI, id(number));
    }
    site.flush();
    assert!(!keys.iter().any(|key| has(&site.tables, key)));
    // Nobody knows class 4 any more.
    assert_eq!(site.accepting(4), [false, false, false, false]);
    assert_eq!(site.accepting(7), [false, false, true, true]);
    // Of another VPC nothing lingers.
    site.tables.linger(builders::vni(9), [id(4)].into(), [].into());
}

#[test]
fn former_programs_are_not_believed_of_each_other() {
    let mut site = Site::new();
    // Of the first program: sets 2 and 3, and class 4. Of the second one: sets 5 and 6, and class 7.
    site.tables.linger(VNI, [id(7)].into(), [id(5), id(6)].into());
    site.flush();
    assert_eq!(site.accepting(4), [true, false, true, false]);
    assert_eq!(site.accepting(7), [true, false, true, false]);
}

#[test]
fn a_program_that_comes_again_changes_nothing_that_lingers() {
    let mut site = Site::new();
    let before = [4, 7].map(|class| site.accepting(class));
    site.tables.linger(VNI, [id(4)].into(), [id(2), id(3)].into());
    site.flush();
    assert_eq!([4, 7].map(|class| site.accepting(class)), before);
}
