//! What the API server knows: the pods of the rig, the rights of kube-network-policies, and the policy.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use thuban_cluster::{Cluster, NODES};

use super::super::nft::{PODS, others};

const NAMESPACE: &str = "bench";
const ACCOUNT: &str = "kube-network-policies";
/// The pods of the rig, client and server.
const NAMES: [&str; 2] = ["client", "server"];
/// The label of both pods.
const LABEL: (&str, &str) = ("app", "bench");

/// Creates all objects but the policy. Returns the file with the token of kube-network-policies.
pub fn create(cluster: &Cluster) -> Result<PathBuf> {
    let mut items = accounts();
    items.extend(NAMES.iter().zip(NODES).map(|(name, node)| pod(name, node)));
    apply(
        cluster,
        &json!({"apiVersion": "v1", "kind": "List", "items": items}),
    )?;
    for (name, address) in NAMES.iter().zip(PODS) {
        let status = json!({"status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
        }});
        let patch = ["-n", NAMESPACE, "--subresource=status", "--type=merge", "-p"];
        cluster.kubectl(&[&["patch", "pod", name][..], &patch, &[&status.to_string()]].concat())?;
    }
    let token = cluster.kubectl(&["create", "token", ACCOUNT, "-n", NAMESPACE, "--duration=24h"])?;
    let file = cluster.instance().state().join("kube-network-policies.token");
    write(&file, token.trim())?;
    Ok(file)
}

/// Applies the policy of both pods, in the place of the one before.
pub fn apply_policy(cluster: &Cluster, entries: usize, allows: bool) -> Result<()> {
    apply(cluster, &policy(entries, allows)?)
}

/// Applies a manifest at the server: kubectl's own way would keep a copy in an annotation, which is limited.
fn apply(cluster: &Cluster, manifest: &Value) -> Result<()> {
    let file = cluster.instance().state().join("manifest.json");
    write(&file, &manifest.to_string())?;
    let file = file.to_str().context("a path of the instance")?;
    cluster.kubectl(&["apply", "--server-side", "-f", file])?;
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

/// Returns the namespace, the account of pods, and the account of kube-network-policies with its manifest's rights.
fn accounts() -> Vec<Value> {
    let group = "rbac.authorization.k8s.io";
    let rbac = format!("{group}/v1");
    let account = |name| {
        json!({"apiVersion": "v1", "kind": "ServiceAccount",
            "metadata": {"name": name, "namespace": NAMESPACE}})
    };
    vec![
        json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}),
        account("default"),
        account(ACCOUNT),
        json!({"apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": ACCOUNT}, "rules": [
            {"apiGroups": [""], "resources": ["pods", "namespaces"], "verbs": ["list", "watch"]},
            {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["list", "watch"]},
        ]}),
        json!({"apiVersion": rbac, "kind": "ClusterRoleBinding", "metadata": {"name": ACCOUNT},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": ACCOUNT},
            "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}]}),
    ]
}

fn pod(name: &str, node: &str) -> Value {
    let (label, value) = LABEL;
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {label: value}},
        "spec": {"nodeName": node, "containers": [{"name": "none", "image": "none"}]}})
}

/// Returns a policy that isolates both pods in both directions. Of its entries in each direction, the last lets the
/// pods reach each other by their label; all others are addresses that no pod has.
fn policy(entries: usize, allows: bool) -> Result<Value> {
    let mut peers: Vec<Value> = others(entries - 1)?
        .map(|address| json!({"ipBlock": {"cidr": format!("{address}/32")}}))
        .collect();
    let (label, value) = LABEL;
    if allows {
        peers.push(json!({"podSelector": {"matchLabels": {label: value}}}));
    }
    // A rule without entries would accept everybody.
    let rules = |direction: &str| {
        if peers.is_empty() {
            json!([])
        } else {
            json!([{direction: peers}])
        }
    };
    Ok(
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "bench", "namespace": NAMESPACE},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": rules("from"), "egress": rules("to")}}),
    )
}

#[cfg(test)]
mod tests {
    use super::policy;

    #[test]
    fn without_entries_nobody_is_accepted() {
        let spec = &policy(1, false).unwrap()["spec"];
        assert_eq!(spec["ingress"], serde_json::json!([]));
        assert_eq!(spec["egress"], serde_json::json!([]));
    }

    #[test]
    fn the_label_comes_last_in_both_directions() {
        let spec = &policy(10_000, true).unwrap()["spec"];
        for (direction, peers) in [("ingress", "from"), ("egress", "to")] {
            let entries = spec[direction][0][peers].as_array().unwrap();
            assert_eq!(entries.len(), 10_000);
            assert!(entries[9_999]["podSelector"].is_object());
            assert!(entries[..9_999].iter().all(|entry| entry["ipBlock"].is_object()));
        }
    }
}
