//! What network policy says of the world's endpoints: classes and sets as rows, and which of them each endpoint has.
//!
//! A change of an endpoint that no packet reaches yet counts with the next flush. All other changes are gathered until
//! [`World::roll_out`], which begins the steps of [`Rollout`].
//!
//! Invariant: without policies there is nothing here, and no row says anything of policy.

mod apply;
mod reports;
mod rollouts;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, LazyLock};

use k8s_openapi::api::networking::v1::NetworkPolicySpec;
use thuban_api::ClusterNetworkPolicySpec;
use thuban_rows::Kept;

use super::served::KnownServed;
use super::shared::SharedId;
use super::{Address, Endpoint, EndpointName, Membership, Owner, World, set};
use crate::model::policy::{Assignment, Labels, Malformed, Member, Node, Policies, Profile, Rollout};
use crate::model::rows::Key;
use rollouts::Rollouts;

#[derive(Debug)]
pub(super) struct Enforcement {
    pub(super) policies: Policies,
    nodes: BTreeMap<String, Node>,
    /// The endpoints of droplets that are their own and have addresses.
    hosts: BTreeSet<EndpointName>,
    /// The policies don't have these nodes yet.
    has_other_nodes: bool,
    pub(super) known_served: KnownServed,
    pub(super) rollouts: Rollouts,
    /// The VPC in whose rollout an endpoint is.
    homes: BTreeMap<EndpointName, String>,
    /// The version of the policies that were applied to all endpoints.
    applied: u64,
    /// Fresh endpoints, which are applied with the next flush.
    fresh: BTreeSet<EndpointName>,
    /// Endpoints that are applied again with the next call of [`World::roll_out`].
    stale: BTreeSet<EndpointName>,
    /// All endpoints were applied since there are policies.
    is_complete: bool,
    /// Droplets that don't understand rows of classes or sets.
    outdated: BTreeSet<String>,
    /// Endpoints that too many rules apply to, so that all their packets are denied, and what to tell of each.
    closed: BTreeMap<EndpointName, String>,
    /// Those that nobody was told of yet.
    newly_closed: BTreeSet<EndpointName>,
    /// Changes go in steps. Before, no droplet has been sent anything.
    is_staged: bool,
}

impl Default for Enforcement {
    fn default() -> Self {
        Self {
            policies: Policies::that_retain(),
            nodes: BTreeMap::new(),
            hosts: BTreeSet::new(),
            has_other_nodes: false,
            known_served: KnownServed::default(),
            rollouts: Rollouts::default(),
            homes: BTreeMap::new(),
            applied: 0,
            fresh: BTreeSet::new(),
            stale: BTreeSet::new(),
            is_complete: false,
            outdated: BTreeSet::new(),
            closed: BTreeMap::new(),
            newly_closed: BTreeSet::new(),
            is_staged: false,
        }
    }
}

impl Enforcement {
    fn is_idle(&self) -> bool {
        self.policies.is_empty() && self.rollouts.is_empty()
    }

    fn rollout_of(&self, name: &EndpointName) -> Option<&Rollout<EndpointName>> {
        self.rollouts.get(self.homes.get(name)?)
    }

    /// Takes an endpoint out of the VPC in which it is.
    fn leave(&mut self, name: &EndpointName) {
        if let Some(home) = self.homes.remove(name) {
            self.rollouts.change(&home, |rollout| rollout.remove(name));
        }
        self.closed.remove(name);
    }

    /// Notes whether too many rules apply to an endpoint, and what to tell of it.
    fn note_closed(&mut self, name: &EndpointName, why: Option<String>) {
        let Some(why) = why else {
            self.closed.remove(name);
            return;
        };
        if self.closed.insert(name.clone(), why).is_none() {
            self.newly_closed.insert(name.clone());
        }
    }

    /// Takes note of a change of an endpoint.
    pub(super) fn note(&mut self, name: &EndpointName, old: Option<&Endpoint>, new: Option<&Endpoint>) {
        self.known_served.note_endpoint(name);
        let (old_host, host) = (old.and_then(Endpoint::as_host), new.and_then(Endpoint::as_host));
        if old_host != host {
            self.has_other_nodes = true;
            if host.is_some() {
                self.hosts.insert(name.clone());
            } else {
                self.hosts.remove(name);
            }
        }
        if old.map(Endpoint::holder) != new.map(Endpoint::holder) {
            self.fresh.insert(name.clone());
        } else if old.map(|old| &old.profile) != new.map(|new| &new.profile) {
            let is_known = self.homes.contains_key(name);
            let list = if is_known {
                &mut self.stale
            } else {
                &mut self.fresh
            };
            list.insert(name.clone());
        }
    }
}

impl Endpoint {
    fn is_member(&self) -> bool {
        matches!(self.membership, Membership::Member(_))
    }

    /// Returns the network, droplet and addresses of an endpoint that is its droplet's own.
    fn as_host(&self) -> Option<(&str, &str, &Address)> {
        let Membership::Member(address) = &self.membership else {
            return None;
        };
        self.is_host.then_some((&self.network, &self.droplet, address))
    }

    /// Returns who has the endpoint, and where: no packet of another holder has flowed yet.
    fn holder(&self) -> (&str, &str, &str, bool) {
        (&self.network, &self.droplet, &self.pod.uid, self.is_member())
    }
}

impl World {
    /// Sets or removes a NetworkPolicy. As [`Policies::set_network_policy`].
    pub fn set_network_policy(
        &mut self,
        namespace: &str,
        name: &str,
        created: i64,
        spec: Option<&NetworkPolicySpec>,
    ) -> Result<(), Malformed> {
        self.enforcement
            .policies
            .set_network_policy(namespace, name, created, spec)
    }

    /// As [`Policies::take_rejudged`].
    pub fn take_rejudged_policies(&mut self) -> BTreeSet<Arc<str>> {
        self.enforcement.policies.take_rejudged()
    }

    /// Sets or removes a ClusterNetworkPolicy. As [`Policies::set_cluster_policy`].
    pub fn set_cluster_policy(
        &mut self,
        name: &str,
        spec: Option<&ClusterNetworkPolicySpec>,
    ) -> Result<(), Malformed> {
        self.enforcement.policies.set_cluster_policy(name, spec)
    }

    /// Sets the labels of a namespace, or removes it.
    pub fn set_namespace_labels(&mut self, name: &str, labels: Option<Labels>) {
        self.enforcement.policies.set_namespace(name, labels);
    }

    /// Sets a node that policies may select, or removes it.
    pub fn set_policy_node(&mut self, name: &str, node: Option<Node>) {
        self.enforcement.has_other_nodes |= set(&mut self.enforcement.nodes, name, node);
    }

    /// Returns the nodes that policies may select, with the addresses of their own endpoints.
    fn nodes_with_endpoints(&self) -> Vec<Node> {
        let mut nodes = self.enforcement.nodes.clone();
        for name in &self.enforcement.hosts {
            let host = self.endpoints.get(name).and_then(Endpoint::as_host);
            let Some((network, droplet, address)) = host else {
                continue;
            };
            let network = self.networks.get(network);
            if let (Some(network), Some(node)) = (network, nodes.get_mut(droplet)) {
                let own = node.members.entry(network.vpc.clone()).or_default();
                own.extend(address.all());
            }
        }
        nodes.into_values().collect()
    }

    /// Sets whether a droplet understands rows of classes and sets. In a VPC with a droplet that doesn't, policy is not
    /// enforced until the droplet does, or has no endpoint of the VPC. Once it is enforced it stays so.
    pub fn set_enforcing(&mut self, droplet: &str, is_enforcing: bool) {
        if is_enforcing {
            self.enforcement.outdated.remove(droplet);
        } else {
            self.enforcement.outdated.insert(droplet.to_owned());
        }
    }

    /// Whether a droplet is known that doesn't understand rows of classes and sets.
    pub fn has_outdated(&self) -> bool {
        let outdated = &self.enforcement.outdated;
        outdated.iter().any(|droplet| self.droplets.contains_key(droplet))
    }

    /// Returns the policies. [`Self::set_network_policy`] says what changes them.
    pub const fn policies(&self) -> &Policies {
        &self.enforcement.policies
    }

    /// Returns the droplets with endpoints of a VPC.
    pub fn endpoint_droplets_of(&self, vpc: &str) -> BTreeSet<&str> {
        let networks = self.networks_of(vpc);
        networks.flat_map(|name| self.endpoint_droplets(name)).collect()
    }

    /// Lets changes of policy go in steps from now on: droplets get their programs. Returns the VPCs in which a step
    /// waits for acks of these.
    pub fn stage_policies(&mut self, now: u64) -> Vec<String> {
        self.roll_out(now);
        self.enforcement.is_staged = true;
        self.step_all(|world, vpc, rollout| {
            let waits = rollout.take_over(&world.enforcement.policies);
            world.take_news(vpc, rollout);
            waits
        })
    }

    /// Takes a step in each VPC. `step` returns whether the VPC waits for acks. Returns the VPCs that do.
    fn step_all(
        &mut self,
        mut step: impl FnMut(&mut Self, &str, &mut Rollout<EndpointName>) -> bool,
    ) -> Vec<String> {
        let mut rollouts = std::mem::take(&mut self.enforcement.rollouts);
        let mut waiting = Vec::new();
        rollouts.change_all(|vpc, rollout| {
            if step(self, vpc, rollout) {
                waiting.push(vpc.to_owned());
            }
        });
        self.enforcement.rollouts = rollouts;
        waiting
    }

    /// Whether [`Self::roll_out`] would change something now.
    pub fn has_policy_news(&self) -> bool {
        let enforcement = &self.enforcement;
        let has_changed = enforcement.policies.has_touched()
            || enforcement.has_other_nodes
            || enforcement.known_served.is_stale();
        has_changed && !enforcement.is_idle()
            || !enforcement.stale.is_empty()
            || enforcement.rollouts.has_dirty()
    }

    /// Whether there is policy at all, so that [`Self::roll_out`] must be called now and then.
    pub fn has_policies(&self) -> bool {
        !self.enforcement.is_idle()
    }

    /// Applies policies to the endpoints of which they may say something else, and begins rounds. Returns the VPCs in
    /// which a step waits for acks of what the next flush sends. One call does a bounded amount of work: see
    /// [`Self::has_policy_news`].
    pub fn roll_out(&mut self, now: u64) -> Vec<String> {
        if self.enforcement.is_idle() {
            self.enforcement.policies.take_touched();
            self.enforcement.stale.clear();
            self.enforcement.is_complete = false;
            return Vec::new();
        }
        if std::mem::take(&mut self.enforcement.has_other_nodes) {
            let nodes = self.nodes_with_endpoints();
            self.enforcement.policies.set_nodes(nodes);
        }
        self.renew_served();
        self.apply_fresh();
        self.apply_stale();
        let unfinished = self.vpcs_of_stale();
        let waiting = self.step_all(|world, vpc, rollout| {
            if unfinished.contains(vpc) {
                return false;
            }
            world.enforce(vpc, rollout);
            let waits = if world.enforcement.is_staged {
                rollout.begin(&world.enforcement.policies, now)
            } else {
                rollout.publish_all(now);
                false
            };
            world.take_news(vpc, rollout);
            if rollout.take_freed() {
                world.apply_closed(vpc);
            }
            waits
        });
        self.forget_policies();
        waiting
    }

    /// Goes on in a VPC in which all droplets have acked. Returns whether its next step waits for acks of what the next
    /// flush sends.
    pub fn policies_acked(&mut self, vpc: &str) -> bool {
        let Some(mut rollout) = self.enforcement.rollouts.remove(vpc) else {
            return false;
        };
        let waits = rollout.acked();
        self.take_news(vpc, &mut rollout);
        self.enforcement.rollouts.insert(vpc, rollout);
        waits
    }

    /// Notes that a droplet knows other content under the id of a class or set. Returns whether [`Self::roll_out`]
    /// gives the content another id.
    pub fn refuse_policy_id(&mut self, key: &Key) -> bool {
        let vpc = key.vni().and_then(|vni| self.by_vni.get(&vni)?.first());
        let Some(vpc) = vpc else {
            return false;
        };
        let is_refused = self.enforcement.rollouts.change(vpc, |rollout| match key {
            Key::Class(_, id) => rollout.refuse_class(*id),
            Key::PolicySet(_, id) => rollout.refuse_set(*id),
            _ => false,
        });
        is_refused.unwrap_or_default()
    }

    /// Whether droplets may still lack what they judge packets of an endpoint by, which isn't ready yet.
    pub fn is_policy_pending(&self, name: &EndpointName) -> bool {
        let enforcement = &self.enforcement;
        if enforcement.is_idle() {
            return false;
        }
        let endpoint = self.endpoints.get(name);
        let is_unseen = endpoint.is_some_and(|endpoint| endpoint.profile.is_none() && !endpoint.is_host);
        let rollout = enforcement.rollout_of(name);
        is_unseen || rollout.is_some_and(|rollout| rollout.is_pending(name))
    }

    /// Returns the endpoints that too many rules apply to since the last call.
    pub fn take_newly_closed(&mut self) -> BTreeSet<EndpointName> {
        std::mem::take(&mut self.enforcement.newly_closed)
    }

    /// Yields the endpoints of a VPC that are in a rollout.
    fn judged_of(&self, vpc: &str) -> impl Iterator<Item = &EndpointName> {
        let homes = &self.enforcement.homes;
        self.endpoints_of_vpc(vpc)
            .filter(|name| homes.contains_key(*name))
    }

    /// Returns the endpoints of a VPC that are not ready yet.
    pub fn unready_of(&self, vpc: &str) -> Vec<EndpointName> {
        let unready = self
            .judged_of(vpc)
            .filter(|name| self.endpoints.get(*name).is_some_and(|endpoint| !endpoint.ready));
        unready.cloned().collect()
    }

    /// Returns what the row of a VPC says that endpoints keep of an earlier leader's policy.
    pub(super) fn kept_of(&self, vpc: &str) -> Kept {
        let rollout = self.enforcement.rollouts.get(vpc);
        rollout.map(Rollout::kept).unwrap_or_default()
    }

    /// Returns what the local row of an endpoint says.
    pub(super) fn assignment(&self, name: &EndpointName) -> Assignment {
        let rollout = self.enforcement.rollout_of(name);
        rollout.map(|rollout| rollout.published(name)).unwrap_or_default()
    }

    /// Returns an endpoint with what policies see of it, see [`member`].
    pub(super) fn seen<'a>(&'a self, name: &'a EndpointName) -> Option<(&'a Endpoint, Member<'a>)> {
        let endpoint = self.endpoints.get(name)?;
        let network = self.networks.get(&endpoint.network)?;
        Some((endpoint, member(name, endpoint, &network.vpc)?))
    }

    /// Enforces policy in a VPC if all its droplets can.
    fn enforce(&self, vpc: &str, rollout: &mut Rollout<EndpointName>) {
        let outdated = &self.enforcement.outdated;
        let can = || {
            let droplets = self.endpoint_droplets_of(vpc);
            outdated
                .iter()
                .all(|droplet| !droplets.contains(droplet.as_str()))
        };
        if !rollout.is_enforced() && (outdated.is_empty() || can()) {
            rollout.enforce();
        }
    }

    fn take_all_news(&mut self, vpcs: &BTreeSet<String>) {
        for vpc in vpcs {
            if let Some(mut rollout) = self.enforcement.rollouts.remove(vpc) {
                self.take_news(vpc, &mut rollout);
                self.enforcement.rollouts.insert(vpc, rollout);
            }
        }
    }

    /// Touches what changed in a VPC.
    fn take_news(&mut self, vpc: &str, rollout: &mut Rollout<EndpointName>) {
        let news = rollout.take_news();
        self.dirty.extend(news.endpoints.into_iter().map(Owner::Endpoint));
        if news.has_other_kept {
            self.touch_vpc(vpc);
        }
        if news.classes.is_empty() && news.sets.is_empty() {
            return;
        }
        let classes = news.classes.into_iter().map(SharedId::Class);
        let sets = news.sets.into_iter().map(SharedId::Set);
        self.shared.touch(vpc, classes.chain(sets));
    }

    /// Forgets what no set in use names any more, and everything when no policy is left.
    fn forget_policies(&mut self) {
        let enforcement = &mut self.enforcement;
        if enforcement.policies.has_retired() {
            let (mut groups, mut names) = (BTreeSet::new(), BTreeSet::new());
            for rollout in enforcement.rollouts.values() {
                rollout.add_named(&mut groups, &mut names);
            }
            enforcement.policies.forget_retired(&groups, &names);
        }
        if enforcement.policies.is_empty() && enforcement.rollouts.values().all(Rollout::is_over) {
            enforcement.rollouts = Rollouts::default();
            enforcement.homes.clear();
            enforcement.stale.clear();
            enforcement.forget_served();
            enforcement.is_complete = false;
            enforcement.policies.take_touched();
        }
    }

    /// Notes that other droplets may have endpoints of a VPC now, or that its number is another one.
    pub(super) fn touch_policy_rows(&mut self, vpc: &str) {
        if self.enforcement.rollouts.contains_key(vpc) {
            self.shared.touch(vpc, []);
        }
    }

    /// Applies policies again to the endpoints of a network, whose VPC may be another one now.
    pub(super) fn touch_policies_of(&mut self, network: &str) {
        // Nodes may have endpoints of the network.
        self.enforcement.has_other_nodes = true;
        let members = self.members.get(network).into_iter().flat_map(BTreeMap::values);
        self.enforcement.fresh.extend(members.flatten().cloned());
    }
}

/// Returns an endpoint as policies see it; none while it has no address or its pod has not been seen.
fn member<'a>(name: &'a EndpointName, endpoint: &'a Endpoint, vpc: &'a str) -> Option<Member<'a>> {
    static HOST: LazyLock<Profile> = LazyLock::new(Profile::default);
    let profile = endpoint.profile.as_deref();
    let profile = profile.or(endpoint.is_host.then_some(&*HOST))?;
    endpoint.is_member().then_some(Member {
        namespace: &name.0,
        labels: &profile.labels,
        ports: &profile.ports,
        vpc,
        network: &endpoint.network,
        on_host_network: endpoint.is_host,
    })
}
