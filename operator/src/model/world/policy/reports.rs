//! What people are told of policies: how far one is enforced, and which of them denied a packet. Must not change
//! anything.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use thuban_api::identifiers::Vni;
use thuban_rows::PolicyId;

use super::member;
use crate::model::denial_reports::ReportedSet;
use crate::model::policy::Rollout;
use crate::model::rows::Key;
use crate::model::world::{Endpoint, EndpointName, World};

/// How far a policy is enforced.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PolicyProgress {
    /// How many pods it selects.
    pub pods: usize,
    /// The droplets with endpoints of the VPCs of these pods.
    pub droplets: BTreeSet<String>,
    /// Those of the droplets that don't understand rows of classes or sets, if the policy isn't enforced for that.
    pub outdated: BTreeSet<String>,
    /// All steps have been taken, as far as droplets are waited for.
    pub is_rolled_out: bool,
}

impl World {
    /// Returns how far a policy is enforced; none: it isn't in force as it is written.
    pub fn policy_progress(&self, policy: &str) -> Option<PolicyProgress> {
        let enforcement = &self.enforcement;
        if enforcement.policies.refused(policy).is_some() {
            return None;
        }
        let version = enforcement.policies.version_of(policy)?;
        let from = enforcement.policies.namespace_of(policy).unwrap_or_default();
        let is_one = !from.is_empty();
        let homes = enforcement.homes.range((from.to_owned(), String::new())..);
        let homes = homes.take_while(|((namespace, _), _)| !is_one || namespace == from);
        let (mut pods, mut vpcs) = (0, BTreeSet::new());
        for (name, vpc) in homes {
            let member = self
                .endpoints
                .get(name)
                .and_then(|endpoint| member(name, endpoint, vpc));
            if member.is_some_and(|member| enforcement.policies.selects(policy, &member)) {
                pods += 1;
                vpcs.insert(vpc.as_str());
            }
        }
        let droplets = vpcs.iter().flat_map(|vpc| self.endpoint_droplets_of(vpc));
        let droplets: BTreeSet<String> = droplets.map(str::to_owned).collect();
        let rollouts = || vpcs.iter().filter_map(|vpc| enforcement.rollouts.get(*vpc));
        let outdated = if rollouts().all(Rollout::is_enforced) {
            BTreeSet::new()
        } else {
            enforcement.outdated.intersection(&droplets).cloned().collect()
        };
        let is_applied = enforcement.is_complete && enforcement.applied >= version;
        let mut rolled_out = rollouts().map(|rollout| rollout.is_enforced() && rollout.knows(version));
        Some(PolicyProgress {
            pods,
            droplets,
            outdated,
            is_rolled_out: is_applied && rolled_out.all(|is_known| is_known),
        })
    }

    /// Returns what to tell of an endpoint that too many rules apply to.
    pub fn too_many_rules(&self, name: &EndpointName) -> Option<&str> {
        self.enforcement.closed.get(name).map(String::as_str)
    }

    /// Returns the keys of all sets that have rules of a policy.
    pub fn policy_sets_of(&self, policy: &str) -> Vec<Key> {
        let mut keys = Vec::new();
        for (vpc, rollout) in &*self.enforcement.rollouts {
            let Some(vni) = self.vni(vpc) else { continue };
            let is_its = |id: &PolicyId| {
                let set = rollout.set_content(*id);
                set.is_some_and(|set| set.rules.iter().any(|rule| *rule.policy == *policy))
            };
            let sets = rollout.set_rows().filter(is_its);
            keys.extend(sets.map(|id| Key::PolicySet(vni, id)));
        }
        keys
    }

    /// Returns the names of the policies that have rules in any of these sets.
    pub fn policies_of(&self, sets: &BTreeSet<Key>) -> BTreeSet<Arc<str>> {
        let mut names = BTreeSet::new();
        if sets.is_empty() {
            return names;
        }
        for (vpc, rollout) in &*self.enforcement.rollouts {
            let vni = self.vni(vpc);
            let contents = sets.iter().filter_map(|key| match key {
                Key::PolicySet(of, id) if Some(*of) == vni => rollout.set_content(*id),
                _ => None,
            });
            for content in contents {
                names.extend(content.rules.iter().map(|rule| Arc::clone(&rule.policy)));
            }
        }
        names
    }

    /// Returns all sets that have rules of policies that `is_reported` names.
    pub fn reported_sets(&self, is_reported: impl Fn(&str) -> bool) -> Vec<ReportedSet> {
        let mut sets = Vec::new();
        for (vpc, rollout) in &*self.enforcement.rollouts {
            let Some(vni) = self.vni(vpc) else { continue };
            let vpc: Arc<str> = vpc.as_str().into();
            for id in rollout.set_rows() {
                let rules = rollout.set_content(id).map_or(&[][..], |set| &set.rules);
                // Rules of one policy follow each other.
                let mut names: Vec<&Arc<str>> = rules.iter().map(|rule| &rule.policy).collect();
                names.dedup();
                let names = names.into_iter().filter(|name| is_reported(name));
                let policies: BTreeSet<Arc<str>> = names.cloned().collect();
                if !policies.is_empty() {
                    sets.push(ReportedSet {
                        vpc: Arc::clone(&vpc),
                        vni,
                        id,
                        policies,
                    });
                }
            }
        }
        sets
    }

    /// Returns which of the policies of a set deny a packet that the set denies by the rule of a rank, or by none, and
    /// whether the set is of egress. None: the set is gone.
    pub fn denying(&self, set: &ReportedSet, rank: u32) -> Option<(Vec<Arc<str>>, bool)> {
        let content = self.enforcement.rollouts.get(&*set.vpc)?.set_content(set.id)?;
        let rule = usize::try_from(rank)
            .ok()
            .and_then(|rank| content.rules.get(rank));
        // Those of NetworkPolicies have a slash.
        let is_denying = |policy: &&Arc<str>| match rule {
            Some(rule) => rule.policy == **policy,
            None => content.is_isolated && policy.contains('/'),
        };
        let denying = set.policies.iter().filter(is_denying);
        Some((denying.cloned().collect(), content.is_egress))
    }

    /// Returns the pod that has an address in a VPC, as namespace/name.
    pub fn pod_at(&self, vni: Vni, address: IpAddr) -> Option<String> {
        let pod = &self.pod_endpoint(vni, address)?.pod;
        Some(format!("{}/{}", pod.namespace, pod.name))
    }

    /// Returns namespace and name of the pod that has an address in a VPC, if its Endpoint lives on the droplet.
    pub fn pod_on(&self, droplet: &str, vni: Vni, address: IpAddr) -> Option<(String, String)> {
        let endpoint = self.pod_endpoint(vni, address)?;
        let pod = Some(&endpoint.pod).filter(|_| endpoint.droplet == droplet)?;
        Some((pod.namespace.clone(), pod.name.clone()))
    }

    fn pod_endpoint(&self, vni: Vni, address: IpAddr) -> Option<&Endpoint> {
        let endpoint = self.endpoints.get(self.holder(vni, address)?)?;
        let is_pods = !endpoint.is_host && !endpoint.pod.name.is_empty();
        is_pods.then_some(endpoint)
    }
}
