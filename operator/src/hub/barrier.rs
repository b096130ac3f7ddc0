//! What an object waits for until it goes on: rows that droplets must have, or must not have any more.
//!
//! Invariant: nothing else says whether droplets have acked what somebody needs. Who is excused is said here alone.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use thuban_api::identifiers::Vni;
use thuban_rows::Kind;

use super::missing::Missing;
use super::triggers::Waiter;
use super::{Health, State};
use crate::model::rows::Key;

/// Demands on droplets, and the object that is woken when one of those that it waits for acks something.
///
/// Droplets that must *have* something are excused when they are suspect, or are no droplets (any more). Of droplets
/// that must *lack* something, all with an open stream are waited for. But a droplet that owes acks for too long counts
/// as one without a stream.
#[must_use = "nothing is asked of droplets until the hub is asked what is missing"]
#[derive(Clone, Debug)]
pub struct Barrier {
    pub(super) waiter: Waiter,
    /// Never excused from what it must have.
    home: Option<String>,
    /// Rows that droplets must have acked, and so understand.
    rows: Vec<(String, Key)>,
    /// Droplets that must have acked the snapshot of their stream.
    synced: BTreeSet<String>,
    /// Droplets that must have acked all that was sent to them.
    settled: BTreeSet<String>,
    /// A droplet that all who were told of it must know.
    introduced: Option<String>,
    /// What serves, and its rows: one droplet that lives must have acked all of its own.
    served: Vec<(String, Vec<(String, Key)>)>,
    /// Rows that nobody may have.
    gone: Vec<Key>,
    /// Droplets that must say themselves that these rows are gone.
    witnesses: BTreeSet<String>,
    number: Option<Number>,
}

/// The number of a VPC, of which no droplet may have rows.
#[derive(Clone, Debug)]
struct Number {
    vni: Vni,
    /// Droplets that exist, whether this leader knows of them or not.
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
            settled: BTreeSet::new(),
            introduced: None,
            served: Vec::new(),
            gone: Vec::new(),
            witnesses: BTreeSet::new(),
            number: None,
        }
    }

    /// The droplets must have acked these rows.
    pub fn has(mut self, rows: Vec<(String, Key)>) -> Self {
        self.rows.extend(rows);
        self
    }

    /// This droplet is waited for, whatever is known of it.
    pub fn never_excuses(mut self, home: Option<&str>) -> Self {
        self.home = home.map(str::to_owned);
        self
    }

    /// Packets of the droplet must be taken: by those that were told of it, and by these, which must have acked
    /// something at all.
    pub fn knows(mut self, droplet: &str, users: BTreeSet<String>) -> Self {
        self.introduced = Some(droplet.to_owned());
        self.synced.extend(users);
        self
    }

    /// The droplets must have acked all that was sent to them.
    pub fn settles(mut self, droplets: BTreeSet<String>) -> Self {
        self.settled.extend(droplets);
        self
    }

    /// One of the droplets must live and have acked all of its rows. `what` it serves as is told to people.
    pub fn served_by(mut self, what: String, rows: Vec<(String, Key)>) -> Self {
        self.served.push((what, rows));
        self
    }

    /// No droplet may have these rows.
    pub fn lacks(mut self, keys: impl IntoIterator<Item = Key>) -> Self {
        self.gone.extend(keys);
        self
    }

    /// No droplet may have rows of these addresses of endpoints.
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

    /// These must say so themselves, unless they are no droplets any more: then nobody may know them.
    pub fn asks(mut self, witnesses: impl IntoIterator<Item = String>) -> Self {
        self.witnesses.extend(witnesses);
        self
    }

    /// No droplet may have rows of the VPC, nor may have some unheard. `droplets`: those that exist, besides the known.
    pub fn lacks_number(mut self, vni: Vni, droplets: Vec<String>) -> Self {
        self.number = Some(Number {
            vni,
            droplets,
            excuses_suspects: false,
        });
        self
    }

    /// Suspects may keep rows of the number: nobody else gets it meanwhile.
    pub fn keeps_number(mut self) -> Self {
        if let Some(number) = &mut self.number {
            number.excuses_suspects = true;
        }
        self
    }

    pub(super) fn missing(&self, state: &State, now: u64) -> Missing {
        let (mut unacked, outdated) = self.not_had(state, now);
        unacked.extend(self.not_lacked(state, now));
        unacked.extend(self.not_freed(state, now));
        let unserved = self.served.iter().filter(|(_, rows)| !serves(rows, state, now));
        Missing {
            unacked: unacked.into_iter().collect(),
            outdated: outdated.into_iter().collect(),
            unserved: unserved.map(|(what, _)| what.clone()).collect(),
        }
    }

    /// Droplets whose acks wake the waiter.
    pub(super) fn awaited<'a>(&'a self, missing: &'a Missing) -> impl Iterator<Item = &'a String> {
        let unserved = self
            .served
            .iter()
            .filter(|(what, _)| missing.unserved.contains(what));
        let candidates = unserved.flat_map(|(_, rows)| rows.iter().map(|(droplet, _)| droplet));
        let outdated = missing.outdated.iter().map(|(droplet, _)| droplet);
        missing.unacked.iter().chain(outdated).chain(candidates)
    }

    /// Droplets that must have something and don't, and those that don't understand it.
    fn not_had(&self, state: &State, now: u64) -> (BTreeSet<String>, BTreeSet<(String, Kind)>) {
        let acks = &state.acks;
        let mut unacked: BTreeSet<String> = BTreeSet::new();
        let mut outdated: BTreeSet<(String, Kind)> = BTreeSet::new();
        for (droplet, key) in &self.rows {
            if !acks.understands(droplet, key.kind()) {
                outdated.insert((droplet.clone(), key.kind()));
            } else if !unacked.contains(droplet) && !acks.is_acked(droplet, key) {
                unacked.insert(droplet.clone());
            }
        }
        let unsynced = self.synced.iter().filter(|droplet| !acks.is_synced(droplet));
        let unsettled = self.settled.iter().filter(|droplet| !acks.is_settled(droplet));
        unacked.extend(unsynced.chain(unsettled).cloned());
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
        (unacked, outdated)
    }

    /// Droplets that may have a row that nobody may have.
    fn not_lacked(&self, state: &State, now: u64) -> BTreeSet<String> {
        let acks = &state.acks;
        let holding = self.gone.iter().flat_map(|key| acks.holding(key, now));
        let mut holding: BTreeSet<String> = holding.map(str::to_owned).collect();
        if !self.gone.is_empty() {
            holding.extend(state.waiting_for_programs());
        }
        for witness in &self.witnesses {
            if !state.world.is_droplet(witness) {
                // What it sends counts no more only when nobody knows it.
                holding.extend(acks.forgetting(now).map(str::to_owned));
            } else if self.gone.iter().any(|key| acks.may_hold(witness, key)) {
                holding.insert(witness.clone());
            }
        }
        holding
    }

    /// Droplets that may have rows of the number. One that has acked nothing on an open stream may, whether it is known
    /// or not: it may have none, follow another leader, or not speak at all.
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
            // Of one that this leader doesn't know it has never heard.
            holding.retain(|droplet| !state.world.is_droplet(droplet) || !suspects.contains(droplet));
        }
        holding
    }
}

/// Whether a droplet that lives has acked all of its rows.
fn serves(rows: &[(String, Key)], state: &State, now: u64) -> bool {
    let mut serving: BTreeMap<&String, bool> = BTreeMap::new();
    for (droplet, key) in rows {
        let serves = serving.entry(droplet).or_insert_with(|| {
            state.world.is_droplet(droplet) && state.health(droplet, now) == Health::Connected
        });
        *serves = *serves && state.acks.is_acked(droplet, key);
    }
    serving.into_values().any(|serves| serves)
}
