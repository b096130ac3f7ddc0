//! A played droplet: it has rows of policy as transitd has them, and applies programs late.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use thuban_api::identifiers::Vni;
use thuban_rows::{Kept, LocalEndpoint, PolicyAction, PolicyRule};

use super::*;
use crate::model::policy::ClassContent;

pub(super) enum Program {
    Snapshot(BTreeMap<Key, PackedRow>),
    Change(Delta),
}

/// A droplet that applies programs late.
#[derive(Default)]
pub(super) struct Droplet {
    pub(super) tables: BTreeMap<Key, PackedRow>,
    /// Classes and sets that the last snapshot did not name.
    pub(super) lingering: BTreeMap<Key, PackedRow>,
    /// The groups that the sets before it named, by VPC.
    pub(super) named: BTreeMap<Vni, BTreeSet<u64>>,
    /// The VPCs of which rows of several programs linger.
    pub(super) of_several: BTreeSet<Vni>,
    /// What endpoints have of their local rows and of what they keep.
    pub(super) wired: BTreeMap<Key, LocalEndpoint>,
    pub(super) queue: VecDeque<Program>,
    pub(super) sent: usize,
    pub(super) acked: usize,
}

fn read(row: &PackedRow) -> Row {
    Row::try_from(row.unpack()).unwrap()
}

impl Droplet {
    pub(super) fn send(&mut self, program: Program) {
        self.queue.push_back(program);
        self.sent += 1;
    }

    pub(super) fn apply(&mut self, program: Program) {
        match program {
            Program::Snapshot(rows) => {
                let before = std::mem::replace(&mut self.tables, rows);
                self.linger(before);
            }
            Program::Change(delta) => {
                for (key, row) in delta {
                    self.lingering.remove(&key);
                    match row {
                        Some(row) => self.tables.insert(key, row),
                        None => self.tables.remove(&key),
                    };
                }
            }
        }
        self.wire();
        self.acked += 1;
    }

    /// Does what transitd's `PolicyTables::linger` does.
    fn linger(&mut self, before: BTreeMap<Key, PackedRow>) {
        for vni in [1, 2].map(vni) {
            let named = Self::named_by(&before, vni);
            let is_new = self.lingering.keys().all(|key| key.vni() != Some(vni));
            let known = self.named.entry(vni).or_default();
            if is_new {
                *known = named;
                self.of_several.remove(&vni);
            } else {
                self.of_several.insert(vni);
                known.retain(|group| named.contains(group));
            }
        }
        let lasts = |key: &Key| matches!(key, Key::Class(..) | Key::PolicySet(..));
        self.lingering
            .extend(before.into_iter().filter(|(key, _)| lasts(key)));
        self.lingering.retain(|key, _| !self.tables.contains_key(key));
    }

    /// Returns the groups that the sets of a VPC name.
    pub(super) fn named_by(rows: &BTreeMap<Key, PackedRow>, of: Vni) -> BTreeSet<u64> {
        let mut named = BTreeSet::new();
        for row in rows
            .iter()
            .filter(|(key, _)| matches!(key, Key::PolicySet(vni, _) if *vni == of))
        {
            if let Row::PolicySet(set) = read(row.1) {
                named.extend(set.rules.iter().flat_map(|rule| rule.groups.iter().copied()));
            }
        }
        named
    }

    pub(super) fn kept(&self, vni: Vni) -> Kept {
        match self.tables.get(&Key::Vpc(vni)).map(read) {
            Some(Row::Vpc(vpc)) => vpc.kept,
            _ => Kept::Nothing,
        }
    }

    fn wire(&mut self) {
        let before = std::mem::take(&mut self.wired);
        for (key, row) in &self.tables {
            let Key::Local(vni, _) = key else { continue };
            let Row::Local(mut local) = read(row) else {
                continue;
            };
            let kept = self.kept(*vni);
            if let Some(before) = before.get(key).filter(|before| before.pod_uid == local.pod_uid) {
                if kept >= Kept::Sets {
                    (local.ingress_set, local.egress_set) = (before.ingress_set, before.egress_set);
                }
                if kept == Kept::All {
                    local.class = before.class;
                }
            }
            self.wired.insert(key.clone(), local);
        }
    }

    /// Returns a class or set, and whether it lingers.
    pub(super) fn policy_row(&self, key: &Key) -> Option<(Row, bool)> {
        let own = self.tables.get(key).map(|row| (read(row), false));
        own.or_else(|| Some((read(self.lingering.get(key)?), true)))
    }
}

/// Returns a set for a class that doesn't say whether it has these groups: who may match is not accepted, and denied.
pub(super) fn suspicious(
    rules: Vec<PolicyRule>,
    class: &mut ClassContent,
    unsure: &BTreeSet<u64>,
) -> Vec<PolicyRule> {
    const ANY: u64 = 1;
    class.groups.insert(ANY);
    let suspect = |mut rule: PolicyRule| {
        if rule.groups.is_disjoint(unsure) {
            return rule;
        }
        rule.groups.retain(|group| !unsure.contains(group));
        if rule.action != PolicyAction::Accept {
            rule.action = PolicyAction::Deny;
            rule.groups.insert(ANY);
        }
        rule
    };
    rules.into_iter().map(suspect).collect()
}
