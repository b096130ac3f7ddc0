//! Rows of a VPC that all droplets with endpoints of the VPC have alike: classes and sets of policies.
//!
//! They are kept once, not for each droplet: a VPC's rows times its droplets would be most of what the operator holds.

use std::collections::{BTreeMap, BTreeSet};

use thuban_api::identifiers::Vni;
use thuban_rows::{PolicyId, Row};

use super::{Delta, World};
use crate::model::rows::{Key, PackedRow};

/// What a shared row says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Shared {
    Class(PolicyId),
    Set(PolicyId),
}

/// The shared rows of a VPC.
#[derive(Debug, Default)]
struct Bundle {
    vni: Option<Vni>,
    /// The droplets that have the rows.
    droplets: BTreeSet<String>,
    rows: BTreeMap<Shared, (Key, PackedRow)>,
}

#[derive(Debug, Default)]
pub(super) struct SharedRows {
    /// By VPC; only those with rows.
    bundles: BTreeMap<String, Bundle>,
    /// VPCs whose droplets or number may have changed since the last flush.
    moved: BTreeSet<String>,
    /// By VPC, what may have changed since the last flush.
    touched: BTreeMap<String, BTreeSet<Shared>>,
}

impl SharedRows {
    pub(super) fn touch(&mut self, vpc: &str, rows: impl IntoIterator<Item = Shared>) {
        let mut rows = rows.into_iter().peekable();
        if rows.peek().is_some() {
            self.touched.entry(vpc.to_owned()).or_default().extend(rows);
        }
    }

    /// Notes that a VPC's droplets or its number may have changed.
    pub(super) fn touch_droplets(&mut self, vpc: &str) {
        self.moved.insert(vpc.to_owned());
    }

    /// Yields the shared rows of a droplet.
    pub(super) fn of<'a>(&'a self, droplet: &'a str) -> impl Iterator<Item = &'a (Key, PackedRow)> {
        let own = self.bundles.values();
        let own = own.filter(move |bundle| bundle.droplets.contains(droplet));
        own.flat_map(|bundle| bundle.rows.values())
    }

    /// Returns a shared row of a droplet.
    pub(super) fn get(&self, droplet: &str, key: &Key) -> Option<PackedRow> {
        let row = match key {
            Key::Class(_, id) => Shared::Class(*id),
            Key::PolicySet(_, id) => Shared::Set(*id),
            _ => return None,
        };
        let mut own = self.bundles.values().filter(|bundle| bundle.vni == key.vni());
        let bundle = own.find(|bundle| bundle.droplets.contains(droplet))?;
        bundle.rows.get(&row).map(|(_, row)| row.clone())
    }

    /// Yields the droplets that have shared rows.
    #[cfg(test)]
    pub(super) fn droplets(&self) -> impl Iterator<Item = &String> {
        self.bundles.values().flat_map(|bundle| &bundle.droplets)
    }
}

impl World {
    /// Adds the changes of shared rows.
    pub(super) fn flush_shared(&mut self, deltas: &mut BTreeMap<String, Delta>) {
        let mut touched = std::mem::take(&mut self.shared.touched);
        for vpc in std::mem::take(&mut self.shared.moved) {
            touched.entry(vpc).or_default();
        }
        let mut upserts = Vec::new();
        for (vpc, rows) in touched {
            let mut bundle = self.shared.bundles.remove(&vpc).unwrap_or_default();
            self.flush_bundle(&vpc, &mut bundle, rows, deltas, &mut upserts);
            if !bundle.rows.is_empty() {
                self.shared.bundles.insert(vpc, bundle);
            }
        }
        // After all removals: a number may pass from one VPC to another.
        for (droplet, key, row) in upserts {
            deltas.entry(droplet).or_default().insert(key, Some(row));
        }
    }

    fn flush_bundle(
        &self,
        vpc: &str,
        bundle: &mut Bundle,
        mut touched: BTreeSet<Shared>,
        deltas: &mut BTreeMap<String, Delta>,
        upserts: &mut Vec<(String, Key, PackedRow)>,
    ) {
        let vni = self.vni(vpc);
        if bundle.vni != vni {
            bundle.vni = vni;
            touched.extend(bundle.rows.keys());
            touched.extend(self.shared_rows_of(vpc));
        }
        let droplets = self.endpoint_droplets_of(vpc);
        let droplets: BTreeSet<String> = droplets.into_iter().map(str::to_owned).collect();
        let had = std::mem::replace(&mut bundle.droplets, droplets);
        let mut gone: Vec<Key> = Vec::new();
        let before: Vec<Key> = bundle.rows.values().map(|(key, _)| key.clone()).collect();
        let mut changed = Vec::new();
        for id in touched {
            let new = self
                .shared_row(vpc, id)
                .map(|row| (row.key(), PackedRow::new(&row)));
            let old = match &new {
                Some(new) => bundle.rows.insert(id, new.clone()),
                None => bundle.rows.remove(&id),
            };
            if new == old {
                continue;
            }
            let key = old.map(|(key, _)| key);
            gone.extend(key.filter(|key| new.as_ref().is_none_or(|(new, _)| new != key)));
            changed.extend(new);
        }
        for droplet in &had {
            let lost = if bundle.droplets.contains(droplet) {
                &gone
            } else {
                &before
            };
            if !lost.is_empty() {
                let delta = deltas.entry(droplet.clone()).or_default();
                delta.extend(lost.iter().map(|key| (key.clone(), None)));
            }
        }
        for droplet in &bundle.droplets {
            let mut tell = |(key, row): &(Key, PackedRow)| {
                upserts.push((droplet.clone(), key.clone(), row.clone()));
            };
            if had.contains(droplet) {
                changed.iter().for_each(&mut tell);
            } else {
                bundle.rows.values().for_each(&mut tell);
            }
        }
    }

    /// Returns a shared row of a VPC as it is now.
    fn shared_row(&self, vpc: &str, id: Shared) -> Option<Row> {
        let (rollout, vni) = (self.enforcement.rollouts.get(vpc)?, self.vni(vpc)?);
        match id {
            Shared::Class(id) => Some(Row::Class(rollout.class(id)?.row(vni, id))),
            Shared::Set(id) => Some(Row::PolicySet(rollout.set_content(id)?.row(vni, id))),
        }
    }

    /// Yields all rows that a VPC shares now.
    fn shared_rows_of(&self, vpc: &str) -> impl Iterator<Item = Shared> {
        let rollouts = self.enforcement.rollouts.get(vpc).into_iter();
        rollouts.flat_map(|rollout| {
            let classes = rollout.class_rows().map(Shared::Class);
            classes.chain(rollout.set_rows().map(Shared::Set))
        })
    }
}
