//! The tenants that most tests use: `red` and `blue` with equal addresses, `green` with others; one pod of each network
//! on every node. They are made once for the whole test binary.

use std::net::Ipv4Addr;
use std::sync::OnceLock;

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::support::{
    Pod, apply, get, lock, namespace_manifest, netexec_manifest, network_manifest, running, vpc_manifest,
    wait_provisioned,
};

pub const VPCS: [(&str, &str); 3] = [
    ("red", "10.0.0.0/16"),
    ("blue", "10.0.0.0/16"),
    ("green", "10.1.0.0/16"),
];
pub const NETWORKS: [(&str, &str, &str); 5] = [
    ("red-web", "red", "10.0.1.0/24"),
    ("red-db", "red", "10.0.2.0/24"),
    ("blue-web", "blue", "10.0.1.0/24"),
    ("blue-db", "blue", "10.0.2.0/24"),
    ("green-web", "green", "10.1.1.0/24"),
];

/// The label of their pods: tests that run side by side have pods of their own in the same namespaces.
pub const SELECTOR: (&str, &str) = ("thuban.dev/tests", "tenants");

pub struct Tenants {
    pub cluster: Cluster,
    pub pods: Vec<Pod>,
}

impl Tenants {
    /// Returns the pods of a network, in the order of the nodes.
    pub fn network(&self, network: &str) -> Vec<&Pod> {
        let prefix = format!("{network}-");
        self.pods
            .iter()
            .filter(|pod| pod.name.starts_with(&prefix))
            .collect()
    }

    /// Returns the ways from each pod of a network to the next, over all nodes.
    pub fn ring(&self, network: &str) -> Vec<(&Pod, Ipv4Addr)> {
        ring(&self.network(network))
    }

    /// Returns the pods of a VPC.
    pub fn vpc(&self, vpc: &str) -> Vec<&Pod> {
        self.pods.iter().filter(|pod| pod.namespace == vpc).collect()
    }
}

/// Returns the ways from each pod to the next, and from the last to the first.
pub fn ring<'a>(pods: &[&'a Pod]) -> Vec<(&'a Pod, Ipv4Addr)> {
    let next = pods.iter().cycle().skip(1);
    pods.iter()
        .zip(next)
        .map(|(pod, next)| (*pod, next.address))
        .collect()
}

/// Returns the tenants, which are made at the first call.
pub fn tenants() -> &'static Tenants {
    static TENANTS: OnceLock<Tenants> = OnceLock::new();
    TENANTS.get_or_init(|| make().expect("the tenants could not be made"))
}

/// Whether a pod of each network is on every node.
fn has_all(cluster: &Cluster) -> Result<bool> {
    let selector = format!("{}={}", SELECTOR.0, SELECTOR.1);
    let pods = get(cluster, &["pods", "-A", "-l", &selector])?;
    let count = pods["items"].as_array().map_or(0, Vec::len);
    Ok(count == NETWORKS.len() * cluster.nodes()?.len())
}

fn make() -> Result<Tenants> {
    let cluster = Cluster::from_env()?;
    let mut objects = Vec::new();
    for (vpc, cidr) in VPCS {
        objects.push(vpc_manifest(vpc, cidr, &[vpc]));
        objects.push(namespace_manifest(vpc, Some(&format!("{vpc}-web"))));
    }
    for (network, vpc, cidr) in NETWORKS {
        objects.push(network_manifest(network, vpc, cidr));
    }
    // Another process may have made the tenants, and its tests may have changed them since.
    let _lock = lock(&cluster, "tenants")?;
    let is_made = has_all(&cluster)?;
    if !is_made {
        apply(&cluster, &objects)?;
    }
    for (network, ..) in NETWORKS {
        wait_provisioned(&cluster, &format!("networks.thuban.dev/{network}"))?;
    }
    let nodes = cluster.nodes()?;
    let mut pods = Vec::new();
    for (network, vpc, _) in NETWORKS {
        // The network of web comes from the namespace's annotation, that of db from the pod's own.
        let annotation = (!network.ends_with("-web")).then_some(network);
        for node in &nodes {
            let mut pod = netexec_manifest(vpc, &format!("{network}-{node}"), node, annotation);
            pod["metadata"]["labels"][SELECTOR.0] = SELECTOR.1.into();
            pods.push(pod);
        }
    }
    if !is_made {
        apply(&cluster, &pods)?;
    }
    let pods = pods
        .iter()
        .map(|pod| {
            let field = |name: &str| pod["metadata"][name].as_str().context("manifest");
            running(&cluster, field("namespace")?, field("name")?)
        })
        .collect::<Result<_>>()?;
    Ok(Tenants { cluster, pods })
}
