//! The kinds of which objects are collected. Secrets are not among them.

use kube::core::{ApiResource, GroupVersionKind};
use thuban_api::{HEARTBEAT_NAMESPACE, crds, load_balancer_crds};

/// Where objects of a kind are looked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Within {
    /// They have no namespace.
    Cluster,
    /// In all namespaces, or in the one that the user named.
    Namespaces,
    /// In Thuban's own namespace.
    System,
    /// In another namespace of Thuban's.
    Own(&'static str),
}

/// A kind.
#[derive(Clone, Debug)]
pub struct Kind {
    pub resource: ApiResource,
    pub within: Within,
}

impl Kind {
    fn new(group: &str, version: &str, kind: &str, plural: &str, within: Within) -> Self {
        let kind = GroupVersionKind::gvk(group, version, kind);
        Self {
            resource: ApiResource::from_gvk_with_plural(&kind, plural),
            within,
        }
    }

    /// Returns the name of the resource, as in `kubectl get`.
    pub fn name(&self) -> String {
        match self.resource.group.as_str() {
            "" => self.resource.plural.clone(),
            group => format!("{}.{group}", self.resource.plural),
        }
    }
}

type Row = (&'static str, &'static str, &'static str, &'static str, Within);

/// Kinds that are not Thuban's: group, version, kind and resource.
const OTHERS: [Row; 13] = [
    ("", "v1", "Namespace", "namespaces", Within::Cluster),
    ("", "v1", "Node", "nodes", Within::Cluster),
    ("", "v1", "Pod", "pods", Within::Namespaces),
    ("", "v1", "Service", "services", Within::Namespaces),
    ("", "v1", "Event", "events", Within::Namespaces),
    (
        "discovery.k8s.io",
        "v1",
        "EndpointSlice",
        "endpointslices",
        Within::Namespaces,
    ),
    (
        "networking.k8s.io",
        "v1",
        "NetworkPolicy",
        "networkpolicies",
        Within::Namespaces,
    ),
    (
        "networking.k8s.io",
        "v1",
        "ServiceCIDR",
        "servicecidrs",
        Within::Cluster,
    ),
    (
        "policy.networking.k8s.io",
        "v1alpha2",
        "ClusterNetworkPolicy",
        "clusternetworkpolicies",
        Within::Cluster,
    ),
    ("apps", "v1", "Deployment", "deployments", Within::System),
    ("apps", "v1", "DaemonSet", "daemonsets", Within::System),
    ("coordination.k8s.io", "v1", "Lease", "leases", Within::System),
    (
        "coordination.k8s.io",
        "v1",
        "Lease",
        "leases",
        Within::Own(HEARTBEAT_NAMESPACE),
    ),
];

/// Returns the kinds that are collected.
pub fn all() -> Vec<Kind> {
    let crds = crds().into_iter().chain(load_balancer_crds());
    let thuban = crds.map(|crd| {
        let (spec, names) = (&crd.spec, &crd.spec.names);
        let within = if spec.scope == "Namespaced" {
            Within::Namespaces
        } else {
            Within::Cluster
        };
        let version = spec.versions.first();
        let version = version.map_or("v1alpha1", |version| version.name.as_str());
        Kind::new(&spec.group, version, &names.kind, &names.plural, within)
    });
    let others = OTHERS.into_iter();
    let others =
        others.map(|(group, version, kind, plural, within)| Kind::new(group, version, kind, plural, within));
    thuban.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::{Within, all};

    #[test]
    fn thubans_kinds_are_collected_and_secrets_are_not() {
        let kinds = all();
        let within = |name: &str| {
            let mut found = kinds.iter().filter(|kind| kind.name() == name);
            found.next().map(|kind| kind.within.clone())
        };
        assert_eq!(within("vpcs.thuban.dev"), Some(Within::Cluster));
        assert_eq!(within("endpoints.thuban.dev"), Some(Within::Namespaces));
        assert_eq!(within("vips.thuban.dev"), Some(Within::Namespaces));
        assert_eq!(within("pods"), Some(Within::Namespaces));
        // A ConfigMap may have anything.
        assert_eq!(within("secrets").or(within("configmaps")), None);
    }
}
