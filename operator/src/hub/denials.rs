//! Asks droplets what the policies that are reported deny, and which packets of pods they drop. Gathers what the
//! droplets tell.
//!
//! Invariant: a droplet is asked only of sets that it judges by, and heard only of sets that it was asked of, and of
//! pods that live on it. What a droplet reports costs the others a bounded time, however much it is.

mod drops;
mod report;

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use thuban_api::identifiers::Vni;
use thuban_proto::transit::{Denials as Report, OperatorMessage, PolicyKey, ReportDenials, operator_message};
use thuban_proto::{MAX_DENIALS, MAX_DROPS};
use thuban_rows::PolicyId;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::sleep;

use super::{Hub, Outgoing, State};
use crate::model::denial_reports::{DenialReports, Gathered, ReportedSet};
use crate::model::drop_reports::DropReports;
use crate::model::world::World;
use crate::rate_limit::RateLimit;
use report::Verdicts;

/// How often the hub looks what droplets are to be asked, and what can be written.
const LOOK: Duration = Duration::from_secs(10);
/// How many entries a second a droplet may report for long: a full report in half of the minute between two of them.
const DENIALS_A_SECOND: u32 = MAX_DENIALS as u32 / 30;
const DROPS_A_SECOND: u32 = MAX_DROPS as u32 / 30;

/// The sets of a VPC of which its droplets are asked. Droplets that were asked of the same share it.
#[derive(Debug, PartialEq, Eq)]
struct VpcSets {
    vni: Vni,
    sets: BTreeMap<PolicyId, ReportedSet>,
}

#[derive(Debug)]
struct Asked {
    /// Whether the droplet was asked on its present stream. Each question is of drops, too.
    is_current: bool,
    /// The sets that it was asked of, by VPC.
    vpcs: Vec<Arc<VpcSets>>,
    /// How many entries of its reports count. A new stream gets no more.
    limit: RateLimit,
    drop_limit: RateLimit,
}

impl Default for Asked {
    fn default() -> Self {
        Self {
            is_current: false,
            vpcs: Vec::new(),
            limit: RateLimit::new(DENIALS_A_SECOND, MAX_DENIALS as u32),
            drop_limit: RateLimit::new(DROPS_A_SECOND, MAX_DROPS as u32),
        }
    }
}

impl Asked {
    /// Whether the droplet was asked of these sets, and of no others.
    fn is_of(&self, vpcs: &[&Arc<VpcSets>]) -> bool {
        let mut pairs = self.vpcs.iter().zip(vpcs);
        self.vpcs.len() == vpcs.len() && pairs.all(|(own, other)| Arc::ptr_eq(own, other))
    }

    /// Notes that the stream has ended.
    fn forget(&mut self) {
        self.is_current = false;
        self.vpcs.clear();
    }
}

#[derive(Debug, Default)]
pub(super) struct Denials {
    reports: DenialReports,
    /// The sets of which droplets are to be asked, by VPC. While those of a VPC are the same, so is what is shared.
    vpcs: BTreeMap<Arc<str>, Arc<VpcSets>>,
    asked: BTreeMap<String, Asked>,
    drops: DropReports,
}

impl Denials {
    /// Notes that a droplet begins a stream.
    pub fn forget(&mut self, droplet: &str) {
        if let Some(asked) = self.asked.get_mut(droplet) {
            asked.forget();
        }
    }

    /// Finds the sets of which droplets are to be asked.
    fn choose_sets(&mut self, world: &World) {
        let reports = &self.reports;
        let chosen = if reports.is_empty() {
            Vec::new()
        } else {
            reports.choose(world.reported_sets(|policy| reports.is_reported(policy)))
        };
        let mut vpcs: BTreeMap<Arc<str>, VpcSets> = BTreeMap::new();
        for set in chosen {
            let of_vpc = vpcs.entry(Arc::clone(&set.vpc)).or_insert_with(|| VpcSets {
                vni: set.vni,
                sets: BTreeMap::new(),
            });
            of_vpc.sets.insert(set.id, set);
        }
        self.vpcs.retain(|vpc, _| vpcs.contains_key(vpc));
        for (vpc, sets) in vpcs {
            if self.vpcs.get(&vpc).is_none_or(|known| **known != sets) {
                self.vpcs.insert(vpc, Arc::new(sets));
            }
        }
    }

    /// Returns the droplets that are to be asked for the first time, or of other sets than before, and notes that they
    /// are.
    fn ask(&mut self, state: &State) -> Vec<Question> {
        let mut wanted: BTreeMap<&str, Vec<&Arc<VpcSets>>> = BTreeMap::new();
        for (vpc, sets) in &self.vpcs {
            for droplet in state.world.endpoint_droplets_of(vpc) {
                wanted.entry(droplet).or_default().push(sets);
            }
        }
        self.asked.retain(|droplet, _| state.world.is_droplet(droplet));
        let connected = state.senders.keys();
        for droplet in connected.filter(|droplet| state.world.is_droplet(droplet)) {
            if !self.asked.contains_key(droplet) {
                self.asked.insert(droplet.clone(), Asked::default());
            }
        }
        let mut questions = Vec::new();
        for (droplet, asked) in &mut self.asked {
            let vpcs = wanted.get(droplet.as_str()).map_or(&[][..], Vec::as_slice);
            let Some(sender) = state.senders.get(droplet) else {
                asked.forget();
                continue;
            };
            if !asked.is_current || !asked.is_of(vpcs) {
                asked.is_current = true;
                asked.vpcs = vpcs.iter().copied().map(Arc::clone).collect();
                questions.push(Question {
                    sender: sender.clone(),
                    vpcs: asked.vpcs.clone(),
                });
            }
        }
        questions
    }
}

/// What a droplet is to be asked.
struct Question {
    sender: UnboundedSender<Outgoing>,
    vpcs: Vec<Arc<VpcSets>>,
}

impl Question {
    fn send(&self) {
        let sets = self.vpcs.iter().flat_map(|vpc| {
            let vni = vpc.vni.get();
            vpc.sets.keys().map(move |id| PolicyKey { vni, id: id.get() })
        });
        let asked = ReportDenials {
            sets: sets.collect(),
            drops: true,
        };
        let message = Some(operator_message::Message::ReportDenials(asked));
        let _ = self.sender.send(OperatorMessage { message }.into());
    }
}

impl Hub {
    pub(super) fn denials(&self) -> MutexGuard<'_, Denials> {
        self.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks droplets for as long as the process leads.
    pub async fn ask_for_denials(&self) {
        loop {
            self.look_at_denials();
            sleep(LOOK).await;
        }
    }

    /// Asks droplets what they were not asked yet, and triggers policies of which something new can be written.
    pub(super) fn look_at_denials(&self) {
        let (questions, due) = {
            let state = &*self.lock();
            if state.held.is_some() {
                // Droplets have no sets yet that this leader knows.
                return;
            }
            let mut denials = self.denials();
            denials.choose_sets(&state.world);
            (denials.ask(state), denials.reports.due(self.now()))
        };
        for question in &questions {
            question.send();
        }
        for policy in due {
            self.wake_policy(&policy);
        }
    }

    /// Sets whether the packets that a policy denies are to be reported. `policy`: the name by which the world knows
    /// it.
    pub fn set_reported(&self, policy: &str, is_wanted: bool) {
        let changed = self.denials().reports.set(policy, is_wanted);
        for name in &changed {
            self.wake_policy(name);
        }
    }

    /// Whether packets that the policy denies are reported: it has been set so, and its namespace has not too many.
    pub fn is_reported(&self, policy: &str) -> bool {
        self.denials().reports.is_reported(policy)
    }

    /// Gathers what a droplet reports. A droplet that reports more than transitd does, or more often, loses what is too
    /// much.
    pub fn note_denials(&self, droplet: &str, report: &Report) {
        self.note_drops(droplet, &report.drops);
        let (vpcs, count) = {
            let denials = self.denials();
            let Some(asked) = denials.asked.get(droplet) else {
                return;
            };
            (asked.vpcs.clone(), take(&asked.limit, report.denials.len()))
        };
        let verdicts = Verdicts::read(&vpcs, &report.denials[..count]);
        if verdicts.is_empty() {
            return;
        }
        let names = |world: &World| {
            verdicts
                .iter()
                .filter_map(|verdicts| verdicts.name(world))
                .collect()
        };
        for (policy, gathered) in report::by_policy(self.read(names)) {
            self.denials().reports.note(&policy, gathered);
        }
    }

    /// Takes what droplets have reported of a policy since it was taken last. That is at most once a minute, and only
    /// if `may_write` says so. What can't be written must be given back.
    pub fn take_denied(&self, policy: &str, may_write: impl FnOnce() -> bool) -> Option<Gathered> {
        let now = self.now();
        self.denials().reports.take(policy, now, may_write)
    }

    pub fn give_denied_back(&self, policy: &str, gathered: Gathered) {
        self.denials().reports.give_back(policy, gathered);
    }
}

/// Takes so many entries, or as many of them as count now. Returns how many.
fn take(limit: &RateLimit, wanted: usize) -> usize {
    limit.take_up_to(u32::try_from(wanted).unwrap_or(u32::MAX)) as usize
}
