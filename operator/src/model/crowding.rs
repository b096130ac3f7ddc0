//! Decides on which droplets other VPCs have all free addresses of a network, how the scheduler hears of that, and
//! which pods may be moved away.
//!
//! Invariant: a network without any free address is full everywhere, and crowded out nowhere: no other node would help.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Pod, PodAffinityTerm};
use kube::ResourceExt;

/// The beginning of the labels that the pod of transitd on a node has for each network that is crowded out there. The
/// network's name follows. Pods of the network keep off such a pod by a required anti-affinity
/// (`charts/thuban/templates/optional/placement.yaml`).
pub const LABEL_PREFIX: &str = "full.thuban.dev/";

/// Owners that replace a deleted pod, and count nothing: a Job takes a deleted pod for a failed one, and the pod of a
/// DaemonSet comes back to its node.
const REPLACING: [(&str, &str); 3] = [
    ("apps/v1", "ReplicaSet"),
    ("apps/v1", "StatefulSet"),
    ("v1", "ReplicationController"),
];

/// The names of the networks that are crowded out, by droplet.
pub type Crowded = BTreeMap<String, BTreeSet<String>>;

/// Returns the droplets that use all of the free addresses of a network. `droplets_using` names the droplets on which
/// any endpoint has an address.
pub fn crowded_out<'a>(
    free: impl IntoIterator<Item = IpAddr>,
    droplets_using: impl Fn(IpAddr) -> BTreeSet<&'a str>,
) -> BTreeSet<&'a str> {
    let mut users = free.into_iter().map(droplets_using);
    let mut crowded = users.next().unwrap_or_default();
    while !crowded.is_empty()
        && let Some(others) = users.next()
    {
        crowded.retain(|droplet| others.contains(droplet));
    }
    crowded
}

/// Returns the name of a network's label.
pub fn label(network: &str) -> String {
    format!("{LABEL_PREFIX}{network}")
}

/// Returns the networks that labels name.
pub fn networks_of(labels: &BTreeMap<String, String>) -> BTreeSet<String> {
    let names = labels.keys().filter_map(|name| name.strip_prefix(LABEL_PREFIX));
    names.map(str::to_owned).collect()
}

/// Returns the labels of networks.
pub fn labels_of(networks: &BTreeSet<String>) -> BTreeMap<String, String> {
    let labels = networks.iter().map(|network| (label(network), String::new()));
    labels.collect()
}

/// Whether the pod can be deleted so that its controller makes another one, which the scheduler sends to a node without
/// the label. The caller knows that nothing of the pod has started.
pub fn is_movable(pod: &Pod, label: &str) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    let owners = pod.owner_references().iter();
    let mut controllers = owners.filter(|owner| owner.controller == Some(true));
    pod.metadata.deletion_timestamp.is_none()
        && phase == Some("Pending")
        && keeps_off(pod, label)
        && controllers.any(|owner| REPLACING.contains(&(owner.api_version.as_str(), owner.kind.as_str())))
}

/// Whether the pod has a required anti-affinity to pods with the label.
fn keeps_off(pod: &Pod, label: &str) -> bool {
    let affinity = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref());
    let affinity = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let terms = affinity.and_then(|affinity| {
        affinity
            .required_during_scheduling_ignored_during_execution
            .as_deref()
    });
    terms.unwrap_or_default().iter().any(|term| names(term, label))
}

fn names(term: &PodAffinityTerm, label: &str) -> bool {
    let selector = term.label_selector.as_ref();
    let expressions = selector.and_then(|selector| selector.match_expressions.as_deref());
    let mut expressions = expressions.unwrap_or_default().iter();
    expressions.any(|expression| expression.key == label && expression.operator == "Exists")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use k8s_openapi::api::core::v1::Pod;
    use serde_json::{Value, json};

    use super::{crowded_out, is_movable, label, labels_of, networks_of};

    fn address(last: u8) -> IpAddr {
        [10, 0, 0, last].into()
    }

    #[test]
    fn a_network_is_crowded_out_where_all_free_addresses_are_used() {
        let using = |address: IpAddr| -> BTreeSet<&str> {
            let droplets: &[&str] = match address.to_string().as_str() {
                "10.0.0.2" => &["a", "b", "c"],
                "10.0.0.3" => &["a", "b"],
                "10.0.0.4" => &["b"],
                _ => &[],
            };
            droplets.iter().copied().collect()
        };
        let crowded = |free: &[u8]| -> Vec<&str> {
            let free = free.iter().map(|last| address(*last));
            crowded_out(free, using).into_iter().collect()
        };
        assert_eq!(crowded(&[2]), ["a", "b", "c"]);
        assert_eq!(crowded(&[2, 3]), ["a", "b"]);
        assert_eq!(crowded(&[2, 3, 4]), ["b"]);
        assert!(crowded(&[2, 3, 4, 5]).is_empty(), "one is free on all nodes");
        assert!(crowded(&[]).is_empty(), "the network is full everywhere");
    }

    #[test]
    fn no_further_address_is_looked_at_where_one_is_free() {
        let free = (2..=250).map(|last| {
            assert!(last <= 2, "{last} is looked at");
            address(last)
        });
        assert!(crowded_out(free, |_| BTreeSet::new()).is_empty());
    }

    #[test]
    fn labels_name_networks_and_no_other_labels_do() {
        let networks: BTreeSet<String> = ["red-web", "blue"].map(str::to_owned).into();
        let mut labels = labels_of(&networks);
        assert_eq!(labels["full.thuban.dev/red-web"], "");
        labels.insert("app.kubernetes.io/name".into(), "transitd".into());
        assert_eq!(networks_of(&labels), networks);
    }

    /// Returns a pod that waits on its node, with an owner and the label of a network that it keeps off.
    fn pod(owner: (&str, &str), kept_off: &str) -> Value {
        json!({
            "metadata": {"name": "web", "ownerReferences": [
                {"apiVersion": owner.0, "kind": owner.1, "name": "web", "uid": "u", "controller": true}]},
            "spec": {"containers": [], "nodeName": "a", "affinity": {"podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "zone"},
                    {"topologyKey": "kubernetes.io/hostname", "namespaces": ["thuban-system"], "labelSelector":
                        {"matchExpressions": [{"key": label(kept_off), "operator": "Exists"}]}},
                ]}}},
            "status": {"phase": "Pending"},
        })
    }

    #[test]
    fn only_waiting_pods_that_come_back_elsewhere_are_movable() {
        let is_movable = |pod: Value| {
            let pod: Pod = serde_json::from_value(pod).unwrap();
            is_movable(&pod, &label("red"))
        };
        let replica_set = ("apps/v1", "ReplicaSet");
        assert!(is_movable(pod(replica_set, "red")));
        assert!(is_movable(pod(("apps/v1", "StatefulSet"), "red")));
        for owner in [("apps/v1", "DaemonSet"), ("batch/v1", "Job"), ("v1", "Node")] {
            assert!(!is_movable(pod(owner, "red")), "{owner:?}");
        }
        assert!(!is_movable(pod(replica_set, "blue")), "it would come back");
        let mut bare = pod(replica_set, "red");
        bare["spec"]["affinity"] = Value::Null;
        assert!(!is_movable(bare), "it would come back");
        let mut alone = pod(replica_set, "red");
        alone["metadata"]["ownerReferences"] = Value::Null;
        assert!(!is_movable(alone), "nobody makes it again");
        let mut running = pod(replica_set, "red");
        running["status"]["phase"] = "Running".into();
        assert!(!is_movable(running));
        let mut ending = pod(replica_set, "red");
        ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        assert!(!is_movable(ending));
    }
}
