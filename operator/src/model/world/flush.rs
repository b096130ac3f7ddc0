//! Every droplet's program, brought up to date: the rows of touched objects are made again, and what differs is told.

use std::collections::BTreeMap;

use super::droplet_rows::OtherDroplets;
use super::{Delta, World};
use crate::model::rows::{Key, PackedRow};

/// All rows of a droplet, those that all droplets have alike as bytes.
#[derive(Debug)]
pub struct Snapshot {
    pub rows: BTreeMap<Key, PackedRow>,
    pub droplets: OtherDroplets,
}

impl World {
    /// Makes the rows of all touched objects again, and returns the changes by droplet.
    pub fn flush(&mut self) -> BTreeMap<String, Delta> {
        self.flush_to(|_| true)
    }

    /// Does the same. What many droplets have alike is told only to those that listen: the others get a snapshot later.
    pub fn flush_to(&mut self, listens: impl Fn(&str) -> bool) -> BTreeMap<String, Delta> {
        let mut deltas: BTreeMap<String, Delta> = BTreeMap::new();
        self.apply_fresh();
        self.flush_droplets(&listens, &mut deltas);
        self.flush_shared(&mut deltas);
        self.flush_owners(&mut deltas);
        self.end_subscriptions(&deltas);
        self.flush_owners(&mut deltas);
        deltas
    }

    /// Ends the subscriptions of droplets that lose their last part of a VPC: they are told nothing of it any more.
    fn end_subscriptions(&mut self, deltas: &BTreeMap<String, Delta>) {
        for (droplet, delta) in deltas {
            let lost = delta.iter().filter_map(|(key, row)| match key {
                Key::Vpc(vni) if row.is_none() => Some(*vni),
                _ => None,
            });
            for vni in lost {
                let own = self.subscribed.get(droplet).and_then(|own| own.get(&vni));
                for address in own.cloned().unwrap_or_default() {
                    self.subscribe(droplet, vni, address, false);
                }
            }
        }
    }

    /// Adds the changes of the rows of all touched objects.
    fn flush_owners(&mut self, deltas: &mut BTreeMap<String, Delta>) {
        let mut upserts = Vec::new();
        for owner in std::mem::take(&mut self.dirty) {
            let new = self.contribute(&owner);
            let old = self.contributions.remove(&owner).unwrap_or_default();
            for ((droplet, key), _) in old.iter().filter(|(at, _)| !new.contains_key(at)) {
                if let Some(program) = self.programs.get_mut(droplet) {
                    program.remove(key);
                }
                deltas
                    .entry(droplet.clone())
                    .or_default()
                    .insert(key.clone(), None);
            }
            let is_known = |at: &(String, Key), row: &PackedRow| {
                let found = old.binary_search_by(|(known, _)| known.cmp(at));
                found.is_ok_and(|index| old[index].1 == *row)
            };
            upserts.extend(
                new.iter()
                    .filter(|(at, row)| !is_known(at, row))
                    .map(|(at, row)| (at.clone(), row.clone())),
            );
            self.update_node_ports(&owner);
            if !new.is_empty() {
                self.contributions.insert(owner, new.into_iter().collect());
            }
        }
        // Rows are inserted after all removals: a row may pass from one object to another, such as a reused address.
        for ((droplet, key), row) in upserts {
            self.programs
                .entry(droplet.clone())
                .or_default()
                .insert(key.clone(), row.clone());
            deltas.entry(droplet).or_default().insert(key, Some(row));
        }
    }

    /// Adds the changes of known droplets: every droplet knows all others. Their addresses are unique; the controller
    /// of droplets ensures it.
    fn flush_droplets(&mut self, listens: impl Fn(&str) -> bool, deltas: &mut BTreeMap<String, Delta>) {
        for (name, old) in std::mem::take(&mut self.moved_droplets) {
            let new = self.places(&name);
            if old == new {
                continue;
            }
            self.droplet_rows = None;
            let ((old, _), (new, _)) = (old, new);
            let told = self.droplets.keys();
            let mut told = told.filter(|other| **other != name && listens(other)).peekable();
            if told.peek().is_some() {
                let lost = old.filter(|old| !self.droplets.values().any(|address| address == old));
                let gone = lost.map(|lost| (Key::Droplet(lost.into()), None));
                let row = new.map(|new| self.droplet_row(&name, new));
                let row = row.map(|row| (row.key(), Some(PackedRow::new(&row))));
                let changes: Delta = gone.into_iter().chain(row).collect();
                for other in told {
                    deltas.entry(other.clone()).or_default().extend(changes.clone());
                }
            }
            // The droplet's own rows of other droplets begin or end with it.
            let is_turned = old.is_none() != new.is_none() && listens(&name);
            let others: Vec<_> = self
                .droplets
                .iter()
                .filter(|(other, _)| is_turned && **other != name)
                .collect();
            if !others.is_empty() {
                let delta = deltas.entry(name.clone()).or_default();
                for (other, address) in others {
                    let row = self.droplet_row(other, *address);
                    delta.insert(row.key(), new.map(|_| PackedRow::new(&row)));
                }
            }
        }
    }

    /// Returns all rows that a droplet has and that not all droplets have.
    fn own_rows(&self, droplet: &str) -> BTreeMap<Key, PackedRow> {
        let mut rows = self.programs.get(droplet).cloned().unwrap_or_default();
        rows.extend(self.shared.of(droplet).cloned());
        rows
    }

    /// Returns the whole program of a droplet, as it is sent at first.
    pub fn snapshot(&mut self, droplet: &str) -> Snapshot {
        let rows = self.own_rows(droplet);
        let known = self.droplet_rows.take().unwrap_or_else(|| {
            let all = self.droplets.iter();
            all.map(|(name, address)| (name, PackedRow::new(&self.droplet_row(name, *address))))
                .collect()
        });
        let droplets = known.of(droplet);
        self.droplet_rows = Some(known);
        Snapshot { rows, droplets }
    }

    /// Returns the whole program of a droplet, row by row.
    pub fn program(&self, droplet: &str) -> BTreeMap<Key, PackedRow> {
        let mut program = self.own_rows(droplet);
        if self.droplets.contains_key(droplet) {
            let others = self.droplets.iter().filter(|(other, _)| *other != droplet);
            program.extend(others.map(|(other, address)| {
                let row = self.droplet_row(other, *address);
                (row.key(), PackedRow::new(&row))
            }));
        }
        program
    }

    /// Returns a row of a droplet's program.
    pub fn row(&self, droplet: &str, key: &Key) -> Option<PackedRow> {
        let Key::Droplet(_) = key else {
            let own = || self.programs.get(droplet)?.get(key).cloned();
            return self.shared.get(droplet, key).or_else(own);
        };
        let others = self.droplets.iter().filter(|(name, _)| *name != droplet);
        let mut rows = others.map(|(other, address)| self.droplet_row(other, *address));
        let row = rows.find(|row| row.key() == *key)?;
        self.is_droplet(droplet).then(|| PackedRow::new(&row))
    }
}
