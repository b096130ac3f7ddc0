//! `cargo xtask demo`: a cluster with Thuban and tenants with equal addresses. It shows which pods reach each other,
//! and by which ways.
//!
//! It can be repeated: whatever exists already is kept. The cluster stays up.

pub mod load_balancer;
mod matrix;
mod pods;
mod ways;

use std::fs;

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use crate::{
    build::{self, Profile, root},
    cluster, diagnostics,
    install::{self, provisioned, wait},
    machine::{self, KERNEL, Needs},
};
use pods::{Pod, Wanted};

const NAME: &str = build::DEMO;
/// Builds and images on disk, three nodes and a control plane in memory.
const NEEDS: Needs = Needs {
    profile: Profile::Demo,
    disk: 15,
    memory: 6,
    kernel: KERNEL,
};
/// Networks and their VPCs, as in `e2e/demo/`.
const NETWORKS: [(&str, &str); 5] = [
    ("red-web", "red"),
    ("red-db", "red"),
    ("blue-web", "blue"),
    ("blue-db", "blue"),
    ("green-web", "green"),
];

/// Says what follows, refuses a machine that can't run it, and builds what the cluster needs.
fn begin() -> Result<()> {
    println!(
        "This builds Kubernetes and Thuban, starts a cluster of three nodes on this machine, and shows who reaches\n\
         whom. On two cores it takes about 12 minutes the first time, most of it for builds, and about 2 later."
    );
    let is_up = Cluster::named(NAME).is_ok();
    machine::check(&NEEDS, is_up)?;
    build::demo()
}

/// Runs the demo. Fails when packets reach a pod that they must not reach, or don't reach a pod that they must reach.
pub fn run() -> Result<()> {
    begin()?;
    build::step("cluster of three nodes", || cluster::up(NAME))?;
    build::step("Thuban from install/", || install::run(NAME))?;
    let cluster = Cluster::named(NAME)?;
    let pods = build::step("tenants red, blue and green", || {
        make_tenants(&cluster).inspect_err(|_| diagnostics::print(&cluster))
    })?;
    print_addresses(&cluster, &pods)?;
    let networks = NETWORKS.map(|(network, _)| network);
    // This runs before the matrix: there, clients try addresses that their VPC does not have yet, and droplets
    // subscribe to them.
    let is_direct = ways::show(&cluster)?;
    let is_isolated = matrix::show(&pods, &networks)?;
    print_hints();
    if !is_isolated || !is_direct {
        bail!("the demo found what it did not expect, see above");
    }
    Ok(())
}

/// Returns a tenant's pod of the demo that runs.
pub fn first_pod(cluster: &Cluster) -> Result<Pod> {
    let (network, vpc) = NETWORKS[0];
    let node = cluster
        .nodes()?
        .into_iter()
        .next()
        .context("a cluster without nodes")?;
    let found = pods::find(cluster, &[Wanted::new(vpc, network, &node, "")])?;
    found.into_iter().next().context("no pod of the demo runs")
}

pub fn make_tenants(cluster: &Cluster) -> Result<Vec<Pod>> {
    for file in ["10-vpcs.yaml", "20-networks.yaml", "30-namespaces.yaml"] {
        let path = root().join("e2e/demo").join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        cluster
            .kubectl_apply(&text)
            .with_context(|| format!("applying e2e/demo/{file}"))?;
    }
    for (network, _) in NETWORKS {
        let object = format!("networks.thuban.dev/{network}");
        wait(network, || provisioned(cluster, &object))?;
    }
    let mut wanted = Vec::new();
    for (network, vpc) in NETWORKS {
        for node in cluster.nodes()? {
            wanted.push(Wanted::new(vpc, network, &node, ""));
        }
    }
    pods::apply(cluster, &wanted)?;
    wait("pods", || pods::readiness(cluster, &wanted))?;
    pods::find(cluster, &wanted)
}

fn print_addresses(cluster: &Cluster, pods: &[Pod]) -> Result<()> {
    let nodes = cluster.nodes()?;
    println!("\nAddresses of the pods (red and blue have the same)\n");
    print!("  {:<12}", "");
    for node in &nodes {
        print!("{node:>14}");
    }
    println!();
    for (network, _) in NETWORKS {
        print!("  {network:<12}");
        for node in &nodes {
            let pod = pods
                .iter()
                .find(|pod| pod.network == network && pod.node == *node);
            print!(
                "{:>14}",
                pod.map_or_else(String::new, |pod| pod.address.to_string())
            );
        }
        println!();
    }
    Ok(())
}

fn print_hints() {
    println!(
        "
The cluster stays up. Look around:

  eval \"$(cargo xtask cluster env)\"
  kubectl get vpcs,networks.thuban.dev,dividers,bouncers,droplets
  kubectl get endpoints.thuban.dev -A
  kubectl exec -n red red-web-node-a -- /agnhost connect --timeout=2s 10.0.1.3:8080
  cargo xtask cluster exec node-a -- tcpdump -ni eth0 udp port 6081
  cargo xtask cluster down
"
    );
}
