//! Drives the steps of network policy: applies policies soon after a change, and goes on in a VPC when all droplets
//! with endpoints of the VPC have acked the last step. Suspect droplets aren't waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use thuban_rows::{Kind, Kinds};
use tokio::time::{Instant, sleep, timeout};
use tracing::info;

use super::{Hub, State};
use crate::metrics;
use crate::model::acks::{Acks, Marks};
use crate::model::rows::Key;

/// How often the hub looks, while there are policies, for droplets that are suspect now and rows that have rested.
const LOOK: Duration = Duration::from_secs(1);
/// The shortest time between two looks: changes that come together are applied together.
const PAUSE: Duration = Duration::from_millis(20);
/// A pause is so many times as long as the look before it took.
const PAUSE_FACTOR: u32 = 2;

#[derive(Debug, Default)]
pub(super) struct Steps {
    /// Steps that wait for acks, by VPC.
    waiting: BTreeMap<String, Arc<Marks>>,
    /// Policies whose authors were told that they aren't enforced yet.
    unprovisioned: BTreeSet<String>,
    /// Sets for which a droplet has no room, since the last look.
    refused: BTreeSet<Key>,
}

impl Steps {
    /// Waits in these VPCs until all droplets have acked what they have been sent.
    pub fn wait(&mut self, vpcs: impl IntoIterator<Item = String>, acks: &Acks) {
        let marks = Arc::new(acks.marks());
        self.waiting
            .extend(vpcs.into_iter().map(|vpc| (vpc, Arc::clone(&marks))));
    }
}

/// How far droplets enforce a policy, for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyStanding {
    pub pods: usize,
    pub droplets: usize,
    /// Droplets that don't enforce it, and why.
    pub lacking: Vec<(String, &'static str)>,
    /// Whether some of the droplets don't understand rows of network policy.
    pub is_outdated: bool,
    /// Whether some of the droplets have no room for the rules.
    pub is_full: bool,
    /// All droplets that are waited for enforce it.
    pub is_rolled_out: bool,
}

impl PolicyStanding {
    pub const fn is_provisioned(&self) -> bool {
        self.is_rolled_out && self.lacking.is_empty()
    }

    /// Returns how many droplets enforce the policy.
    pub const fn ready(&self) -> usize {
        self.droplets.saturating_sub(self.lacking.len())
    }

    /// Says which droplets don't enforce the policy, such as "11 of 12 droplets; node-c: no stream".
    pub fn message(&self) -> String {
        let lacking = self.lacking.iter().take(NAMED);
        let lacking = lacking.map(|(droplet, why)| format!("; {droplet}: {why}"));
        format!(
            "{} of {} droplets{}",
            self.ready(),
            self.droplets,
            lacking.collect::<String>()
        )
    }
}

/// Why a droplet without room for the rules of a policy doesn't enforce it.
const NO_ROOM: &str = "no room for the rules, so that all packets of the pods are denied";

/// How many droplets a message names.
const NAMED: usize = 5;

/// The kinds that a droplet must understand to enforce network policy.
const KINDS: [Kind; 2] = [Kind::Class, Kind::PolicySet];

impl Hub {
    /// Rolls policies out for as long as the process leads.
    pub async fn roll_policies_out(&self) {
        loop {
            let news = self.policy_news.notified();
            if self.lock().world.has_policies() {
                let _ = timeout(LOOK, news).await;
            } else {
                news.await;
            }
            let began = Instant::now();
            self.roll_out();
            sleep(PAUSE.max(began.elapsed() * PAUSE_FACTOR)).await;
        }
    }

    /// Applies policies that have changed, and goes on where all droplets have acked.
    pub(super) fn roll_out(&self) {
        let state = &mut *self.lock();
        let now = self.now();
        let acked: Vec<String> = state.acked_steps(now);
        let mut waiting: BTreeSet<String> = BTreeSet::new();
        for vpc in &acked {
            state.steps.waiting.remove(vpc);
            if state.world.policies_acked(vpc) {
                waiting.insert(vpc.clone());
            }
        }
        let has_ended = waiting.len() < acked.len();
        if state.held.is_none() {
            let has_news = state.world.has_policy_news();
            let began = Instant::now();
            waiting.extend(state.world.roll_out(now));
            if has_news {
                metrics::policies_compiled(began.elapsed());
            }
        }
        self.send(state);
        if !waiting.is_empty() {
            state.steps.wait(waiting, &state.acks);
            // Droplets may have had nothing to ack.
            self.policy_news.notify_one();
        }
        for name in state.world.take_newly_closed() {
            self.triggers.endpoint(&name);
        }
        for name in state.world.take_rejudged_policies() {
            self.wake_policy(&name);
        }
        let refused = std::mem::take(&mut state.steps.refused);
        for name in state.world.policies_of(&refused) {
            self.wake_policy(&name);
        }
        if has_ended || state.steps.waiting.is_empty() {
            for name in std::mem::take(&mut state.steps.unprovisioned) {
                self.wake_policy(&name);
            }
        }
        for vpc in acked {
            for name in state.world.unready_of(&vpc) {
                self.triggers.endpoint(&name);
            }
        }
    }

    /// Notes the kinds of rows that a droplet understands. Policies tell their authors when the first droplet comes
    /// that doesn't enforce them, or the last one goes.
    pub(super) fn note_kinds(&self, state: &mut State, droplet: &str, kinds: &Kinds) {
        let had_outdated = state.world.has_outdated();
        let is_enforcing = KINDS.into_iter().all(|kind| kinds.contains(kind));
        state.world.set_enforcing(droplet, is_enforcing);
        state.world.set_fronting(droplet, kinds.contains(Kind::Front));
        state.world.set_tunnelling(droplet, kinds.has_tunnel());
        if state.world.has_outdated() == had_outdated {
            return;
        }
        for name in state.world.policies().names() {
            self.wake_policy(name);
        }
    }

    pub(super) fn wake_policy(&self, name: &str) {
        match name.split_once('/') {
            Some((namespace, name)) => self.triggers.network_policy(namespace, name),
            None => self.triggers.cluster_policy(name),
        }
    }

    /// Returns how far droplets enforce a policy, or none if it isn't in force. If they don't all do, the policy is
    /// triggered when that may be otherwise.
    pub fn policy_standing(&self, name: &str) -> Option<PolicyStanding> {
        let state = &mut *self.lock();
        let standing = state.policy_standing(name, self.now())?;
        if standing.is_provisioned() {
            state.steps.unprovisioned.remove(name);
        } else {
            state.steps.unprovisioned.insert(name.to_owned());
        }
        Some(standing)
    }

    /// Has a class or set get another id, because a droplet knows other content under its id.
    pub(super) fn refuse_policy_id(&self, state: &mut State, droplet: &str, key: &Key) {
        if state.world.refuse_policy_id(key) {
            info!(
                droplet,
                ?key,
                "a class or set gets another id, because the droplet knows another one by it"
            );
            self.policy_news.notify_one();
        }
    }

    /// Has policies rolled out if there is something to do.
    pub(super) fn note_policies(&self, state: &State) {
        if state.world.has_policy_news() {
            self.policy_news.notify_one();
        }
    }

    /// Notes that a droplet has no room for a set: soon the policies of the set are triggered, once for all sets that
    /// droplets refuse together.
    pub(super) fn note_full_set(&self, state: &mut State, key: &Key) {
        state.steps.refused.insert(key.clone());
        self.policy_news.notify_one();
    }

    /// Notes that a droplet acked something.
    pub(super) fn note_policy_ack(&self, state: &State, droplet: &str) {
        let waits = |marks: &Arc<Marks>| state.acks.has_passed(droplet, marks);
        if state.steps.waiting.values().any(waits) {
            self.policy_news.notify_one();
        }
    }
}

impl State {
    fn policy_standing(&self, name: &str, now: u64) -> Option<PolicyStanding> {
        let progress = self.world.policy_progress(name)?;
        let sets = if self.full.is_empty() {
            Vec::new()
        } else {
            self.world.policy_sets_of(name)
        };
        let has_passed = |droplet: &str| {
            let mut marks = self.steps.waiting.values();
            progress.is_rolled_out || marks.all(|marks| self.acks.has_passed(droplet, marks))
        };
        let why = |droplet: &String| {
            if progress.outdated.contains(droplet) {
                Some("its transitd does not know network policy")
            } else if !self.acks.is_connected(droplet) {
                Some("no stream")
            } else if !self.acks.is_synced(droplet)
                || self.acks.is_overdue(droplet, now)
                || !has_passed(droplet)
            {
                Some("has not acknowledged")
            } else if sets.iter().any(|key| self.full.lacks(droplet, key)) {
                Some(NO_ROOM)
            } else {
                None
            }
        };
        let lacking = progress.droplets.iter();
        let lacking = lacking.filter_map(|droplet| Some((droplet.clone(), why(droplet)?)));
        let lacking: Vec<(String, &'static str)> = lacking.collect();
        Some(PolicyStanding {
            pods: progress.pods,
            droplets: progress.droplets.len(),
            is_full: lacking.iter().any(|(_, why)| *why == NO_ROOM),
            lacking,
            is_outdated: !progress.outdated.is_empty(),
            is_rolled_out: progress.is_rolled_out,
        })
    }

    /// Returns the VPCs in which all droplets have acked what the step sent.
    fn acked_steps(&self, now: u64) -> Vec<String> {
        let is_acked = |(vpc, marks): &(&String, &Arc<Marks>)| {
            let droplets = self.world.endpoint_droplets_of(vpc);
            let missing = droplets
                .into_iter()
                .filter(|droplet| self.world.is_droplet(droplet) && !self.acks.has_passed(droplet, marks));
            let missing: Vec<String> = missing.map(str::to_owned).collect();
            missing.is_empty() || self.suspects(missing.iter(), now).len() == missing.len()
        };
        let acked = self.steps.waiting.iter().filter(is_acked);
        acked.map(|(vpc, _)| vpc.clone()).collect()
    }
}
