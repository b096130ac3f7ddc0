//! Which nodes are looked at, and what is asked on each of them.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;

/// The label of transitd's pods.
pub const TRANSITD: &str = "transitd";
const NAME_LABEL: &str = "app.kubernetes.io/name";
/// How many nodes are looked at if the user names none.
const MAX_NODES: usize = 20;

/// What is asked in transitd's pod: the name of the file, and the command.
pub const COMMANDS: [(&str, &[&str]); 8] = [
    ("counters.json", &["/bin/transitd", "counters"]),
    ("drops.txt", &["/bin/transitd", "counters", "--drops"]),
    ("metrics.txt", &["/bin/transitd", "metrics"]),
    ("rows.jsonl", &["/bin/transitd", "rows"]),
    ("nft-thuban.txt", &["nft", "list", "table", "inet", "thuban"]),
    (
        "nft-overlay.txt",
        &["nft", "list", "table", "inet", "thuban-overlay"],
    ),
    (
        "nft-limits.txt",
        &["nft", "list", "table", "inet", "thuban-limits"],
    ),
    (
        "nft-policy.txt",
        &["nft", "list", "table", "inet", "thuban-policy"],
    ),
];

/// Whether it is a pod of transitd.
pub fn is_transitd(pod: &Pod) -> bool {
    pod.labels().get(NAME_LABEL).is_some_and(|name| name == TRANSITD)
}

/// Returns the name of the pod's node; empty if it has none.
pub fn node_of(pod: &Pod) -> &str {
    let spec = pod.spec.as_ref();
    spec.and_then(|spec| spec.node_name.as_deref())
        .unwrap_or_default()
}

/// Whether the kubelet says that the pod is ready.
fn is_ready(pod: &Pod) -> bool {
    let mut conditions = pod
        .status
        .iter()
        .flat_map(|status| status.conditions.iter().flatten());
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// The nodes that are looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// Nodes with a pod of transitd, sorted.
    pub nodes: Vec<String>,
    /// Nodes without one that the user named.
    pub missing: Vec<String>,
    /// How many others there are.
    pub others: usize,
}

/// Chooses nodes: those that the user named, or else the first, of which those are first that are not well.
pub fn choose(pods: &[Pod], named: &[String]) -> Chosen {
    let mut all: Vec<(bool, &str)> = pods
        .iter()
        .filter(|pod| is_transitd(pod) && !node_of(pod).is_empty())
        .map(|pod| (is_ready(pod), node_of(pod)))
        .collect();
    all.sort_unstable();
    let total = all.iter().map(|(_, node)| node).collect::<BTreeSet<_>>().len();
    let is_named = |node: &str| named.iter().any(|name| name == node);
    let mut nodes: Vec<String> = if named.is_empty() {
        all.iter()
            .take(MAX_NODES)
            .map(|(_, node)| (*node).to_owned())
            .collect()
    } else {
        let chosen = all.iter().filter(|(_, node)| is_named(node));
        chosen.map(|(_, node)| (*node).to_owned()).collect()
    };
    nodes.sort();
    nodes.dedup();
    let missing = named.iter().filter(|name| !nodes.contains(name));
    Chosen {
        missing: missing.cloned().collect(),
        others: total - nodes.len(),
        nodes,
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::{MAX_NODES, choose};
    use crate::testing::object;

    fn pod(node: &str, is_ready: bool) -> Pod {
        let ready = if is_ready { "True" } else { "False" };
        object(
            json!({"metadata": {"name": node, "labels": {"app.kubernetes.io/name": "transitd"}},
            "spec": {"nodeName": node, "containers": []},
            "status": {"conditions": [{"type": "Ready", "status": ready}]}}),
        )
    }

    #[test]
    fn nodes_that_are_not_well_come_first() {
        let mut pods: Vec<Pod> = (0..30)
            .map(|number| pod(&format!("n{number:02}"), true))
            .collect();
        pods.push(pod("z", false));
        pods.push(object(
            json!({"metadata": {"name": "operator"}, "spec": {"nodeName": "y", "containers": []}}),
        ));
        let chosen = choose(&pods, &[]);
        assert_eq!((chosen.nodes.len(), chosen.others), (MAX_NODES, 11));
        assert!(chosen.nodes.contains(&"z".to_owned()));
        let chosen = choose(&pods, &["n07".to_owned(), "nowhere".to_owned()]);
        assert_eq!(chosen.nodes, ["n07"]);
        assert_eq!(chosen.missing, ["nowhere"]);
    }
}
