//! Twenty tenants with equal small networks. No two of their pods may have one address on a node. All of them run
//! nevertheless, about as soon as as many pods of one tenant.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::support::{Pod, apply, delete, running, wait_provisioned};
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

/// Tenants that are removed together: one after the other would take minutes.
struct Tenants<'a> {
    cluster: &'a Cluster,
    names: Vec<String>,
    is_removed: bool,
}

impl<'a> Tenants<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let names = (0..TENANTS).map(|number| format!("equal-{number}"));
        let all = Self {
            cluster,
            names: names.chain([ALONE.to_owned()]).collect(),
            is_removed: false,
        };
        let objects: Vec<Value> = all
            .names
            .iter()
            .flat_map(|name| {
                if name == ALONE {
                    manifests(name, &["10.87.0.0/16"], &[LARGE])
                } else {
                    manifests(name, &[VPC], &[SMALL])
                }
            })
            .collect();
        apply(cluster, &objects)?;
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
    let all = Tenants::new(cluster).unwrap();
    let of_one: Vec<Value> = (0..TENANTS)
        .map(|number| pod(ALONE, &format!("pod-{number}")))
        .collect();
    let (_, usual) = start(cluster, &of_one).unwrap();
    let equal = all.names.iter().filter(|name| *name != ALONE);
    let of_many: Vec<Value> = equal.map(|name| pod(name, "pod")).collect();
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
