//! Bouncers and dividers come, go and move under traffic that passes only them: no packet is lost.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::flows::{none_lost_while, passed_on, wait_settled};
use crate::support::{
    Pod, apply, delete, delete_namespace, namespace_manifest, netexec_manifest, network_manifest, running,
    vpc_manifest, wait_provisioned,
};
use crate::tenants::tenants;

/// Turns direct paths off on every node until this is dropped.
pub struct NoDirectPaths(&'static Cluster);

impl NoDirectPaths {
    pub fn new(cluster: &'static Cluster) -> Result<Self> {
        let this = Self(cluster);
        this.set("THUBAN_DIRECT_PATHS=never")?;
        Ok(this)
    }

    fn set(&self, variable: &str) -> Result<()> {
        let on = ["-n", "thuban-system", "daemonset/transitd"];
        self.0
            .kubectl(&[&["set", "env"], &on[..], &[variable]].concat())?;
        self.0
            .kubectl(&[&["rollout", "status", "--timeout=120s"], &on[..]].concat())?;
        Ok(())
    }
}

impl Drop for NoDirectPaths {
    fn drop(&mut self) {
        let _ = self.set("THUBAN_DIRECT_PATHS-");
    }
}

fn scale(cluster: &Cluster, parent: &str, kind: &str, number: usize) -> Result<()> {
    let patch = serde_json::json!({"spec": {kind: number}}).to_string();
    cluster.kubectl(&["patch", parent, "--type=merge", "-p", &patch])?;
    let name = parent.rsplit('/').next().unwrap_or_default();
    let droplets = wait_settled(cluster, kind, name, number)?;
    let mut distinct = droplets.clone();
    distinct.sort();
    distinct.dedup();
    ensure!(distinct.len() == number, "{number} {kind} on {droplets:?}");
    // A datagram that is still on its way arrives now.
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}

fn cordon(cluster: &Cluster, kind: &str, parent: &str) -> Result<()> {
    let droplets = wait_settled(cluster, kind, parent, 1)?;
    let node = &droplets[0];
    cluster.kubectl(&["cordon", node])?;
    let moved = cluster.wait_for(
        &format!("{kind} of {parent} away from {node}"),
        Duration::from_secs(40),
        || Ok(crate::flows::settled(cluster, kind, parent, 1)?.is_some_and(|on| on[0] != *node)),
    );
    cluster.kubectl(&["uncordon", node])?;
    moved?;
    std::thread::sleep(Duration::from_secs(1));
    Ok(())
}

fn world(cluster: &Cluster) -> Result<Vec<Pod>> {
    apply(
        cluster,
        &[
            vpc_manifest("roving", "10.20.0.0/16", &["roving"]),
            network_manifest("roving-a", "roving", "10.20.1.0/24"),
            network_manifest("roving-b", "roving", "10.20.2.0/24"),
            namespace_manifest("roving", Some("roving-a")),
        ],
    )?;
    for network in ["roving-a", "roving-b"] {
        wait_provisioned(cluster, &format!("networks.thuban.dev/{network}"))?;
    }
    let pods = [
        ("a1", "node-a", "roving-a"),
        ("a2", "node-b", "roving-a"),
        ("b1", "node-c", "roving-b"),
    ];
    let manifests = pods.map(|(name, node, network)| netexec_manifest("roving", name, node, Some(network)));
    apply(cluster, &manifests)?;
    pods.iter()
        .map(|(name, ..)| running(cluster, "roving", name))
        .collect()
}

#[test]
fn roles_scale_and_leave_cordoned_nodes_without_loss() {
    let cluster = &tenants().cluster;
    let _guard = NoDirectPaths::new(cluster).unwrap();
    let pods = world(cluster).unwrap();
    let [a1, a2, b1] = &pods[..] else { unreachable!() };
    // The first way is within the network by its bouncers, the other one to another network by dividers and that
    // network's bouncers.
    let ways = [
        (a1, a2.address),
        (a2, a1.address),
        (a1, b1.address),
        (b1, a2.address),
    ];
    let (network, vpc) = ("networks.thuban.dev/roving-a", "vpcs.thuban.dev/roving");
    let before = passed_on(cluster).unwrap();
    none_lost_while("bouncers 1 to 3 to 1", &ways, || {
        scale(cluster, network, "bouncers", 3)?;
        scale(cluster, network, "bouncers", 1)
    });
    assert!(
        passed_on(cluster).unwrap() > before + 500,
        "traffic goes by roles"
    );
    none_lost_while("dividers 1 to 2 to 1", &ways, || {
        scale(cluster, vpc, "dividers", 2)?;
        scale(cluster, vpc, "dividers", 1)
    });
    none_lost_while("a cordoned node's roles move", &ways, || {
        cordon(cluster, "bouncers", "roving-a")?;
        cordon(cluster, "dividers", "roving")
    });
    let autoscale = |object: &str, kind: &str, scaling: Value| {
        let patch = json!({"spec": {"autoscale": scaling}}).to_string();
        cluster.kubectl(&["patch", object, "--type=merge", "-p", &patch])?;
        let parent = object.rsplit('/').next().unwrap_or_default();
        wait_settled(cluster, kind, parent, 2).map(|_| ())
    };
    none_lost_while("one more for each endpoint, and for packets", &ways, || {
        let endpoints = json!({"maxBouncers": 2, "endpointsPerBouncer": 1});
        autoscale(network, "bouncers", endpoints)?;
        // Droplets report their rate: the ways above send hundreds of packets a second.
        let packets = json!({"maxDividers": 2, "packetsPerSecond": 20});
        autoscale(vpc, "dividers", packets)
    });
    delete_namespace(cluster, "roving").unwrap();
    delete(cluster, &["networks.thuban.dev", "roving-a", "roving-b"]).unwrap();
    delete(cluster, &["vpcs.thuban.dev", "roving"]).unwrap();
}
