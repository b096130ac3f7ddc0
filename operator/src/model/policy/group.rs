//! Groups: the pods that a peer or the subject of a policy selects.

use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use sha2::{Digest, Sha256};
use thuban_rows::SHARED_SERVICE_GROUP;

use super::Member;
use super::malformed::Malformed;
use super::selector::{Labels, Selector};

/// The label of each pod that says its VPC. What the pod itself says is not asked.
pub const VPC_LABEL: &str = "thuban.dev/vpc";
/// The label of each pod that says its network, as [`VPC_LABEL`].
pub const NETWORK_LABEL: &str = "thuban.dev/network";
/// The label and value of a peer that is clients of other VPCs, by a Service that these share.
const SHARED_SERVICE: [&str; 2] = ["thuban.dev/by", "shared-service"];

/// The pods of some namespaces whose labels match. Groups of equal content are equal and have one id, in whatever
/// policies they are.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    id: u64,
    namespaces: Namespaces,
    pods: Selector,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Namespaces {
    /// The policy's own.
    Named(String),
    /// By the labels of namespaces.
    Selected(Selector),
}

impl Group {
    pub fn new(namespaces: Namespaces, pods: Selector) -> Self {
        // Neither a namespace's name nor a selector has a colon, so the text says which group it is.
        let text = format!("{namespaces}: {pods}");
        let hash = Sha256::digest(text);
        let id = hash[..8].iter().fold(0, |id, byte| id << 8 | u64::from(*byte));
        Self { id, namespaces, pods }
    }

    /// Reads a group of a namespace's pods; without a selector, of all of them.
    pub fn in_namespace(namespace: &str, pods: Option<&LabelSelector>) -> Result<Self, Malformed> {
        let pods = pods.map(Selector::read).transpose()?.unwrap_or_default();
        Ok(Self::new(Namespaces::Named(namespace.to_owned()), pods))
    }

    /// Returns the group as peers mean it. One of pods with a single label, whatever their namespace, may be clients by
    /// a shared Service. No pod is in that group, and no other group has them: they are pods of other VPCs.
    pub fn into_peer(self) -> Self {
        let [key, value] = SHARED_SERVICE;
        let is_any = match &self.namespaces {
            Namespaces::Named(_) => true,
            Namespaces::Selected(selector) => *selector == Selector::default(),
        };
        if !is_any || self.pods != Selector::of_label(key, value) {
            return self;
        }
        Self {
            id: SHARED_SERVICE_GROUP,
            // No namespace has this name.
            namespaces: Namespaces::Named(String::new()),
            pods: self.pods,
        }
    }

    pub const fn id(&self) -> u64 {
        self.id
    }

    pub const fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    pub const fn pods(&self) -> &Selector {
        &self.pods
    }

    pub fn selects(&self, pod: &Selectable) -> bool {
        let is_there = match &self.namespaces {
            Namespaces::Named(name) => name == pod.namespace,
            Namespaces::Selected(selector) => selector.matches(pod.namespace_labels),
        };
        is_there && self.pods.matches(&pod.labels)
    }
}

impl fmt::Display for Namespaces {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Named(name) => write!(formatter, "namespace {name}"),
            Self::Selected(selector) => write!(formatter, "namespaces {selector}"),
        }
    }
}

/// What selectors see of a pod.
pub struct Selectable<'a> {
    pub namespace: &'a str,
    pub namespace_labels: &'a Labels,
    /// With those of its VPC and network.
    pub labels: Labels,
}

impl<'a> Selectable<'a> {
    pub fn new(member: &Member<'a>, namespace_labels: &'a Labels) -> Self {
        let mut labels = member.labels.clone();
        labels.insert(VPC_LABEL.to_owned(), member.vpc.to_owned());
        labels.insert(NETWORK_LABEL.to_owned(), member.network.to_owned());
        Self {
            namespace: member.namespace,
            namespace_labels,
            labels,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Group, Labels, Namespaces, SHARED_SERVICE_GROUP, Selectable, Selector};

    fn selector(value: Value) -> Selector {
        Selector::read(&serde_json::from_value(value).unwrap()).unwrap()
    }

    #[test]
    fn the_id_of_a_group_is_the_hash_of_its_content() {
        let web = || selector(json!({"matchLabels": {"app": "web"}}));
        let named = |name: &str| Group::new(Namespaces::Named(name.to_owned()), web());
        // printf 'namespace red: app in (web)' | sha256sum
        assert_eq!(format!("{:016x}", named("red").id()), "66a3b1d2814278e2");
        assert_eq!(named("red"), named("red"));
        assert_ne!(named("red").id(), named("blue").id());
        let red = selector(json!({"matchExpressions": [{"key": "red", "operator": "Exists"}]}));
        let selected = Group::new(Namespaces::Selected(red), web());
        assert_ne!(selected.id(), named("red").id());
    }

    #[test]
    fn clients_by_a_shared_service_are_named_by_one_label_alone() {
        let by = || selector(json!({"matchLabels": {"thuban.dev/by": "shared-service"}}));
        let named = || Namespaces::Named("red".to_owned());
        let group = Group::new(named(), by()).into_peer();
        assert_eq!(group.id(), SHARED_SERVICE_GROUP);
        let any = Namespaces::Selected(Selector::default());
        assert_eq!(Group::new(any, by()).into_peer(), group);
        let none = Labels::new();
        let pod = Selectable {
            namespace: "red",
            namespace_labels: &none,
            labels: [("thuban.dev/by".to_owned(), "shared-service".to_owned())].into(),
        };
        assert!(!group.selects(&pod), "no pod gives itself out for one");
        let team = Namespaces::Selected(selector(json!({"matchLabels": {"team": "red"}})));
        let all = selector(json!({"matchExpressions": [{"key": "thuban.dev/by", "operator": "Exists"}]}));
        let two = selector(json!({"matchLabels": {"thuban.dev/by": "shared-service", "app": "web"}}));
        for (namespaces, pods) in [
            (team, by()),
            (named(), all),
            (named(), two),
            (named(), Selector::default()),
        ] {
            let group = Group::new(namespaces, pods);
            assert_eq!(group.clone().into_peer(), group);
        }
    }
}
