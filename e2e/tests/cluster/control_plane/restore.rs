//! etcd goes back to an older state, while pods run whose Endpoints and claims are not in that state. The pods keep
//! their addresses, no other pod gets these, and no packet is lost.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use thuban_cluster::{COMPONENTS, Cluster};

use crate::audit::wait_sound;
use crate::flows::none_lost_while;
use crate::support::{Hanging, Pod, apply, get, is_ready, netexec_manifest, running};
use crate::tenant::Tenant;
use crate::tenants::{ring, tenants};

/// The name of the tenant, its network and its namespace.
const NAME: &str = "restored";
/// The number of pods on each node. They are so many that an operator that draws addresses anew would not draw the same
/// ones.
const PODS_PER_NODE: usize = 2;

/// Makes all operators hang until the results are dropped.
fn hanging_operators(cluster: &Cluster) -> Result<Vec<Hanging<'_>>> {
    let selector = "app.kubernetes.io/name=thuban-operator";
    let mut nodes = Vec::new();
    // Pods that a rollout replaced are listed for a moment after their processes have ended.
    cluster.wait_for("operators that all run", Duration::from_mins(1), || {
        let pods = get(cluster, &["pods", "-n", "thuban-system", "-l", selector])?;
        let pods = pods["items"].as_array().context("a list")?;
        let runs = |pod: &Value| is_ready(pod) && pod["metadata"]["deletionTimestamp"].is_null();
        let names = pods.iter().filter_map(|pod| pod["spec"]["nodeName"].as_str());
        nodes = names.map(str::to_owned).collect();
        Ok(!pods.is_empty() && pods.iter().all(runs))
    })?;
    nodes
        .iter()
        .map(|node| Hanging::new(cluster, node, "thuban-operator"))
        .collect()
}

/// Makes pods of these names, spread over the nodes.
fn make(cluster: &Cluster, names: &[String]) -> Result<()> {
    let nodes = cluster.nodes()?;
    let places = names.iter().zip(nodes.iter().cycle());
    let pods: Vec<_> = places
        .map(|(name, node)| netexec_manifest(NAME, name, node, None))
        .collect();
    apply(cluster, &pods)
}

fn wait_running(cluster: &Cluster, names: &[String]) -> Result<Vec<Pod>> {
    names.iter().map(|name| running(cluster, NAME, name)).collect()
}

/// Keeps etcd's state in which the pods are bound and have no Endpoints.
fn back_up(cluster: &Cluster, names: &[String]) -> Result<()> {
    let _hanging = hanging_operators(cluster)?;
    make(cluster, names)?;
    cluster.wait_for("the pods bound", Duration::from_secs(30), || {
        let pods = get(cluster, &["pods", "-n", NAME])?;
        let pods = pods["items"].as_array().context("a list")?;
        Ok(pods.len() == names.len() && pods.iter().all(|pod| pod["spec"]["nodeName"].is_string()))
    })?;
    ensure!(endpoints(cluster)?.is_empty(), "an operator did not hang");
    cluster.stop_control_plane(&COMPONENTS)?;
    cluster.save_state()?;
    cluster.resume_control_plane(&COMPONENTS)
}

/// Takes etcd back, and restarts the parts that Kubernetes wants to be restarted then: all of its own processes that
/// watch. Nothing of Thuban is touched.
fn restore(cluster: &Cluster) -> Result<()> {
    for node in cluster.nodes()? {
        cluster.signal(&node, "kubelet", "KILL")?;
    }
    cluster.stop_control_plane(&COMPONENTS)?;
    cluster.restore_state()?;
    cluster.resume_control_plane(&COMPONENTS)?;
    for node in cluster.nodes()? {
        cluster.start_kubelet(&node)?;
    }
    Ok(())
}

/// Returns the addresses of the Endpoints that are Provisioned, by pod.
fn endpoints(cluster: &Cluster) -> Result<BTreeMap<String, String>> {
    let list = get(cluster, &["endpoints.thuban.dev", "-n", NAME])?;
    let all = list["items"].as_array().into_iter().flatten();
    let provisioned = all.filter(|endpoint| endpoint["status"]["phase"] == "Provisioned");
    let entry = |endpoint: &Value| {
        let pod = endpoint["spec"]["podRef"]["name"].as_str()?;
        let address = endpoint["status"]["addresses"][0].as_str()?;
        Some((pod.to_owned(), address.to_owned()))
    };
    Ok(provisioned.filter_map(entry).collect())
}

fn addresses(pods: &[Pod]) -> BTreeMap<String, String> {
    let entry = |pod: &Pod| (pod.name.clone(), pod.address.to_string());
    pods.iter().map(entry).collect()
}

#[test]
fn etcd_restore_without_endpoints_keeps_pod_addresses() {
    let cluster = &tenants().cluster;
    let tenant = Tenant::new(cluster, NAME, &["10.23.0.0/16"], &["10.23.1.0/24"]).unwrap();
    let number = PODS_PER_NODE * cluster.nodes().unwrap().len();
    let names: Vec<String> = (0..number).map(|number| format!("early-{number}")).collect();
    back_up(cluster, &names).unwrap();
    let pods = wait_running(cluster, &names).unwrap();
    let before = addresses(&pods);
    let mut ways = tenants().ring("red-web");
    ways.extend(ring(&pods.iter().collect::<Vec<_>>()));
    none_lost_while("etcd restored", &ways, || {
        restore(cluster)?;
        let since = Instant::now();
        let late: Vec<String> = (0..3).map(|number| format!("late-{number}")).collect();
        make(cluster, &late)?;
        let late = addresses(&wait_running(cluster, &late)?);
        eprintln!(
            "etcd restored: new pods are ready {:.1?} after the API server is",
            since.elapsed()
        );
        for (name, address) in &late {
            let is_taken = before.values().any(|taken| taken == address);
            ensure!(!is_taken, "{name} got {address}, which a pod that runs has");
        }
        cluster.wait_for("all Endpoints again", Duration::from_secs(30), || {
            Ok(endpoints(cluster)?.len() == before.len() + late.len())
        })?;
        let mut after = endpoints(cluster)?;
        after.retain(|name, _| before.contains_key(name));
        ensure!(after == before, "before: {before:?}, after: {after:?}");
        Ok(())
    });
    wait_sound(cluster);
    tenant.remove().unwrap();
}
