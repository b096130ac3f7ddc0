//! Rows of a VPC that all droplets with endpoints of the VPC have alike: classes and sets of policies.
//!
//! They are kept once, not for each droplet: a VPC's rows times its droplets would be most of the operator's memory.

use std::collections::{BTreeMap, BTreeSet};

use thuban_api::identifiers::Vni;
use thuban_rows::{PolicyId, Row};

use super::{Delta, World};
use crate::model::rows::{Key, PackedRow};

/// Which of a VPC's shared rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SharedId {
    Class(PolicyId),
    Set(PolicyId),
}

/// The shared rows of a VPC.
#[derive(Debug, Default)]
struct Bundle {
    vni: Option<Vni>,
    /// The droplets that have the rows.
    droplets: BTreeSet<String>,
    rows: BTreeMap<SharedId, (Key, PackedRow)>,
}

#[derive(Debug, Default)]
pub(super) struct SharedRows {
    /// By VPC; only those with rows.
    bundles: BTreeMap<String, Bundle>,
    /// By VPC, the rows that may have changed since the last flush. Of a VPC without any only the droplets may have.
    touched: BTreeMap<String, BTreeSet<SharedId>>,
}

/// What changed of a VPC's shared rows.
#[derive(Debug, Default)]
struct Change {
    /// Keys of rows that are gone.
    gone: Vec<Key>,
    rows: Vec<(Key, PackedRow)>,
    /// Droplets that have the rows now, and had none before.
    came: BTreeSet<String>,
    /// Droplets that have none any more, and the keys of those that they had.
    left: Vec<String>,
    had: Vec<Key>,
}

impl SharedRows {
    /// Notes that rows of a VPC, its droplets or its number may have changed.
    pub(super) fn touch(&mut self, vpc: &str, rows: impl IntoIterator<Item = SharedId>) {
        self.touched.entry(vpc.to_owned()).or_default().extend(rows);
    }

    /// Yields the shared rows of a droplet.
    pub(super) fn of<'a>(&'a self, droplet: &'a str) -> impl Iterator<Item = &'a (Key, PackedRow)> {
        let own = self.bundles.values();
        let own = own.filter(move |bundle| bundle.droplets.contains(droplet));
        own.flat_map(|bundle| bundle.rows.values())
    }

    /// Returns a shared row of a droplet.
    pub(super) fn get(&self, droplet: &str, key: &Key) -> Option<PackedRow> {
        let id = match key {
            Key::Class(_, id) => SharedId::Class(*id),
            Key::PolicySet(_, id) => SharedId::Set(*id),
            _ => return None,
        };
        let mut own = self.bundles.values().filter(|bundle| bundle.vni == key.vni());
        let bundle = own.find(|bundle| bundle.droplets.contains(droplet))?;
        bundle.rows.get(&id).map(|(_, row)| row.clone())
    }

    /// Yields the droplets that have shared rows.
    #[cfg(test)]
    pub(super) fn droplets(&self) -> impl Iterator<Item = &String> {
        self.bundles.values().flat_map(|bundle| &bundle.droplets)
    }
}

impl Bundle {
    /// Sets a row. Adds what that changes.
    fn set(&mut self, id: SharedId, new: Option<(Key, PackedRow)>, change: &mut Change) {
        let old = match &new {
            Some(new) => self.rows.insert(id, new.clone()),
            None => self.rows.remove(&id),
        };
        if old == new {
            return;
        }
        let key = old.map(|(key, _)| key);
        let is_gone = |key: &Key| new.as_ref().is_none_or(|(new, _)| new != key);
        change.gone.extend(key.filter(is_gone));
        change.rows.extend(new);
    }

    /// Sets the droplets that have the rows.
    fn set_droplets(&mut self, droplets: &BTreeSet<&str>, change: &mut Change) {
        let had = &self.droplets;
        if had.iter().map(String::as_str).eq(droplets.iter().copied()) {
            return;
        }
        let left = had.iter().filter(|droplet| !droplets.contains(droplet.as_str()));
        change.left = left.cloned().collect();
        if !change.left.is_empty() {
            change.had = self.rows.values().map(|(key, _)| key.clone()).collect();
        }
        let came = droplets.iter().filter(|droplet| !had.contains(**droplet));
        change.came = came.map(|droplet| (*droplet).to_owned()).collect();
        self.droplets
            .retain(|droplet| droplets.contains(droplet.as_str()));
        self.droplets.extend(change.came.iter().cloned());
    }
}

impl World {
    /// Adds the changes of shared rows.
    pub(super) fn flush_shared(&mut self, deltas: &mut BTreeMap<String, Delta>) {
        let mut changes = Vec::new();
        for (vpc, rows) in std::mem::take(&mut self.shared.touched) {
            let mut bundle = self.shared.bundles.remove(&vpc).unwrap_or_default();
            let change = self.renew_bundle(&vpc, &mut bundle, rows);
            let stayed = bundle.droplets.iter();
            let stayed = stayed.filter(|droplet| !change.came.contains(*droplet));
            let left = change.left.iter().map(|droplet| (droplet, &change.had));
            for (droplet, gone) in stayed.map(|droplet| (droplet, &change.gone)).chain(left) {
                if !gone.is_empty() {
                    let delta = deltas.entry(droplet.clone()).or_default();
                    delta.extend(gone.iter().map(|key| (key.clone(), None)));
                }
            }
            if !bundle.rows.is_empty() {
                self.shared.bundles.insert(vpc.clone(), bundle);
            }
            if !change.came.is_empty() || !change.rows.is_empty() {
                changes.push((vpc, change));
            }
        }
        // Rows are inserted after all removals: a number may pass from one VPC to another.
        for (vpc, change) in changes {
            let Some(bundle) = self.shared.bundles.get(&vpc) else {
                continue;
            };
            let rows: Vec<(Key, PackedRow)> = bundle.rows.values().cloned().collect();
            for droplet in &bundle.droplets {
                let new = if change.came.contains(droplet) {
                    &rows
                } else {
                    &change.rows
                };
                if !new.is_empty() {
                    let delta = deltas.entry(droplet.clone()).or_default();
                    delta.extend(new.iter().map(|(key, row)| (key.clone(), Some(row.clone()))));
                }
            }
        }
    }

    fn renew_bundle(&self, vpc: &str, bundle: &mut Bundle, mut touched: BTreeSet<SharedId>) -> Change {
        let mut change = Change::default();
        bundle.set_droplets(&self.endpoint_droplets_of(vpc), &mut change);
        let vni = self.vni(vpc);
        if bundle.vni != vni {
            bundle.vni = vni;
            touched.extend(bundle.rows.keys());
            touched.extend(self.shared_rows_of(vpc));
        }
        for id in touched {
            let row = self.shared_row(vpc, id);
            let row = row.map(|row| (row.key(), PackedRow::new(&row)));
            bundle.set(id, row, &mut change);
        }
        change
    }

    /// Returns a shared row of a VPC as it is now.
    fn shared_row(&self, vpc: &str, id: SharedId) -> Option<Row> {
        let (rollout, vni) = (self.enforcement.rollouts.get(vpc)?, self.vni(vpc)?);
        match id {
            SharedId::Class(id) => Some(Row::Class(rollout.class(id)?.row(vni, id))),
            SharedId::Set(id) => Some(Row::PolicySet(rollout.set_content(id)?.row(vni, id))),
        }
    }

    /// Yields all rows that a VPC shares now.
    fn shared_rows_of(&self, vpc: &str) -> impl Iterator<Item = SharedId> {
        let rollouts = self.enforcement.rollouts.get(vpc).into_iter();
        rollouts.flat_map(|rollout| {
            let classes = rollout.class_rows().map(SharedId::Class);
            classes.chain(rollout.set_rows().map(SharedId::Set))
        })
    }
}
