//! Tests of the removal, and of the chart, on the cluster of the end-to-end tests and after them.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::{chart, demo, images, install, uninstall};

type Test = (&'static str, fn(&str) -> Result<()>);

/// The tests, in this order. The cluster comes with Thuban and with pods of tenants, and is left with neither.
pub const TESTS: [Test; 3] = [
    ("removal under running pods, and again", under_running_pods),
    (
        "Helm installs, upgrades, rolls back and removes in another namespace",
        chart::in_another_namespace,
    ),
    (
        "removal when the operator is gone and a node with pods too",
        without_operator_and_node,
    ),
];

/// How long the pods of the node that is gone are waited for. Those of other nodes end within a second.
const PATIENCE_WITH_PODS: Duration = Duration::from_secs(20);

fn under_running_pods(name: &str) -> Result<()> {
    let cluster = Cluster::named(name)?;
    if !has_endpoints(&cluster)? {
        bail!("no tenant's pod runs: nothing would be shown");
    }
    uninstall::run(name)?;
    uninstall::run(name).context("the second time")
}

fn without_operator_and_node(name: &str) -> Result<()> {
    install::run(name)?;
    let cluster = Cluster::named(name)?;
    demo::make_tenants(&cluster)?;
    cluster.kubectl_apply(&patient().to_string())?;
    install::wait("deployment/patient", || {
        let ready = install::get(&cluster, &["deployment", "patient"])?["status"]["readyReplicas"].as_u64();
        Ok((ready == Some(3), format!("{} of 3", ready.unwrap_or(0))))
    })?;
    cluster.kubectl(&[
        "delete",
        "deployment",
        "-n",
        install::NAMESPACE,
        "thuban-operator",
        "--wait",
    ])?;
    let nodes = cluster.nodes()?;
    cluster.kill_node(&nodes[nodes.len() - 1])?;
    if !has_endpoints(&cluster)? {
        bail!("no tenant's pod runs: nothing would be shown");
    }
    uninstall::run_with(name, Some(PATIENCE_WITH_PODS))
}

/// Returns a Deployment of pods that are slow to end, one on each node. They are made again when they are deleted.
fn patient() -> Value {
    let labels = json!({"app": "patient"});
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "patient", "namespace": "default"},
        "spec": {"replicas": 3, "selector": {"matchLabels": labels}, "template": {
            "metadata": {"labels": labels},
            "spec": {
                "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                    {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}]}},
                "containers": [{"name": "agnhost", "image": images::AGNHOST, "args": ["pause"]}],
            },
        }},
    })
}

/// Whether pods have endpoints. Endpoints of Services and nodes don't count: they stay as long as Services and nodes
/// exist.
fn has_endpoints(cluster: &Cluster) -> Result<bool> {
    let endpoints = install::get(cluster, &["endpoints.thuban.dev", "-A"])?;
    let endpoints = endpoints["items"].as_array().into_iter().flatten();
    Ok(endpoints
        .into_iter()
        .any(|endpoint| endpoint["spec"]["type"] == "Simple"))
}
