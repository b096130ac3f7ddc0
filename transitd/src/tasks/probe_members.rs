//! Probes the droplets whose roles this one uses, and has others take the packets of droplets that fall silent.
//!
//! A droplet's transit answers, not its transitd. Invariant: only a droplet that has answered before can fall silent.
//! So an older version, which knows no probes, is never taken for dead. Must not write tables of roles: the state
//! does.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use thuban_common::tables::{DropletAddress, ProbeEntry};
use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use crate::dataplane::probes::{ProbeError, Probes};
use crate::dataplane::tables::TableError;
use crate::node::Node;
use crate::program::Silent;

const TICK: Duration = Duration::from_millis(100);
/// Ticks between two questions while packets are given to roles.
const INTERVAL: u64 = 2;
/// Ticks between two questions, after a question that was not answered.
const DOUBTFUL_INTERVAL: u64 = 1;
/// Ticks between two questions while no packets are given to roles, and at all times for droplets that never answered.
const IDLE_INTERVAL: u64 = 50;
/// How many ticks after the last packet to a role count as active.
const ACTIVE: u64 = 100;
/// The number of questions in a row without an answer after which a droplet is silent.
const MISSES: u32 = 3;
/// The number of answers in a row after which a silent droplet is back.
const ANSWERS: u32 = 5;

/// The known state of a droplet.
#[derive(Clone, Debug, Default)]
struct Member {
    is_silent: bool,
    misses: u32,
    answers: u32,
    /// The tick of the last question, and when the droplet was heard before it.
    asked: Option<(u64, u64)>,
}

impl Member {
    /// Notes the result of the last question. Returns whether the droplet fell silent, or is back.
    fn judge(&mut self, heard: u64) -> bool {
        let Some((_, before)) = self.asked.take() else {
            return false;
        };
        let was_silent = self.is_silent;
        if heard != before {
            self.misses = 0;
            self.answers += 1;
            self.is_silent &= self.answers < ANSWERS;
        } else if heard != 0 {
            self.answers = 0;
            self.misses += 1;
            self.is_silent |= self.misses >= MISSES;
        }
        self.is_silent != was_silent
    }

    fn interval(&self, is_active: bool) -> u64 {
        if !self.is_silent && self.misses > 0 {
            DOUBTFUL_INTERVAL
        } else if is_active {
            INTERVAL
        } else {
            IDLE_INTERVAL
        }
    }

    /// Whether the droplet's turn has come.
    fn is_due(&self, tick: u64, is_active: bool) -> bool {
        self.asked
            .is_none_or(|(asked, _)| tick >= asked + self.interval(is_active))
    }

    /// Whether the droplet never answered and was asked not long ago.
    fn is_to_wait(&self, tick: u64, heard: u64) -> bool {
        heard == 0 && self.asked.is_some_and(|(asked, _)| tick < asked + IDLE_INTERVAL)
    }
}

/// Whether packets are given to roles.
#[derive(Debug, Default)]
struct Activity {
    relayed: u64,
    seen: Option<u64>,
}

impl Activity {
    fn look(&mut self, tick: u64, relayed: u64) -> bool {
        if relayed != self.relayed {
            self.relayed = relayed;
            self.seen = Some(tick);
        }
        self.seen.is_some_and(|seen| tick < seen + ACTIVE)
    }
}

#[derive(Debug)]
struct Watch {
    probes: Probes,
    members: BTreeMap<DropletAddress, Member>,
    activity: Activity,
    tick: u64,
    /// The droplets for which the tables are arranged.
    told: Silent,
    /// Whether questions can't be sent. The failure is logged once.
    fails: bool,
}

impl Watch {
    fn new(probes: Probes) -> Self {
        let known = probes.entries().unwrap_or_else(|error| {
            warn!(
                error = &error as &dyn std::error::Error,
                "who was silent is not known, it is found out again"
            );
            BTreeMap::new()
        });
        let member = |(droplet, entry): (DropletAddress, ProbeEntry)| {
            let member = Member {
                is_silent: entry.silent != 0,
                ..Member::default()
            };
            (droplet, member)
        };
        let mut watch = Self {
            probes,
            members: known.into_iter().map(member).collect(),
            activity: Activity::default(),
            tick: 0,
            told: Silent::default(),
            fails: false,
        };
        watch.told = watch.silent();
        watch
    }

    /// Sets the droplets that are probed from now on.
    fn follow(&mut self, mut used: BTreeSet<DropletAddress>) -> Result<(), TableError> {
        used.remove(&self.probes.here());
        let gone: Vec<_> = self
            .members
            .keys()
            .filter(|droplet| !used.contains(*droplet))
            .copied()
            .collect();
        for droplet in gone {
            self.probes.end(droplet)?;
            self.members.remove(&droplet);
        }
        for droplet in used {
            if !self.members.contains_key(&droplet) {
                self.probes.begin(droplet)?;
                self.members.insert(droplet, Member::default());
            }
        }
        Ok(())
    }

    /// Judges the droplets whose time has come, and asks them again.
    fn look(&mut self) -> Result<(), ProbeError> {
        self.tick += 1;
        if self.members.is_empty() {
            return Ok(());
        }
        let is_active = self.activity.look(self.tick, self.probes.relayed()?);
        for (droplet, member) in &mut self.members {
            if !member.is_due(self.tick, is_active) {
                continue;
            }
            let heard = self.probes.heard(*droplet)?;
            if member.is_to_wait(self.tick, heard) {
                continue;
            }
            if member.judge(heard) {
                self.probes.remember(*droplet, member.is_silent)?;
                tell(*droplet, member.is_silent);
            }
            // A question that was not sent proves nothing.
            self.probes.ask(*droplet)?;
            member.asked = Some((self.tick, heard));
        }
        Ok(())
    }

    fn silent(&self) -> Silent {
        let silent = self.members.iter().filter(|(_, member)| member.is_silent);
        Silent(silent.map(|(droplet, _)| *droplet).collect())
    }
}

fn tell(droplet: DropletAddress, is_silent: bool) {
    let droplet = Ipv4Addr::from(droplet);
    if is_silent {
        warn!(%droplet, "a droplet with roles does not answer: where a role has other members they take its packets");
    } else {
        info!(%droplet, "a droplet with roles answers again");
    }
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>, probes: Probes) {
    let mut watch = Watch::new(probes);
    let mut programs = node.watch();
    programs.mark_changed();
    let mut interval = interval(TICK);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        match look(&node, &mut watch, &mut programs) {
            Ok(()) => watch.fails = false,
            Err(error) if !watch.fails => {
                warn!(
                    error = &error as &dyn std::error::Error,
                    "droplets with roles could not be asked whether they live, it is tried again"
                );
                watch.fails = true;
            }
            Err(_) => {}
        }
    }
}

fn look(
    node: &Node,
    watch: &mut Watch,
    programs: &mut tokio::sync::watch::Receiver<u64>,
) -> Result<(), ProbeError> {
    if programs.has_changed().unwrap_or_default() {
        let used = {
            let state = node.state();
            if !state.synced {
                // The tables are still the last transitd's.
                return Ok(());
            }
            programs.mark_unchanged();
            state.program.members()
        };
        watch.follow(used).inspect_err(|_| programs.mark_changed())?;
    }
    let looked = watch.look();
    let silent = watch.silent();
    if silent != watch.told {
        node.state().silence(silent.clone())?;
        watch.told = silent;
    }
    looked
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks at a member each tick until something changes. Returns how many ticks that took.
    fn ticks_until_change(
        member: &mut Member,
        from: u64,
        is_active: bool,
        heard: impl Fn(u64) -> u64,
    ) -> Option<u64> {
        (from..from + 1000).find(|tick| {
            if !member.is_due(*tick, is_active) || member.is_to_wait(*tick, heard(*tick)) {
                return false;
            }
            let has_changed = member.judge(heard(*tick));
            member.asked = Some((*tick, heard(*tick)));
            has_changed
        })
    }

    #[test]
    fn one_that_stops_answering_is_silent_within_six_ticks() {
        for died in 0..20 {
            let mut member = Member::default();
            let heard = |tick: u64| tick.min(100 + died) + 1;
            let found = ticks_until_change(&mut member, 1, true, heard).unwrap();
            assert!(member.is_silent);
            let took = found - (100 + died);
            assert!((4..=6).contains(&took), "{took} ticks after {died}");
        }
    }

    #[test]
    fn lost_questions_make_nobody_silent_who_answers_every_third() {
        let mut member = Member::default();
        let heard = |tick: u64| tick / 3 + 1;
        assert_eq!(ticks_until_change(&mut member, 1, true, heard), None);
    }

    #[test]
    fn one_that_never_answered_is_never_silent_and_seldom_asked() {
        let mut member = Member::default();
        assert_eq!(ticks_until_change(&mut member, 1, true, |_| 0), None);
        member.asked = Some((2000, 0));
        assert!(member.is_to_wait(2000 + IDLE_INTERVAL - 1, 0));
        assert!(!member.is_to_wait(2000 + IDLE_INTERVAL, 0));
        // The droplet's first answer is noticed at once.
        assert!(member.is_due(2000 + INTERVAL, true) && !member.is_to_wait(2000 + INTERVAL, 7));
    }

    #[test]
    fn one_that_was_silent_is_back_after_some_answers_in_a_row() {
        let mut member = Member {
            is_silent: true,
            ..Member::default()
        };
        // Every third answer is lost: the droplet isn't back yet.
        let flaky = |tick: u64| tick - u64::from(tick.is_multiple_of(6)) * 2;
        assert_eq!(ticks_until_change(&mut member, 10, true, flaky), None);
        member.answers = 0;
        let back = ticks_until_change(&mut member, 2000, true, |tick| tick).unwrap();
        assert!(!member.is_silent);
        assert_eq!(back, 2000 + INTERVAL * u64::from(ANSWERS - 1));
    }

    #[test]
    fn droplets_are_asked_seldom_while_no_packets_go_by_roles() {
        let member = Member {
            asked: Some((100, 7)),
            ..Member::default()
        };
        assert!(!member.is_due(149, false) && member.is_due(150, false));
        assert!(!member.is_due(101, true) && member.is_due(102, true));
        let mut activity = Activity::default();
        assert!(!activity.look(1, 0));
        assert!(activity.look(2, 5) && activity.look(2 + ACTIVE - 1, 5));
        assert!(!activity.look(2 + ACTIVE, 5));
    }
}
