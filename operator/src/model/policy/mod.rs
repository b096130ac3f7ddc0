//! Network policy: from NetworkPolicies and ClusterNetworkPolicies to what rows say of a pod.
//!
//! A *group* is what one peer of a policy selects. A pod's *class* is the groups that it is in, and those of its ports
//! that rules name. A *set* is all that applies to a pod in one direction.
//!
//! Invariant: what [`Policies::apply`] returns depends on the present objects alone, not on what was there before or in
//! which order they came. There is one exception: see [`Policies::that_retain`]. A namespace that isn't known has no
//! labels.
//!
//! | file | what it owns |
//! |---|---|
//! | `selector`, `group` | whom a policy selects |
//! | `index` | how a pod finds the groups that it is in |
//! | `network_policy`, `cluster_policy` | what each kind says, as rules |
//! | `compiled`, `malformed` | what both kinds have in common |
//! | `limits`, `set_room` | how much the NetworkPolicies of a namespace may say together |
//! | `profile` | what a pod has that policies see, shared by pods that have the same |
//! | `sets` | content of classes and sets, and their ids |
//! | `decide` | what a set says of one packet, for people |
//! | `served` | what sets say of services that nodes serve |
//! | `registry` | the contents that a VPC has, by id |
//! | `rollout` | the steps in which the endpoints of a VPC pass from old policies to new ones |
//! | `oracle` | the same once more, simple and slow, for tests |

mod cluster_policy;
mod compiled;
mod decide;
mod group;
mod index;
mod limits;
mod malformed;
mod network_policy;
#[cfg(any(test, feature = "oracle"))]
pub mod oracle;
mod profile;
mod registry;
mod rollout;
mod selector;
mod served;
mod set_room;
mod sets;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use k8s_openapi::api::networking::v1::NetworkPolicySpec;
use thuban_api::ClusterNetworkPolicySpec;
use thuban_rows::NamedPort;

pub use cluster_policy::Node;
pub use compiled::Direction;
pub use decide::{Decision, Peer};
pub use group::{NETWORK_LABEL, VPC_LABEL};
pub use limits::Refused;
pub use malformed::{Malformed, Problem};
pub use profile::Profile;
pub use rollout::{Assignment, News, Rollout, Wanted};
pub use selector::Labels;
pub use served::{BackendKind, Served, ServedBackend, ServedPort};
pub use sets::{ClassContent, SetContent, TooManyRules};

use compiled::{Compiled, Policy};
use group::{Group, Namespaces, Selectable};
use index::Index;
use limits::Share;

/// All policies, and the objects that they speak of.
#[derive(Debug, Default)]
pub struct Policies {
    namespaces: HashMap<String, Labels>,
    nodes: Vec<Node>,
    /// Those that change with the nodes.
    of_nodes: BTreeMap<String, ClusterNetworkPolicySpec>,
    /// The services that nodes serve for the pods of each VPC; none: no such service.
    served: HashMap<String, Vec<Served>>,
    /// By [`Policy::name`]: that of a NetworkPolicy has a slash, that of a ClusterNetworkPolicy hasn't.
    by_name: HashMap<Arc<str>, Arc<Policy>>,
    /// The NetworkPolicies of each namespace.
    shares: HashMap<String, Share>,
    /// NetworkPolicies that count, or don't, because of a change of another one.
    rejudged: BTreeSet<Arc<str>>,
    subjects: Index<Arc<str>>,
    peers: Index<()>,
    /// How many policies have a group as a peer, or name a port of others.
    groups: Counts<Arc<Group>>,
    names: Counts<Arc<str>>,
    is_retaining: bool,
    /// The groups and names that no policy has any more, and classes still do.
    retired_groups: BTreeSet<Arc<Group>>,
    retired_names: BTreeSet<Arc<str>>,
    touched: Touched,
    /// By the name of the policy.
    problems: BTreeMap<String, Malformed>,
    /// Grows with each change of a policy.
    version: u64,
    /// The version at which a policy changed last, by its name.
    versions: BTreeMap<Arc<str>, u64>,
}

/// The pods of which [`Policies::apply`] may say something else than before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Touched {
    pub all: bool,
    /// All pods of these namespaces.
    pub namespaces: BTreeSet<String>,
    /// All pods of these VPCs.
    pub vpcs: BTreeSet<String>,
}

impl Touched {
    pub fn is_empty(&self) -> bool {
        !self.all && self.namespaces.is_empty() && self.vpcs.is_empty()
    }

    fn note(&mut self, group: &Group) {
        match group.namespaces() {
            Namespaces::Named(name) => drop(self.namespaces.insert(name.clone())),
            Namespaces::Selected(_) => self.all = true,
        }
    }
}

/// A pod, as policies see it.
#[derive(Clone, Debug)]
pub struct Member<'a> {
    pub namespace: &'a str,
    pub labels: &'a Labels,
    pub ports: &'a BTreeSet<NamedPort>,
    pub vpc: &'a str,
    pub network: &'a str,
    /// No policy selects the pod, as peer or subject.
    pub on_host_network: bool,
}

/// What policies say of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub class: ClassContent,
    /// None: no policy has anything to say.
    pub ingress: Option<SetContent>,
    pub egress: Option<SetContent>,
    /// The directions in which all is denied, because a set can't have all rules.
    pub too_many: Vec<TooManyRules>,
}

impl Policies {
    /// Makes an empty collection in which classes keep groups and names that no policy has any more, until
    /// [`Self::forget_retired`]. Droplets may still judge by a set that names them.
    pub fn that_retain() -> Self {
        Self {
            is_retaining: true,
            ..Self::default()
        }
    }

    /// Whether there is no policy, and no class has a group or name of an earlier one.
    pub fn is_empty(&self) -> bool {
        self.by_name.is_empty() && self.retired_groups.is_empty() && self.retired_names.is_empty()
    }

    /// Returns what is wrong with the policy of a name: that of a NetworkPolicy is `namespace/name`.
    pub fn problem(&self, name: &str) -> Option<&Malformed> {
        self.problems.get(name)
    }

    /// Returns why a NetworkPolicy does not count although it is well-formed: its namespace has too many, or too large
    /// ones.
    pub fn refused(&self, name: &str) -> Option<Refused> {
        let (namespace, _) = name.split_once('/')?;
        self.shares.get(namespace)?.refused(name)
    }

    /// Returns the names of the NetworkPolicies of which [`Self::refused`] may say something else than before, because
    /// of a change of another one, since the last call.
    pub fn take_rejudged(&mut self) -> BTreeSet<Arc<str>> {
        std::mem::take(&mut self.rejudged)
    }

    /// Yields the names of the policies that are in force.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.by_name.keys().map(AsRef::as_ref)
    }

    /// Returns a number of all changes of policies so far.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Returns the version since which a policy of the name has been as it is; none: there is none in force.
    pub fn version_of(&self, name: &str) -> Option<u64> {
        self.versions.get(name).copied()
    }

    /// Returns the namespace in which a policy selects pods; none: in those that it selects by their labels.
    pub fn namespace_of(&self, name: &str) -> Option<&str> {
        match self.by_name.get(name)?.subject.namespaces() {
            Namespaces::Named(name) => Some(name),
            Namespaces::Selected(_) => None,
        }
    }

    /// Whether a policy selects a pod.
    pub fn selects(&self, name: &str, member: &Member) -> bool {
        let policy = self.by_name.get(name).filter(|_| !member.on_host_network);
        policy.is_some_and(|policy| policy.subject.selects(&self.selectable(member)))
    }

    /// Whether pods must be applied again.
    pub fn has_touched(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Returns the pods that must be applied again since the last call.
    pub fn take_touched(&mut self) -> Touched {
        std::mem::take(&mut self.touched)
    }

    pub fn has_retired(&self) -> bool {
        !self.retired_groups.is_empty() || !self.retired_names.is_empty()
    }

    /// Forgets the groups and names that no policy has any more, except for these.
    pub fn forget_retired(&mut self, groups: &BTreeSet<u64>, names: &BTreeSet<Arc<str>>) {
        let (kept, gone) = std::mem::take(&mut self.retired_groups)
            .into_iter()
            .partition(|group| groups.contains(&group.id()));
        self.retired_groups = kept;
        let gone: BTreeSet<Arc<Group>> = gone;
        for group in &gone {
            self.peers.remove(group, &());
            self.touched.note(group);
        }
        let count = self.retired_names.len();
        self.retired_names.retain(|name| names.contains(name));
        self.touched.all |= self.retired_names.len() < count;
    }

    /// Sets or removes a NetworkPolicy, which was created at that second. An error names the first field that isn't
    /// understood. The policy is in force all the same, and fails closed there. It is not in force if that field is its
    /// tier or its subject.
    ///
    /// If a namespace has more policies than `limits` allows, the oldest count: see [`Self::refused`].
    pub fn set_network_policy(
        &mut self,
        namespace: &str,
        name: &str,
        created: i64,
        spec: Option<&NetworkPolicySpec>,
    ) -> Result<(), Malformed> {
        let compiled = spec.map(|spec| network_policy::compile(namespace, name, spec));
        let Compiled { policy, problem } = compiled.unwrap_or_default();
        let given = spec.zip(policy);
        let given = given.map(|(spec, policy)| (created, limits::entries(spec), policy));
        let name: Arc<str> = format!("{namespace}/{name}").into();
        let share = self.shares.entry(namespace.to_owned()).or_default();
        let seen = share.set(namespace, &name, given);
        if share.is_empty() {
            self.shares.remove(namespace);
        }
        for (seen, policy) in seen {
            self.replace(&seen, policy);
            if seen != name {
                self.rejudged.insert(seen);
            }
        }
        self.note(&name, problem)
    }

    /// Sets or removes a ClusterNetworkPolicy. As [`Policies::set_network_policy`].
    pub fn set_cluster_policy(
        &mut self,
        name: &str,
        spec: Option<&ClusterNetworkPolicySpec>,
    ) -> Result<(), Malformed> {
        self.of_nodes.remove(name);
        if let Some(spec) = spec.filter(|spec| cluster_policy::is_of_nodes(spec)) {
            self.of_nodes.insert(name.to_owned(), spec.clone());
        }
        let compiled = spec.map(|spec| cluster_policy::compile(name, spec, &self.nodes));
        let Compiled { policy, problem } = compiled.unwrap_or_default();
        self.replace(name, policy.map(Arc::new));
        self.note(name, problem)
    }

    /// Sets the labels of a namespace, or removes it.
    pub fn set_namespace(&mut self, name: &str, labels: Option<Labels>) {
        if self.namespaces.get(name) == labels.as_ref() {
            return;
        }
        self.touched.namespaces.insert(name.to_owned());
        match labels {
            Some(labels) => self.namespaces.insert(name.to_owned(), labels),
            None => self.namespaces.remove(name),
        };
    }

    /// Sets all nodes.
    pub fn set_nodes(&mut self, nodes: Vec<Node>) {
        if self.nodes == nodes {
            return;
        }
        self.nodes = nodes;
        for (name, spec) in std::mem::take(&mut self.of_nodes) {
            // What is malformed was told when the policy was set.
            let _ = self.set_cluster_policy(&name, Some(&spec));
        }
    }

    /// Sets the services that nodes serve for the pods of a VPC.
    pub fn set_served(&mut self, vpc: &str, served: Vec<Served>) {
        if self.served(vpc) == served {
            return;
        }
        self.touched.vpcs.insert(vpc.to_owned());
        if served.is_empty() {
            self.served.remove(vpc);
        } else {
            self.served.insert(vpc.to_owned(), served);
        }
    }

    /// Forgets the services that nodes serve: no policy applies to a pod.
    pub fn forget_served(&mut self) {
        self.served.clear();
    }

    /// Returns the services that nodes serve for the pods of a VPC.
    pub fn served(&self, vpc: &str) -> &[Served] {
        self.served.get(vpc).map_or(&[], Vec::as_slice)
    }

    /// Returns what the policies say of a pod.
    pub fn apply(&self, member: &Member) -> Applied {
        self.match_all(member).0
    }

    /// Returns what the policies say of a pod, and against how many groups the pod was matched for that.
    pub fn match_all(&self, member: &Member) -> (Applied, usize) {
        if member.on_host_network {
            return (Applied::default(), 0);
        }
        let pod = self.selectable(member);
        let (class, matched) = self.match_class(member, &pod);
        let (selecting, matched_subjects) = self.subjects.selecting(&pod);
        let selecting = selecting.into_iter();
        let policies = selecting.filter_map(|(_, name)| self.by_name.get(name));
        let mut policies: Vec<&Policy> = policies.map(AsRef::as_ref).collect();
        policies.sort_unstable_by(|one, other| one.place().cmp(&other.place()));
        let mut too_many = Vec::new();
        let mut set = |direction| {
            let content = SetContent::of(
                direction,
                &policies,
                member.vpc,
                member.ports,
                self.served(member.vpc),
            );
            content.unwrap_or_else(|error| {
                too_many.push(error);
                Some(SetContent::deny_all(direction))
            })
        };
        let (ingress, egress) = (set(Direction::Ingress), set(Direction::Egress));
        let applied = Applied {
            class,
            ingress,
            egress,
            too_many,
        };
        (applied, matched + matched_subjects)
    }

    /// Returns the class of a pod.
    pub fn class(&self, member: &Member) -> ClassContent {
        if member.on_host_network {
            return ClassContent::default();
        }
        self.match_class(member, &self.selectable(member)).0
    }

    fn selectable<'a>(&'a self, member: &Member<'a>) -> Selectable<'a> {
        static UNKNOWN: Labels = Labels::new();
        Selectable::new(member, self.namespaces.get(member.namespace).unwrap_or(&UNKNOWN))
    }

    /// Returns the class of a pod, and against how many groups it was matched.
    fn match_class(&self, member: &Member, pod: &Selectable) -> (ClassContent, usize) {
        let named = member.ports.iter().filter(|port| self.has_name(&port.name));
        let (peers, matched) = self.peers.selecting(pod);
        let class = ClassContent {
            groups: peers.into_iter().map(|(group, ())| group.id()).collect(),
            names: named.cloned().collect(),
        };
        (class, matched)
    }

    /// Whether classes have ports of the name.
    fn has_name(&self, name: &str) -> bool {
        self.names.has(name) || self.retired_names.contains(name)
    }

    /// Puts a policy in the place of the one of its name.
    fn replace(&mut self, name: &str, policy: Option<Arc<Policy>>) {
        if self.by_name.get(name) == policy.as_ref() {
            return;
        }
        self.version += 1;
        // What stays must not go and come again, or all pods would be touched.
        let old = self.by_name.remove(name);
        self.versions.remove(name);
        if let Some(new) = policy {
            self.add(new);
        }
        if let Some(old) = old {
            self.remove(&old);
        }
    }

    /// Notes what is wrong with the policy of a name, and returns it.
    fn note(&mut self, name: &str, problem: Option<Malformed>) -> Result<(), Malformed> {
        let Some(problem) = problem else {
            self.problems.remove(name);
            return Ok(());
        };
        self.problems.insert(name.to_owned(), problem.clone());
        Err(problem)
    }

    fn add(&mut self, new: Arc<Policy>) {
        self.touched.note(&new.subject);
        self.subjects.insert(&new.subject, &new.name);
        for group in &new.groups {
            if self.groups.add(group) && !self.retired_groups.remove(group) {
                self.peers.insert(group, &());
                self.touched.note(group);
            }
        }
        for name in new.names() {
            if self.names.add(&name) && !self.retired_names.remove(&name) {
                self.touched.all = true;
            }
        }
        self.versions.insert(Arc::clone(&new.name), self.version);
        self.by_name.insert(Arc::clone(&new.name), new);
    }

    fn remove(&mut self, old: &Policy) {
        self.touched.note(&old.subject);
        // The new policy of the name may have the same subject.
        let new = self.by_name.get(&old.name);
        if new.is_none_or(|new| new.subject != old.subject) {
            self.subjects.remove(&old.subject, &old.name);
        }
        for group in &old.groups {
            if !self.groups.remove(group) {
                continue;
            }
            if self.is_retaining {
                self.retired_groups.insert(Arc::clone(group));
            } else {
                self.peers.remove(group, &());
                self.touched.note(group);
            }
        }
        for name in old.names() {
            if !self.names.remove(&name) {
                continue;
            }
            if self.is_retaining {
                self.retired_names.insert(name);
            } else {
                self.touched.all = true;
            }
        }
    }
}

/// How often there is a thing.
#[derive(Debug)]
struct Counts<T>(BTreeMap<T, usize>);

impl<T> Default for Counts<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T: Ord + Clone> Counts<T> {
    /// Returns whether the thing is the first of its kind.
    fn add(&mut self, thing: &T) -> bool {
        let count = self.0.entry(thing.clone()).or_default();
        *count += 1;
        *count == 1
    }

    /// Returns whether the thing was the last of its kind.
    fn remove(&mut self, thing: &T) -> bool {
        let Some(count) = self.0.get_mut(thing) else {
            return false;
        };
        *count -= 1;
        if *count > 0 {
            return false;
        }
        self.0.remove(thing);
        true
    }

    fn has<Q: Ord + ?Sized>(&self, thing: &Q) -> bool
    where
        T: std::borrow::Borrow<Q>,
    {
        self.0.contains_key(thing)
    }
}
