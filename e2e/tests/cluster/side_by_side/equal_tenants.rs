//! Twenty tenants with equal small networks. No two of their pods may have one address on a node. All of them run
//! nevertheless, about as soon as as many pods of one tenant, also if all prefer a node that has no room for all.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::support::{Pod, apply, delete, get, running, wait_provisioned};
use crate::tenant::manifests;
use crate::tenants::tenants;

const TENANTS: usize = 20;
const VPC: &str = "10.86.0.0/16";
/// The network of each tenant. Pods have 13 of its addresses.
const SMALL: &str = "10.86.0.0/28";
/// The tenant that has as many pods, and its network.
const ALONE: &str = "equal-alone";
const LARGE: &str = "10.87.0.0/24";
/// Pods of many tenants may take this much longer than those of one, and no time below the second counts.
const SLOWER: u32 = 3;
const SOON: Duration = Duration::from_secs(30);
/// The number of pods of these tenants that a node has addresses for.
const ROOM: usize = 13;
/// How many pods come once the scheduler knows where there is no room.
const LATER: usize = 10;
const PREFERRED: &str = "node-a";
const POLICY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../install/optional/placement.yaml");

/// Tenants that are removed together: one after the other would take minutes.
struct Tenants<'a> {
    cluster: &'a Cluster,
    names: Vec<String>,
    is_removed: bool,
}

impl<'a> Tenants<'a> {
    /// Makes tenants, each of a name and its network's range.
    fn new(cluster: &'a Cluster, tenants: &[(String, &str, &str)]) -> Result<Self> {
        let all = Self {
            cluster,
            names: tenants.iter().map(|(name, ..)| name.clone()).collect(),
            is_removed: false,
        };
        let objects = tenants
            .iter()
            .flat_map(|(name, vpc, network)| manifests(name, &[*vpc], &[*network]));
        apply(cluster, &objects.collect::<Vec<_>>())?;
        for name in &all.names {
            wait_provisioned(cluster, &format!("networks.thuban.dev/{name}"))?;
        }
        Ok(all)
    }

    fn remove(mut self) -> Result<()> {
        self.is_removed = true;
        self.delete_all()
    }

    fn delete_all(&self) -> Result<()> {
        for kind in ["namespace", "networks.thuban.dev", "vpcs.thuban.dev"] {
            let names = self.names.iter().map(String::as_str);
            let arguments: Vec<&str> = [kind].into_iter().chain(names).collect();
            delete(self.cluster, &arguments)?;
        }
        Ok(())
    }
}

impl Drop for Tenants<'_> {
    fn drop(&mut self) {
        if !self.is_removed
            && let Err(error) = self.delete_all()
        {
            eprintln!("equal tenants: {error:#}");
        }
    }
}

/// Returns twenty tenants with equal ranges.
fn equal<'a>(name: &str, vpc: &'a str, network: &'a str) -> Vec<(String, &'a str, &'a str)> {
    let names = (0..TENANTS).map(|number| format!("{name}-{number}"));
    names.map(|name| (name, vpc, network)).collect()
}

/// Returns a pod on the node that the scheduler chooses.
fn pod(namespace: &str, name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace},
        "spec": {"terminationGracePeriodSeconds": 0,
            "containers": [{"name": "pause", "image": "registry.k8s.io/pause:3.10"}]},
    })
}

/// Makes pods; returns them once they run, and how long that took.
fn start(cluster: &Cluster, manifests: &[Value]) -> Result<(Vec<Pod>, Duration)> {
    let begin = Instant::now();
    apply(cluster, manifests)?;
    let part = |pod: &Value, field: &str| pod["metadata"][field].as_str().unwrap_or_default().to_owned();
    let pods = manifests
        .iter()
        .map(|pod| running(cluster, &part(pod, "namespace"), &part(pod, "name")))
        .collect::<Result<Vec<_>>>()?;
    Ok((pods, begin.elapsed()))
}

#[test]
fn pods_of_equal_small_networks_run_as_soon_as_others() {
    let cluster = &tenants().cluster;
    let mut made = equal("equal", VPC, SMALL);
    made.push((ALONE.to_owned(), "10.87.0.0/16", LARGE));
    let all = Tenants::new(cluster, &made).unwrap();
    let of_one: Vec<Value> = (0..TENANTS)
        .map(|number| pod(ALONE, &format!("pod-{number}")))
        .collect();
    let (_, usual) = start(cluster, &of_one).unwrap();
    let others = all.names.iter().filter(|name| *name != ALONE);
    let of_many: Vec<Value> = others.map(|name| pod(name, "pod")).collect();
    let (pods, took) = start(cluster, &of_many).unwrap();
    eprintln!(
        "{TENANTS} pods of one tenant ran after {usual:?}, one of each of {TENANTS} tenants after {took:?}"
    );
    let places: BTreeSet<_> = pods.iter().map(|pod| (&pod.node, pod.address)).collect();
    assert_eq!(places.len(), TENANTS, "an address is twice on a node: {places:?}");
    let addresses: BTreeSet<_> = pods.iter().map(|pod| pod.address).collect();
    assert!(
        addresses.len() < TENANTS,
        "no two tenants have one address: {addresses:?}"
    );
    assert!(
        took < SOON.max(usual * SLOWER),
        "{took:?}, while pods of one tenant take {usual:?}"
    );
    all.remove().unwrap();
}

/// The policy that keeps pods off full nodes, for as long as this lives.
struct Policy<'a>(&'a Cluster);

impl<'a> Policy<'a> {
    /// Applies the policy; waits until it changes pods of a tenant.
    fn new(cluster: &'a Cluster, namespace: &str) -> Result<Self> {
        cluster.kubectl_apply(&std::fs::read_to_string(POLICY)?)?;
        let policy = Self(cluster);
        // It waits, so that it takes no address.
        let mut probe = pod(namespace, "probe");
        probe["spec"]["schedulingGates"] = json!([{"name": "thuban.dev/probe"}]);
        cluster.wait_for("the policy changes pods", Duration::from_secs(30), || {
            apply(cluster, std::slice::from_ref(&probe))?;
            let made = get(cluster, &["pod", "-n", namespace, "probe"])?;
            delete(cluster, &["pod", "-n", namespace, "probe"])?;
            Ok(made["spec"]["affinity"].to_string().contains("full.thuban.dev/"))
        })?;
        Ok(policy)
    }
}

impl Drop for Policy<'_> {
    fn drop(&mut self) {
        for kind in ["mutatingadmissionpolicybinding", "mutatingadmissionpolicy"] {
            if let Err(error) = delete(self.0, &[kind, "thuban-placement"]) {
                eprintln!("{kind}: {error:#}");
            }
        }
    }
}

/// Makes a pod prefer the node.
fn preferring(mut pod: Value) -> Value {
    pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] = json!([{
        "weight": 100,
        "preference": {"matchExpressions": [
            {"key": "kubernetes.io/hostname", "operator": "In", "values": [PREFERRED]}]},
    }]);
    pod
}

/// Returns a Deployment of one pod that prefers the node.
fn deployment(namespace: &str) -> Value {
    let spec = preferring(pod(namespace, "crowd"))["spec"].take();
    let template = json!({"metadata": {"labels": {"app": "crowd"}}, "spec": spec});
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "crowd", "namespace": namespace},
        "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "crowd"}}, "template": template},
    })
}

/// Returns the pod of a Deployment, once it runs.
fn deployed(cluster: &Cluster, namespace: &str) -> Result<Pod> {
    let arguments = [
        "rollout",
        "status",
        "-n",
        namespace,
        "deployment/crowd",
        "--timeout=60s",
    ];
    cluster.kubectl(&arguments)?;
    let pods = get(cluster, &["pods", "-n", namespace, "-l", "app=crowd"])?;
    let mut pods = pods["items"].as_array().into_iter().flatten();
    let ready = pods.find(|pod| pod["status"]["phase"] == "Running");
    let name = ready.and_then(|pod| pod["metadata"]["name"].as_str());
    running(cluster, namespace, name.unwrap_or_default())
}

#[test]
fn pods_leave_a_node_where_others_have_all_their_addresses() {
    let cluster = &tenants().cluster;
    let all = Tenants::new(cluster, &equal("crowd", "10.88.0.0/16", "10.88.0.0/28")).unwrap();
    let policy = Policy::new(cluster, &all.names[0]).unwrap();
    // They come before anybody knows that there is no room for all: some are moved.
    let begin = Instant::now();
    let deployments: Vec<Value> = all.names.iter().map(|name| deployment(name)).collect();
    apply(cluster, &deployments).unwrap();
    let pods = all.names.iter().map(|name| deployed(cluster, name));
    let mut pods = pods.collect::<Result<Vec<_>>>().unwrap();
    let moved = begin.elapsed();
    let preferred = pods.iter().filter(|pod| pod.node == PREFERRED).count();
    assert_eq!(preferred, ROOM, "{pods:?}");
    // The scheduler knows: pods of nobody's making run elsewhere at once.
    let later: Vec<Value> = all.names[..LATER]
        .iter()
        .map(|name| preferring(pod(name, "later")))
        .collect();
    let (later, took) = start(cluster, &later).unwrap();
    eprintln!("{TENANTS} pods that prefer one node ran after {moved:?}, {LATER} later ones after {took:?}");
    assert!(later.iter().all(|pod| pod.node != PREFERRED), "{later:?}");
    assert!(moved < SOON * 2 && took < SOON, "{moved:?}, {took:?}");
    pods.extend(later);
    let places: BTreeSet<_> = pods.iter().map(|pod| (&pod.node, pod.address)).collect();
    assert_eq!(
        places.len(),
        pods.len(),
        "an address is twice on a node: {places:?}"
    );
    drop(policy);
    all.remove().unwrap();
}
