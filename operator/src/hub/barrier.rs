//! A barrier: the rows that droplets must have, or must no longer have, before an object goes on.
//!
//! Invariant: only this module decides whether droplets have acked the rows that an object needs, and which droplets
//! are excused.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use thuban_api::identifiers::Vni;
use thuban_rows::Kind;

use super::missing::Missing;
use super::triggers::Waiter;
use super::{Health, State};
use crate::model::rows::Key;

/// Demands on droplets, and the object that is woken when one of the awaited droplets acks something.
///
/// Droplets that must *have* something are excused when they are suspect, or are no (longer) droplets. Of droplets that
/// must *lack* something, all with an open stream are waited for. But a droplet that owes acks for too long counts as
/// one without a stream.
#[must_use = "nothing is asked of droplets until the hub is asked what is missing"]
#[derive(Clone, Debug)]
pub struct Barrier {
    pub(super) waiter: Waiter,
    /// The droplet that is never excused from what it must have.
    home: Option<String>,
    /// Rows that droplets must have acked, and therefore understand.
    rows: Vec<(String, Key)>,
    /// Droplets that must have acked the snapshot of their stream.
    synced: BTreeSet<String>,
    /// Droplets that must have acked all that was sent to them.
    all_acked: BTreeSet<String>,
    /// A droplet that all droplets which were told of it must know.
    introduced: Option<String>,
    /// The things that must be served, each with its rows: one live droplet must have acked all of its own rows.
    served: Vec<(String, Vec<(String, Key)>)>,
    /// Rows that no droplet may have.
    gone: Vec<Key>,
    /// Droplets that must say themselves that these rows are gone.
    witnesses: BTreeSet<String>,
    number: Option<Number>,
}

/// The number of a VPC. No droplet may have rows of it.
#[derive(Clone, Debug)]
struct Number {
    vni: Vni,
    /// Droplets that exist, known to this leader or not.
    droplets: Vec<String>,
    excuses_suspects: bool,
}

impl Barrier {
    pub fn new(waiter: Waiter) -> Self {
        Self {
            waiter,
            home: None,
            rows: Vec::new(),
            synced: BTreeSet::new(),
            all_acked: BTreeSet::new(),
            introduced: None,
            served: Vec::new(),
            gone: Vec::new(),
            witnesses: BTreeSet::new(),
            number: None,
        }
    }

    /// Demands that the droplets have acked these rows.
    pub fn has(mut self, rows: Vec<(String, Key)>) -> Self {
        self.rows.extend(rows);
        self
    }

    /// Waits for this droplet in any case, whatever its state.
    pub fn never_excuses(mut self, home: Option<&str>) -> Self {
        self.home = home.map(str::to_owned);
        self
    }

    /// Demands that packets of the droplet are accepted: by the droplets that were told of it, and by these users,
    /// which must have acked something at all.
    pub fn knows(mut self, droplet: &str, users: BTreeSet<String>) -> Self {
        self.introduced = Some(droplet.to_owned());
        self.synced.extend(users);
        self
    }

    /// Demands that the droplets have acked all that was sent to them.
    pub fn all_acked(mut self, droplets: BTreeSet<String>) -> Self {
        self.all_acked.extend(droplets);
        self
    }

    /// Demands that one of the droplets lives and has acked all of its rows. `what` is the served thing in messages to
    /// people.
    pub fn served_by(mut self, what: String, rows: Vec<(String, Key)>) -> Self {
        self.served.push((what, rows));
        self
    }

    /// Demands that no droplet has these rows.
    pub fn lacks(mut self, keys: impl IntoIterator<Item = Key>) -> Self {
        self.gone.extend(keys);
        self
    }

    /// Demands that no droplet has rows of these addresses of endpoints.
    pub fn lacks_addresses(self, vni: Vni, addresses: &[IpAddr]) -> Self {
        let keys = |address: &IpAddr| {
            [
                Key::Local(vni, *address),
                Key::Bouncer(vni, *address),
                Key::Direct(vni, *address),
            ]
        };
        self.lacks(addresses.iter().flat_map(keys))
    }

    /// Demands that these droplets say so themselves, unless they are no longer droplets: then no droplet may know
    /// them.
    pub fn asks(mut self, witnesses: impl IntoIterator<Item = String>) -> Self {
        self.witnesses.extend(witnesses);
        self
    }

    /// Demands that no droplet has rows of the VPC, or could have some without having been heard. `droplets` are those
    /// that exist, besides the known ones.
    pub fn lacks_number(mut self, vni: Vni, droplets: Vec<String>) -> Self {
        self.number = Some(Number {
            vni,
            droplets,
            excuses_suspects: false,
        });
        self
    }

    /// Lets suspects keep rows of the number: no other VPC gets the number meanwhile.
    pub fn keeps_number(mut self) -> Self {
        if let Some(number) = &mut self.number {
            number.excuses_suspects = true;
        }
        self
    }

    pub(super) fn missing(&self, state: &State, now: u64) -> Missing {
        let NotHad {
            mut unacked,
            outdated,
            full,
        } = self.not_had(state, now);
        unacked.extend(self.not_lacked(state, now));
        unacked.extend(self.not_freed(state, now));
        let unserved = self.served.iter().filter(|(_, rows)| !serves(rows, state, now));
        Missing {
            unacked: unacked.into_iter().collect(),
            outdated: outdated.into_iter().collect(),
            unserved: unserved.map(|(what, _)| what.clone()).collect(),
            ..state.full_tables(full)
        }
    }

    /// Yields the droplets whose acks wake the waiter.
    pub(super) fn awaited<'a>(&'a self, missing: &'a Missing) -> impl Iterator<Item = &'a String> {
        let unserved = self
            .served
            .iter()
            .filter(|(what, _)| missing.unserved.contains(what));
        let candidates = unserved.flat_map(|(_, rows)| rows.iter().map(|(droplet, _)| droplet));
        let outdated = missing.outdated.iter().map(|(droplet, _)| droplet);
        missing.unacked.iter().chain(outdated).chain(candidates)
    }

    fn not_had(&self, state: &State, now: u64) -> NotHad {
        let acks = &state.acks;
        let NotHad {
            mut unacked,
            mut outdated,
            mut full,
        } = NotHad::default();
        for (droplet, key) in &self.rows {
            if state.full.lacks(droplet, key) {
                full.insert((droplet.clone(), key.kind()));
            }
            if !acks.understands(droplet, key.kind()) {
                outdated.insert((droplet.clone(), key.kind()));
            } else if !unacked.contains(droplet) && !acks.is_acked(droplet, key) {
                unacked.insert(droplet.clone());
            }
        }
        let unsynced = self.synced.iter().filter(|droplet| !acks.is_synced(droplet));
        let behind = self
            .all_acked
            .iter()
            .filter(|droplet| !acks.has_acked_all(droplet));
        unacked.extend(unsynced.chain(behind).cloned());
        let introduced = self.introduced.as_ref();
        if let Some(address) = introduced.and_then(|droplet| state.world.droplet_address(droplet)) {
            let key = Key::Droplet(address.into());
            unacked.extend(acks.unaware(&key).map(str::to_owned));
        }
        let all = unacked.iter().chain(outdated.iter().map(|(droplet, _)| droplet));
        let suspects = state.suspects(all, now);
        let counts = |droplet: &String| {
            let is_there = state.world.is_droplet(droplet) && !suspects.contains(droplet);
            self.home.as_ref() == Some(droplet) || is_there
        };
        unacked.retain(counts);
        outdated.retain(|(droplet, _)| counts(droplet));
        full.retain(|(droplet, _)| unacked.contains(droplet));
        NotHad {
            unacked,
            outdated,
            full,
        }
    }

    /// Returns the droplets that may have a row that no droplet may have.
    fn not_lacked(&self, state: &State, now: u64) -> BTreeSet<String> {
        let acks = &state.acks;
        let holding = self.gone.iter().flat_map(|key| acks.holding(key, now));
        let mut holding: BTreeSet<String> = holding.map(str::to_owned).collect();
        if !self.gone.is_empty() {
            holding.extend(state.waiting_for_programs());
        }
        for witness in &self.witnesses {
            if !state.world.is_droplet(witness) {
                // The packets of the witness stop counting only when no droplet knows it.
                holding.extend(acks.forgetting(now).map(str::to_owned));
            } else if self.gone.iter().any(|key| acks.may_hold(witness, key)) {
                holding.insert(witness.clone());
            }
        }
        holding
    }

    /// Returns the droplets that may have rows of the number. A droplet that has acked nothing on an open stream may
    /// have some, known or not: it may have no stream, follow another leader, or not speak at all.
    fn not_freed(&self, state: &State, now: u64) -> BTreeSet<String> {
        let Some(number) = &self.number else {
            return BTreeSet::new();
        };
        let holding = state.acks.holding_vni(number.vni, now);
        let mut holding: BTreeSet<String> = holding.map(str::to_owned).collect();
        let known = state.world.droplets().map(|(name, _)| name);
        let all = known.chain(&number.droplets);
        holding.extend(all.filter(|name| !state.acks.is_synced(name)).cloned());
        if number.excuses_suspects {
            let suspects = state.suspects(holding.iter(), now);
            // This leader has never heard a droplet that it doesn't know.
            holding.retain(|droplet| !state.world.is_droplet(droplet) || !suspects.contains(droplet));
        }
        holding
    }
}

/// Droplets that must have something and don't.
#[derive(Default)]
struct NotHad {
    unacked: BTreeSet<String>,
    /// Those that don't understand rows of a kind.
    outdated: BTreeSet<(String, Kind)>,
    /// Those that have no room for rows of a kind.
    full: BTreeSet<(String, Kind)>,
}

impl State {
    /// Returns a report on tables that are full.
    pub(super) fn full_tables(&self, tables: BTreeSet<(String, Kind)>) -> Missing {
        let tables = tables.into_iter();
        Missing {
            full: tables
                .map(|(droplet, kind)| self.full.full(&droplet, kind))
                .collect(),
            ..Missing::default()
        }
    }
}

/// Whether a droplet that lives has acked all of its rows.
pub(super) fn serves(rows: &[(String, Key)], state: &State, now: u64) -> bool {
    let mut serving: BTreeMap<&String, bool> = BTreeMap::new();
    for (droplet, key) in rows {
        let serves = serving.entry(droplet).or_insert_with(|| {
            state.world.is_droplet(droplet) && state.health(droplet, now) == Health::Connected
        });
        *serves = *serves && state.acks.is_acked(droplet, key);
    }
    serving.into_values().any(|serves| serves)
}
