//! The names of what denies.

use thuban_common::policy::NO_RULE;
use thuban_rows::{PolicyAction, PolicyRule, PolicySet, PolicyTier};

use super::super::{Denier, PolicyTables, Usage};
use super::directed::{rule, set};
use super::{VNI, id};

/// Returns set 2: isolated by policies, behind a rule of tier Admin.
fn isolated() -> PolicySet {
    let admin = PolicyRule {
        tier: PolicyTier::Admin,
        action: PolicyAction::Deny,
        policy: "no-db".into(),
        index: 3,
        anyone: true,
        ..rule()
    };
    let of = |policy: &str, index| PolicyRule {
        policy: policy.into(),
        index,
        ..rule()
    };
    let rules = ["a", "a", "b", "c", "d", "e", "f"].map(|name| of(&format!("red/{name}"), 0));
    set(2, [vec![admin, of("red/web", 4)], rules.to_vec()].concat())
}

#[test]
fn a_rank_is_a_rule_of_a_policy() {
    let mut tables = PolicyTables::default();
    tables.put_set(isolated()).unwrap();
    let denier = |rank| tables.denier(VNI, id(2), rank);
    let named = |policy: &str, index| Denier::Rule {
        policy: policy.into(),
        index,
    };
    assert_eq!(denier(0), named("no-db", 3));
    assert_eq!(denier(1), named("red/web", 4));
}

#[test]
fn by_default_those_deny_that_isolate_named_once() {
    let mut tables = PolicyTables::default();
    tables.put_set(isolated()).unwrap();
    let by_default = Denier::NoRule {
        policies: ["red/web", "red/a", "red/b", "red/c"].map(Into::into).to_vec(),
        more: 3,
    };
    assert_eq!(tables.denier(VNI, id(2), NO_RULE), by_default);
}

#[test]
fn a_set_without_its_rules_here_names_nobody() {
    let mut tables = PolicyTables::default();
    let open = PolicySet {
        is_isolated: false,
        ..set(2, vec![rule()])
    };
    tables.put_set(open).unwrap();
    assert_eq!(
        tables.denier(VNI, id(2), NO_RULE),
        Denier::Unknown,
        "not all is written yet"
    );
    assert_eq!(tables.denier(VNI, id(3), NO_RULE), Denier::Unknown);
    tables.remove_set(VNI, id(2));
    assert_eq!(tables.denier(VNI, id(2), 0), Denier::Unknown);
}

#[test]
fn a_set_without_room_says_so() {
    let mut tables = PolicyTables::new(Usage {
        grants: 4,
        ..Usage::CAPACITY
    });
    tables.put_set(isolated()).unwrap();
    assert_eq!(tables.full().count(), 1);
    assert_eq!(tables.denier(VNI, id(2), NO_RULE), Denier::NoRoom);
}
