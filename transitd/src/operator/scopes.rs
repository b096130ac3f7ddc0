//! A prototype of programs with a scope (docs/adr/0053-shards-by-vpc-wait.md): several leaders, each of its own VPCs.
//! No message of the contract has a scope. `history` has the leaders.
//!
//! Invariant, tested: a program changes what is held for its scope, and nothing else. It changes nothing if the droplet
//! has followed a higher epoch in any slot of the scope.

mod history;

use std::collections::{BTreeMap, BTreeSet};

use thuban_rows::{Bouncer, Droplet, Row, RowKey, builders};

use super::epoch::EpochError;
use crate::program::Program;

type Rows = BTreeMap<RowKey, Row>;

/// Some of the 64 slots of VPCs, a bit each. A VPC's slot is the remainder of its VNI, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Scope(u64);

const NONE: Scope = Scope(0);
const ALL: Scope = Scope(u64::MAX);
/// The slots of the VPCs with VNI 1 and 2.
const FIRST: Scope = Scope(1 << 1);
const SECOND: Scope = Scope(1 << 2);

impl Scope {
    /// Returns the slots for which a row can be held: that of its VPC, or all if it belongs to no VPC.
    fn of(key: &RowKey) -> Self {
        let slot = key.vni().map(|vni| vni.get() % u64::BITS);
        slot.map_or(ALL, |slot| Self(1 << slot))
    }

    fn within(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// `Program` of the contract, with a scope. `is_snapshot`: all else that is held for the scope goes.
struct ScopedProgram {
    epoch: u64,
    scope: Scope,
    is_snapshot: bool,
    upserts: Vec<Row>,
    deletes: Vec<RowKey>,
}

/// What a droplet holds of all leaders.
#[derive(Default)]
struct Table {
    program: Program,
    /// The slots for which each row is held.
    held: BTreeMap<RowKey, Scope>,
    /// The highest epoch that was followed in each slot.
    highest: BTreeMap<u32, u64>,
}

impl Table {
    fn apply(&mut self, told: &ScopedProgram) -> Result<(), EpochError> {
        let slots = (0..u64::BITS).filter(|slot| (told.scope.0 >> slot) & 1 == 1);
        let known = slots.clone().filter_map(|slot| self.highest.get(&slot));
        let (given, highest) = (told.epoch, known.copied().max().unwrap_or_default());
        if given < highest {
            return Err(EpochError::Lower { given, highest });
        }
        self.highest.extend(slots.map(|slot| (slot, given)));
        let mut deletes = told.deletes.clone();
        if told.is_snapshot {
            let wanted: BTreeSet<RowKey> = told.upserts.iter().map(Row::key).collect();
            deletes.extend(self.held.keys().filter(|key| !wanted.contains(*key)).cloned());
        }
        for key in deletes {
            let held = self.held.entry(key.clone()).or_insert(NONE);
            *held = held.without(told.scope);
            if *held == NONE {
                self.held.remove(&key);
                self.program.delete(&key);
            }
        }
        for row in &told.upserts {
            let slots = Scope::of(&row.key()).within(told.scope);
            // A row of a VPC outside of the scope is not taken.
            if slots != NONE {
                self.held.entry(row.key()).or_insert(NONE).0 |= slots.0;
                self.program.upsert(row.clone());
            }
        }
        Ok(())
    }

    fn rows(&self) -> Rows {
        let row = |key: &RowKey| Some((key.clone(), self.program.get(key)?.clone()));
        self.program.keys().filter_map(row).collect()
    }

    /// Returns what slots outside of a scope hold. What a row of no VPC says is left out: each leader may say it anew.
    fn beyond(&self, scope: Scope) -> Vec<(RowKey, Scope, Option<Row>)> {
        let others = self.held.iter().map(|(key, held)| (key, held.without(scope)));
        let told = |key: &RowKey| key.vni().and_then(|_| self.program.get(key).cloned());
        let others = others.filter(|(_, held)| *held != NONE);
        others.map(|(key, held)| (key.clone(), held, told(key))).collect()
    }
}

fn droplet(last: u8, has_ipv6: bool) -> Row {
    Row::Droplet(Droplet {
        address: builders::underlay(last),
        address6: has_ipv6.then(|| "2001:db8::1".parse().unwrap()),
    })
}

fn bouncer(vni: u32, last: u8, droplet: u8) -> Row {
    Row::Bouncer(Bouncer {
        vni: builders::vni(vni),
        address: [10, 0, 1, last].into(),
        droplet: builders::underlay(droplet),
        ..builders::bouncer()
    })
}

fn snapshot(epoch: u64, scope: Scope, rows: &[Row]) -> ScopedProgram {
    ScopedProgram {
        epoch,
        scope,
        is_snapshot: true,
        upserts: rows.to_vec(),
        deletes: Vec::new(),
    }
}

#[test]
fn a_stale_epoch_in_one_slot_refuses_the_whole_program() {
    let mut table = Table::default();
    let both = Scope(FIRST.0 | SECOND.0);
    let rows = [bouncer(1, 4, 1), bouncer(2, 4, 1)];
    table.apply(&snapshot(4, both, &rows)).unwrap();
    table.apply(&snapshot(5, FIRST, &rows[..1])).unwrap();
    let refused = table.apply(&snapshot(4, both, &[])).unwrap_err();
    assert!(matches!(refused, EpochError::Lower { given: 4, highest: 5 }));
    assert!(table.rows().into_values().eq(rows.clone()));
    table.apply(&snapshot(4, SECOND, &[])).unwrap();
    assert!(table.rows().into_values().eq(rows[..1].to_vec()));
}

#[test]
fn a_known_droplet_is_held_for_the_slots_that_know_it() {
    let mut table = Table::default();
    let known = [droplet(3, false)];
    table.apply(&snapshot(1, FIRST, &known)).unwrap();
    table.apply(&snapshot(2, SECOND, &known)).unwrap();
    table.apply(&snapshot(1, FIRST, &[])).unwrap();
    // Its packets in VPCs of the first slot are no longer taken.
    assert_eq!(table.held.get(&known[0].key()), Some(&SECOND));
    table.apply(&snapshot(2, SECOND, &[])).unwrap();
    assert!(table.rows().is_empty());
}

#[test]
fn rows_outside_of_a_programs_scope_change_nothing() {
    let mut table = Table::default();
    let rows = [bouncer(2, 4, 1)];
    table.apply(&snapshot(1, SECOND, &rows)).unwrap();
    let program = ScopedProgram {
        is_snapshot: false,
        deletes: vec![rows[0].key()],
        ..snapshot(2, FIRST, &[bouncer(2, 4, 2), bouncer(2, 5, 2)])
    };
    table.apply(&program).unwrap();
    assert!(table.rows().into_values().eq(rows));
}
