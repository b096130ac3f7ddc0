//! A burst of pods on every node; none of their objects and rows stays.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::direct;
use crate::holdings::holdings;
use crate::support::{apply, delete, get, running};
use crate::tenant::Tenant;
use crate::tenants::tenants;

/// Returns the number of pods on a node; `THUBAN_E2E_PODS=110` is the large run.
fn pods_per_node() -> usize {
    std::env::var("THUBAN_E2E_PODS")
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(20)
}

/// Sends from one pod of each node to all pods of the others, until the flows are direct.
fn flows_become_direct(pods: &Value) {
    let cluster = &tenants().cluster;
    let pods: Vec<(&str, &str, Ipv4Addr)> = pods["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| {
            let text = |value: &Value| value.as_str().unwrap().parse().unwrap();
            (
                pod["metadata"]["name"].as_str().unwrap(),
                pod["spec"]["nodeName"].as_str().unwrap(),
                text(&pod["status"]["podIP"]),
            )
        })
        .collect();
    let of_node = |node: &String| {
        let (name, ..) = pods.iter().find(|(_, of, _)| *of == node).unwrap();
        let client = running(cluster, "burst", name).unwrap();
        let others = pods.iter().filter(|(_, of, _)| *of != node);
        let others: Vec<Ipv4Addr> = others.map(|(.., address)| *address).collect();
        direct::times(cluster, &client, &others).unwrap()
    };
    let nodes = cluster.nodes().unwrap();
    let mut all: Vec<Duration> = std::thread::scope(|scope| {
        let threads: Vec<_> = nodes.iter().map(|node| scope.spawn(|| of_node(node))).collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    all.sort();
    eprintln!(
        "{} flows became direct, none lost a packet: p50 {:?}, p99 {:?}, slowest {:?}",
        all.len(),
        direct::percentile(&all, 50),
        direct::percentile(&all, 99),
        direct::percentile(&all, 100)
    );
}

#[test]
fn a_burst_of_pods_comes_up_and_leaves_nothing_behind() {
    let cluster = &tenants().cluster;
    let nodes = cluster.nodes().unwrap();
    let tenant = Tenant::new(cluster, "burst", &["10.7.0.0/16"], &["10.7.0.0/22"]).unwrap();
    // The network's own rows exist before and after; the rows of pods must come and go.
    std::thread::sleep(Duration::from_secs(1));
    let vpc = get(cluster, &["vpc", "burst"]).unwrap();
    let vni = vpc["status"]["vni"].as_u64().unwrap();
    let before: Vec<_> = nodes.iter().map(|node| holdings(node, vni)).collect();
    let count = pods_per_node();
    let started = Instant::now();
    let deployments: Vec<_> = nodes.iter().map(|node| json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": node, "namespace": "burst"},
        "spec": {"replicas": count, "selector": {"matchLabels": {"node": node}}, "template": {
            "metadata": {"labels": {"node": node}},
            "spec": {"nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "pause", "image": "registry.k8s.io/pause:3.10"}]},
        }},
    })).collect();
    apply(cluster, &deployments).unwrap();
    for node in &nodes {
        cluster
            .kubectl(&[
                "rollout",
                "status",
                "-n",
                "burst",
                &format!("deployment/{node}"),
                "--timeout=300s",
            ])
            .unwrap();
    }
    eprintln!(
        "{count} pods on each of {} nodes were Running after {:.1} s",
        nodes.len(),
        started.elapsed().as_secs_f64()
    );
    let pods = get(cluster, &["pods", "-n", "burst"]).unwrap();
    let mut addresses: Vec<_> = pods["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|pod| pod["status"]["podIP"].to_string())
        .collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), count * nodes.len(), "an address was given twice");
    flows_become_direct(&pods);
    delete(cluster, &["namespace", "burst"]).unwrap();
    cluster
        .wait_for("addresses and objects freed", Duration::from_mins(2), || {
            let endpoints = get(cluster, &["endpoints.thuban.dev", "-n", "burst"])?;
            let claims = get(cluster, &["ipclaims.thuban.dev"])?;
            let left = claims["items"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|claim| {
                    claim["metadata"]["name"]
                        .as_str()
                        .is_some_and(|name| name.starts_with("burst."))
                })
                .count();
            Ok(endpoints["items"].as_array().is_none_or(Vec::is_empty) && left == 0)
        })
        .unwrap();
    for (node, before) in nodes.iter().zip(&before) {
        cluster
            .wait_for(
                &format!("{node} holds what it held: veths, rows, files, pins {before:?}"),
                Duration::from_mins(1),
                || Ok(holdings(node, vni) == *before),
            )
            .unwrap_or_else(|error| panic!("{error:#}; now {:?}", holdings(node, vni)));
    }
    tenant.remove().unwrap();
    cluster
        .wait_for("the VNI freed", Duration::from_mins(1), || {
            let vnis = get(cluster, &["vniclaims.thuban.dev"])?;
            Ok(!vnis.to_string().contains("\"burst\""))
        })
        .unwrap();
}
