//! Applies policies to endpoints: to fresh ones at once, to all others of which policies may say something else in
//! calls of bounded work.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::Enforcement;
use crate::model::policy::{Rollout, TooManyRules, Wanted};
use crate::model::world::{EndpointName, World};

/// How much work one call of [`World::roll_out`] does, in groups that endpoints are matched against and rules that they
/// have: some tenths of a second.
const MAX_WORK: usize = 50_000;
/// What an endpoint costs besides.
const APPLY_WORK: usize = 10;

/// What policies say of a pod, by its namespace, network and profile: pods of a workload are alike.
type Alike = HashMap<(String, String, usize), Wanted>;

impl World {
    /// Applies policies to endpoints for which no packet flows yet.
    pub(in super::super) fn apply_fresh(&mut self) {
        let fresh = std::mem::take(&mut self.enforcement.fresh);
        if self.enforcement.is_idle() {
            // The next policy is applied to all endpoints, these among them.
            self.enforcement.is_complete = false;
            return;
        }
        let mut vpcs = BTreeSet::new();
        for name in fresh {
            self.apply(&name, true, &mut Alike::new());
            vpcs.extend(self.enforcement.homes.get(&name).cloned());
        }
        self.take_all_news(&vpcs);
    }

    /// Applies policies to as many stale endpoints as one call may.
    pub(super) fn apply_stale(&mut self) {
        let touched = self.enforcement.policies.take_touched();
        let is_all = touched.all || !self.enforcement.is_complete;
        if is_all {
            self.enforcement.stale.extend(self.endpoints.keys().cloned());
        } else {
            for namespace in touched.namespaces {
                let own = self.enforcement.homes.range((namespace.clone(), String::new())..);
                let own = own.map(|(name, _)| name).take_while(|name| name.0 == namespace);
                self.enforcement.stale.extend(own.cloned());
            }
            for vpc in touched.vpcs {
                let own: Vec<EndpointName> = self.judged_of(&vpc).cloned().collect();
                self.enforcement.stale.extend(own);
            }
        }
        self.enforcement.is_complete = true;
        self.enforcement.applied = self.enforcement.policies.version();
        let (mut work, mut alike) = (0, Alike::new());
        while let Some(name) = self.enforcement.stale.pop_first() {
            work += self.apply(&name, false, &mut alike);
            if work >= MAX_WORK && self.enforcement.is_staged {
                break;
            }
        }
    }

    /// Applies policies again to the closed endpoints of a VPC: there is room for other sets.
    pub(super) fn apply_closed(&mut self, vpc: &str) {
        let Enforcement {
            closed, homes, stale, ..
        } = &mut self.enforcement;
        let own = closed
            .keys()
            .filter(|name| homes.get(*name).is_some_and(|home| home == vpc));
        stale.extend(own.cloned());
    }

    /// Returns the VPCs of endpoints that are still to be applied.
    pub(super) fn vpcs_of_stale(&self) -> BTreeSet<String> {
        let networks = self.enforcement.stale.iter().filter_map(|name| {
            let endpoint = self.endpoints.get(name)?;
            self.networks.get(&endpoint.network)
        });
        networks.map(|network| network.vpc.clone()).collect()
    }

    /// Applies policies to an endpoint. Returns how much work that was.
    fn apply(&mut self, name: &EndpointName, is_fresh: bool, alike: &mut Alike) -> usize {
        let Some(vpc) = self.seen(name).map(|(_, member)| member.vpc.to_owned()) else {
            self.enforcement.leave(name);
            return 1;
        };
        if !self.enforcement.rollouts.contains_key(&vpc) {
            let mut rollout = Rollout::default();
            self.enforce(&vpc, &mut rollout);
            self.enforcement.rollouts.insert(&vpc, rollout);
            self.begin_served(&vpc);
        }
        let Some((endpoint, member)) = self.seen(name) else {
            return 1;
        };
        let profile = endpoint
            .profile
            .as_ref()
            .map_or(0, |profile| Arc::as_ptr(profile).addr());
        let key = (name.0.clone(), endpoint.network.clone(), profile);
        let known = alike.get(&key).cloned();
        let applied = known
            .is_none()
            .then(|| self.enforcement.policies.match_all(&member));
        if self.enforcement.homes.get(name) != Some(&vpc) {
            self.enforcement.leave(name);
            self.enforcement.homes.insert(name.clone(), vpc.clone());
        }
        let Enforcement { rollouts, closed, .. } = &mut self.enforcement;
        let Some((applied, matched)) = applied else {
            let known = known.unwrap_or_default();
            rollouts.change(&vpc, |rollout| rollout.set(name, &known, is_fresh));
            closed.remove(name);
            return 1;
        };
        let changed = rollouts.change(&vpc, |rollout| {
            let (wanted, has_room) = rollout.want(&name.0, &applied);
            rollout.set(name, &wanted, is_fresh);
            (wanted, has_room)
        });
        let Some((wanted, has_room)) = changed else {
            return 1;
        };
        let too_many = applied.too_many.first().map(TooManyRules::to_string);
        let why = too_many.or_else(|| has_room.err().map(|error| error.to_string()));
        // Each endpoint that is closed is told.
        if why.is_none() {
            alike.insert(key, wanted);
        }
        self.enforcement.note_closed(name, why);
        let sets = [&applied.ingress, &applied.egress].into_iter().flatten();
        APPLY_WORK + matched + sets.map(|set| set.rules.len()).sum::<usize>()
    }
}
