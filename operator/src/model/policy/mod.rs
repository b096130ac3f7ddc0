//! Network policy: from NetworkPolicies and ClusterNetworkPolicies to what rows say of a pod.
//!
//! A *group* is what one peer of a policy selects. A pod's *class* is the groups that it is in, and those of its ports
//! that rules name. A *set* is all that applies to a pod in one direction.
//!
//! Invariant: what [`Policies::apply`] returns depends on the present objects alone, not on what was there before or in
//! which order they came. A namespace that isn't known has no labels.
//!
//! | file | what it owns |
//! |---|---|
//! | `selector`, `group` | whom a policy selects |
//! | `index` | how a pod finds the groups that it is in |
//! | `network_policy`, `cluster_policy` | what each kind says, as rules |
//! | `compiled`, `malformed` | what both kinds have in common |
//! | `sets` | content of classes and sets, and their ids |
//! | `oracle` | the same once more, simple and slow, for tests |

mod cluster_policy;
mod compiled;
mod group;
mod index;
mod malformed;
mod network_policy;
#[cfg(any(test, feature = "oracle"))]
pub mod oracle;
mod selector;
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
pub use group::{NETWORK_LABEL, VPC_LABEL};
pub use malformed::{Malformed, Problem};
pub use selector::Labels;
pub use sets::{ClassContent, SetContent, TooManyRules};

use compiled::{Compiled, Policy};
use group::{Group, Selectable};
use index::Index;

/// All policies, and the objects that they speak of.
#[derive(Default)]
pub struct Policies {
    namespaces: HashMap<String, Labels>,
    nodes: Vec<Node>,
    /// Those that change with the nodes.
    of_nodes: BTreeMap<String, ClusterNetworkPolicySpec>,
    /// By [`Policy::name`]: that of a NetworkPolicy has a slash, that of a ClusterNetworkPolicy hasn't.
    by_name: HashMap<Arc<str>, Policy>,
    subjects: Index<Arc<str>>,
    peers: Index<()>,
    /// How many policies have a group as a peer, or name a port of others.
    groups: Counts<Arc<Group>>,
    names: Counts<Arc<str>>,
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
    /// Sets or removes a NetworkPolicy. An error names the first field that isn't understood. The policy is in force
    /// all the same, and fails closed there. It is not in force if that field is its tier or its subject.
    pub fn set_network_policy(
        &mut self,
        namespace: &str,
        name: &str,
        spec: Option<&NetworkPolicySpec>,
    ) -> Result<(), Malformed> {
        let compiled = spec.map(|spec| network_policy::compile(namespace, name, spec));
        self.replace(&format!("{namespace}/{name}"), compiled)
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
        self.replace(name, compiled)
    }

    /// Sets the labels of a namespace, or removes it.
    pub fn set_namespace(&mut self, name: &str, labels: Option<Labels>) {
        match labels {
            Some(labels) => self.namespaces.insert(name.to_owned(), labels),
            None => self.namespaces.remove(name),
        };
    }

    /// Sets all nodes.
    pub fn set_nodes(&mut self, nodes: Vec<Node>) {
        self.nodes = nodes;
        for (name, spec) in std::mem::take(&mut self.of_nodes) {
            // What is malformed was told when the policy was set.
            let _ = self.set_cluster_policy(&name, Some(&spec));
        }
    }

    /// Returns what the policies say of a pod.
    pub fn apply(&self, member: &Member) -> Applied {
        if member.on_host_network {
            return Applied::default();
        }
        let unknown = Labels::new();
        let pod = Selectable::new(member, self.namespaces.get(member.namespace).unwrap_or(&unknown));
        let named = member
            .ports
            .iter()
            .filter(|port| self.names.has(port.name.as_str()));
        let class = ClassContent {
            groups: self.peers.selecting(&pod).map(|(group, ())| group.id()).collect(),
            names: named.cloned().collect(),
        };
        let selecting = self.subjects.selecting(&pod);
        let mut policies: Vec<&Policy> = selecting.filter_map(|(_, name)| self.by_name.get(name)).collect();
        policies.sort_unstable_by(|one, other| one.place().cmp(&other.place()));
        let mut too_many = Vec::new();
        let mut set = |direction| {
            let content = SetContent::of(direction, &policies, member.ports);
            content.unwrap_or_else(|error| {
                too_many.push(error);
                Some(SetContent::deny_all(direction))
            })
        };
        let (ingress, egress) = (set(Direction::Ingress), set(Direction::Egress));
        Applied {
            class,
            ingress,
            egress,
            too_many,
        }
    }

    fn replace(&mut self, name: &str, compiled: Option<Compiled>) -> Result<(), Malformed> {
        if let Some(old) = self.by_name.remove(name) {
            self.subjects.remove(&old.subject, &old.name);
            for group in old.groups.iter().filter(|group| self.groups.remove(group)) {
                self.peers.remove(group, &());
            }
            for name in &old.names() {
                self.names.remove(name);
            }
        }
        let Some(Compiled { policy, problem }) = compiled else {
            return Ok(());
        };
        if let Some(new) = policy {
            self.subjects.insert(&new.subject, &new.name);
            for group in new.groups.iter().filter(|group| self.groups.add(group)) {
                self.peers.insert(group, &());
            }
            for name in &new.names() {
                self.names.add(name);
            }
            self.by_name.insert(Arc::clone(&new.name), new);
        }
        problem.map_or(Ok(()), Err)
    }
}

/// How often there is a thing.
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
