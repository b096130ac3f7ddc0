//! How long transitd takes from the row of a set of policies to the entries of the maps, in a VPC of 1,000 classes.
//! Each class is in a group of its own, and each ten groups have a rule with a port of its own. Writing the entries is
//! not measured.

use std::time::Instant;

use anyhow::{Result, ensure};
use thuban_proto::transit::{ClassRow, PolicyAction, PolicyPort, PolicyRule, PolicySetRow, PolicyTier};
use thuban_rows::{Class, PolicySet};
use transitd::program::policy::PolicyTables;

use crate::bench::{
    datapath::{Case, Plan},
    results::Sample,
};

pub const NAME: &str = "compile-1000-classes";
const VNI: u32 = 100;
const CLASSES: u32 = 1_000;
/// The first of the classes.
const FIRST: u32 = 0x1000;
const GROUPS_OF_RULE: u32 = 10;
const SET: u32 = 1;

pub struct CompileCase;

impl Case for CompileCase {
    fn name(&self) -> &'static str {
        NAME
    }

    fn metrics(&self) -> Vec<&'static str> {
        vec!["compile_ms"]
    }

    fn measure(&mut self, _plan: &Plan) -> Result<Vec<Sample>> {
        let mut tables = PolicyTables::default();
        for number in 0..CLASSES {
            tables.put_class(Class::try_from(class(number))?)?;
        }
        tables.flush();
        let set = PolicySet::try_from(set())?;
        let start = Instant::now();
        tables.put_set(set)?;
        let (changes, _) = tables.flush();
        let took = start.elapsed();
        ensure!(
            changes.len() > CLASSES as usize,
            "only {} entries for {CLASSES} classes",
            changes.len()
        );
        Ok(vec![Sample::new("compile_ms", "ms", took.as_secs_f64() * 1000.0)])
    }
}

fn class(number: u32) -> ClassRow {
    ClassRow {
        vni: VNI,
        id: FIRST + number,
        groups: vec![number.into()],
        ..ClassRow::default()
    }
}

fn set() -> PolicySetRow {
    let rule = |index: u32| {
        let first = index * GROUPS_OF_RULE;
        let port = PolicyPort {
            protocol: 6,
            first: 1 + index,
            last: 1 + index,
            ..PolicyPort::default()
        };
        PolicyRule {
            tier: PolicyTier::NetworkPolicy.into(),
            action: PolicyAction::Accept.into(),
            policy: "bench/classes".into(),
            index,
            groups: (first..first + GROUPS_OF_RULE).map(u64::from).collect(),
            ports: vec![port],
            ..PolicyRule::default()
        }
    };
    PolicySetRow {
        vni: VNI,
        id: SET,
        isolated: true,
        rules: (0..CLASSES / GROUPS_OF_RULE).map(rule).collect(),
        ..PolicySetRow::default()
    }
}
