//! Decides which routes gobgpd should have, and knows which it may have.
//!
//! Times are by CLOCK_BOOTTIME, since boot. Invariant: a route is in [`State::report`] from before gobgpd is asked to
//! add it until gobgpd has said that it is deleted. If gobgpd has started anew, the route stays there until no router
//! can have it any more.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use thuban_api::routes::{Announced, Route};

/// How long routes that gobgpd had at the start may stay without an answer of lbaasd.
pub const ADOPTED: Duration = Duration::from_secs(30);
/// How long transitd may be silent before the AS path of routes is lengthened.
pub const SILENCE: Duration = Duration::from_secs(3);

/// Until when a route may be announced.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Grant {
    pub uid: String,
    pub deadline: Duration,
}

/// How a route is announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    Plain,
    /// With a longer AS path or a metric, so that routers prefer other nodes.
    Lengthened,
}

/// A request to gobgpd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Add(IpAddr, Form),
    Delete(IpAddr),
}

/// What gobgpd has, or may have.
#[derive(Debug)]
struct Known {
    uid: String,
    /// `None`: gobgpd has the route in an unknown form, or does not have the route.
    form: Option<Form>,
}

#[derive(Debug)]
pub struct State {
    started: Duration,
    granted: BTreeMap<IpAddr, Grant>,
    /// `None`: transitd has not answered yet.
    served: Option<BTreeSet<IpAddr>>,
    /// What gobgpd had at the start, which stands for the first answer of transitd.
    adopted: BTreeSet<IpAddr>,
    /// When transitd answered last.
    heard: Duration,
    announced: BTreeMap<IpAddr, Known>,
    /// What a gobgpd had that has ended, and until when routers may have it.
    lingering: BTreeMap<IpAddr, Grant>,
}

impl State {
    /// Begins with what an earlier speaker was granted, and may have announced.
    pub fn new(granted: BTreeMap<IpAddr, Grant>, now: Duration) -> Self {
        let known = |(address, grant): (&IpAddr, &Grant)| {
            let uid = grant.uid.clone();
            (*address, Known { uid, form: None })
        };
        Self {
            started: now,
            announced: granted.iter().map(known).collect(),
            granted,
            served: None,
            adopted: BTreeSet::new(),
            heard: now,
            lingering: BTreeMap::new(),
        }
    }

    /// Takes over what gobgpd has at the start. Routes without a deadline get one.
    pub fn adopt(&mut self, listed: BTreeSet<IpAddr>) {
        let deadline = self.started.saturating_add(ADOPTED);
        for address in &listed {
            let uid = String::new();
            self.granted.entry(*address).or_insert(Grant { uid, deadline });
        }
        self.listed(&listed);
        self.adopted = listed;
    }

    /// Corrects what gobgpd has. A route that is not listed still counts as announced: a request may be under way.
    pub fn listed(&mut self, listed: &BTreeSet<IpAddr>) {
        for address in listed {
            let uid = || {
                self.granted
                    .get(address)
                    .map_or_else(String::new, |grant| grant.uid.clone())
            };
            self.announced.entry(*address).or_insert_with(|| Known {
                uid: uid(),
                form: None,
            });
        }
        for (address, known) in &mut self.announced {
            if !listed.contains(address) {
                known.form = None;
            }
        }
    }

    /// Notes that gobgpd has started anew, and has no routes. Until `deadline`, routers may keep those that it had.
    pub fn emptied(&mut self, deadline: Duration) {
        let lost = std::mem::take(&mut self.announced).into_iter();
        let lost = lost.map(|(address, Known { uid, .. })| (address, Grant { uid, deadline }));
        self.lingering.extend(lost);
    }

    /// Takes an answer of lbaasd to a request that was sent at `sent`.
    pub fn answered(&mut self, routes: Vec<Route>, sent: Duration) {
        let mut before = std::mem::take(&mut self.granted);
        let granted = |route: Route| {
            let known = before
                .remove(&route.address)
                .filter(|grant| grant.uid == route.uid);
            let deadline = match route.remaining_seconds {
                Some(remaining) => sent.saturating_add(Duration::from_secs(remaining)),
                None => known?.deadline,
            };
            let uid = route.uid;
            Some((route.address, Grant { uid, deadline }))
        };
        self.granted = routes.into_iter().filter_map(granted).collect();
    }

    /// Returns what a request says that gobgpd has, or may have, and what is no longer granted because the request does
    /// not say it: lbaasd takes the request for a proof that this node does not announce it.
    pub fn renounce(&mut self, now: Duration) -> (Vec<Announced>, BTreeMap<IpAddr, Grant>) {
        let report = self.report(now);
        let is_said = |address: &IpAddr, grant: &Grant| {
            report
                .iter()
                .any(|announced| announced.address == *address && announced.uid == grant.uid)
        };
        let granted = std::mem::take(&mut self.granted).into_iter();
        let (said, renounced) = granted.partition(|(address, grant)| is_said(address, grant));
        self.granted = said;
        (report, renounced)
    }

    /// Takes back what was renounced, for the request reached nobody.
    pub fn take_back(&mut self, renounced: BTreeMap<IpAddr, Grant>) {
        for (address, grant) in renounced {
            self.granted.entry(address).or_insert(grant);
        }
    }

    /// Takes an answer of transitd.
    pub fn served(&mut self, served: BTreeSet<IpAddr>, at: Duration) {
        self.served = Some(served);
        self.heard = at;
    }

    pub fn granted(&self) -> &BTreeMap<IpAddr, Grant> {
        &self.granted
    }

    /// Returns the addresses that the node serves, as far as is known.
    pub fn serves(&self) -> &BTreeSet<IpAddr> {
        self.served.as_ref().unwrap_or(&self.adopted)
    }

    /// Returns how a route should be announced now, if at all.
    pub fn wanted(&self, address: IpAddr, now: Duration) -> Option<Form> {
        let grant = self.granted.get(&address)?;
        if now >= grant.deadline || !self.serves().contains(&address) {
            return None;
        }
        if now.saturating_sub(self.heard) >= SILENCE {
            return Some(Form::Lengthened);
        }
        Some(Form::Plain)
    }

    /// Returns what gobgpd must be asked for, withdrawals first.
    pub fn steps(&self, now: Duration) -> Vec<Step> {
        let gone = |address: &&IpAddr| self.wanted(**address, now).is_none();
        let delete = self.announced.keys().filter(gone).copied().map(Step::Delete);
        let add = self.granted.iter().filter_map(|(address, grant)| {
            let form = self.wanted(*address, now)?;
            let known = self.announced.get(address);
            let is_done = known.is_some_and(|known| known.form == Some(form) && known.uid == grant.uid);
            (!is_done).then_some(Step::Add(*address, form))
        });
        delete.chain(add).collect()
    }

    /// Notes that gobgpd is going to be asked. Returns whether the step is still right.
    pub fn begin(&mut self, step: &Step, now: Duration) -> bool {
        match *step {
            Step::Delete(address) => {
                if let Some(known) = self.announced.get_mut(&address) {
                    known.form = None;
                }
                true
            }
            Step::Add(address, form) => {
                if self.wanted(address, now) != Some(form) {
                    return false;
                }
                let uid = self
                    .granted
                    .get(&address)
                    .map_or_else(String::new, |grant| grant.uid.clone());
                self.announced.insert(address, Known { uid, form: None });
                true
            }
        }
    }

    /// Notes that gobgpd has done what it was asked.
    pub fn done(&mut self, step: &Step) {
        match *step {
            Step::Delete(address) => drop(self.announced.remove(&address)),
            Step::Add(address, form) => {
                if let Some(known) = self.announced.get_mut(&address) {
                    known.form = Some(form);
                }
            }
        }
    }

    /// Returns what is announced, or may be.
    pub fn report(&self, now: Duration) -> Vec<Announced> {
        let lingering = self.lingering.iter().filter(|(address, lost)| {
            let is_known = self.announced.contains_key(*address);
            now < lost.deadline && !is_known
        });
        let lingering = lingering.map(|(address, lost)| (address, &lost.uid));
        let announced = self
            .announced
            .iter()
            .map(|(address, known)| (address, &known.uid));
        let report = |(address, uid): (&IpAddr, &String)| Announced {
            uid: uid.clone(),
            address: *address,
        };
        announced.chain(lingering).map(report).collect()
    }

    /// Returns the same, and what is granted: a node says this while gobgpd may be asked for any of it.
    pub fn report_granted(&self, now: Duration) -> Vec<Announced> {
        let mut report = self.report(now);
        let others = self.granted.iter().filter(|(address, grant)| {
            let known = self.announced.get(*address);
            known.is_none_or(|known| known.uid != grant.uid)
        });
        report.extend(others.map(|(address, grant)| Announced {
            uid: grant.uid.clone(),
            address: *address,
        }));
        report
    }

    /// Returns how many routes are announced in a form.
    pub fn count(&self, form: Form) -> usize {
        let known = self.announced.values();
        known.filter(|known| known.form == Some(form)).count()
    }

    /// Returns the next time at which something is to be done, if nothing is heard until then.
    pub fn next(&self, now: Duration) -> Option<Duration> {
        let deadlines = self.granted.values().map(|grant| grant.deadline);
        let silence = self.heard.saturating_add(SILENCE);
        deadlines.chain([silence]).filter(|time| *time > now).min()
    }
}

#[cfg(test)]
mod tests;
