//! thuban-observe stands still, ends, and is told too much: packets and pods don't wait for it. What nobody hears of is
//! told.

use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use thuban_cluster::Cluster;

use super::{
    CONNECTED, LABEL, NAMESPACE, Observer, Running, fresh_outside, fresh_ports, installed, kubeconfig,
    of_all, plant_drops, wait_connected, with_kubectl,
};
use crate::flows::none_lost_while;
use crate::scrape::of_node;
use crate::support::{Hanging, Pod, apply, delete, netexec_manifest, running};
use crate::tenants::tenants;

const PROCESS: &str = "thuban-observe";
/// How long the process stands still. After 30 s nodes would leave it.
const STILL: Duration = Duration::from_secs(10);
/// From the end of a fault until flows are told again.
const TOLD_AGAIN: Duration = Duration::from_secs(30);
/// New flows in each `PACE`, so that reports wait: within what a VPC may tell in a second.
const NEWS: u16 = 200;
const PACE: Duration = Duration::from_millis(250);
/// More new flows than a VPC may tell of in two seconds of a node.
const FLOOD: u16 = 3_000;

/// Has a pod make new flows for a time.
fn make_news(pod: &Pod, time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        let (address, port) = (fresh_outside(), fresh_ports(NEWS));
        plant_drops(pod, address, port..port + NEWS)?;
        thread::sleep(PACE);
    }
    Ok(())
}

/// Makes a pod, waits until it runs, and deletes it.
fn try_pod(cluster: &Cluster, name: &str) -> Result<()> {
    apply(cluster, &[netexec_manifest("green", name, "node-a", None)])?;
    let ran = running(cluster, "green", name);
    delete(cluster, &["pod", "-n", "green", name, "--now"])?;
    ran.map(drop)
}

/// Waits until a flow is told that is new.
fn wait_told(cluster: &Cluster, pod: &Pod) -> Result<()> {
    let address = fresh_outside();
    let mut ports: Vec<u16> = Vec::new();
    cluster.wait_for("new flows", TOLD_AGAIN, || {
        // Nobody may hear of the earlier ones: they may have been on the way.
        let port = fresh_ports(1);
        plant_drops(pod, address, port..port + 1)?;
        ports.push(port);
        let told = of_all(cluster, "/v1/flows", &format!("&peer={address}"))?;
        let is_told = |port: &u16| told.contains(&format!("\"port\":{port},"));
        Ok(ports.iter().any(is_told))
    })
}

/// Returns how many events of flows the nodes know that thuban-observe has not heard of, for want of a stream.
fn lost_before_the_stream(cluster: &Cluster) -> Result<f64> {
    let mut sum = 0.0;
    for node in cluster.nodes()? {
        let series = of_node(cluster, &node)?;
        let lost = series.get(r#"thuban_transitd_flow_events_lost_total{cause="stream"}"#);
        sum += lost.copied().unwrap_or_default();
    }
    Ok(sum)
}

fn ring() -> Vec<(&'static Pod, Ipv4Addr)> {
    tenants().ring("green-web")
}

#[test]
fn packets_and_pods_wait_for_no_observer_that_stands_still() {
    let cluster = installed();
    let web = tenants().network("red-web")[0];
    let observer = Observer::find(cluster).unwrap();
    none_lost_while("thuban-observe stands still", &ring(), || {
        let _still = Hanging::new(cluster, &observer.node, PROCESS)?;
        let end = Instant::now() + STILL;
        try_pod(cluster, "told-still")?;
        make_news(web, end.saturating_duration_since(Instant::now()))
    });
    wait_told(cluster, web).unwrap();
    assert_eq!(
        Observer::find(cluster).unwrap(),
        observer,
        "it goes on, and was not started again"
    );
}

#[test]
fn packets_and_pods_wait_for_no_observer_that_is_killed() {
    let cluster = installed();
    let web = tenants().network("red-web")[0];
    let observer = Observer::find(cluster).unwrap();
    let before = lost_before_the_stream(cluster).unwrap();
    none_lost_while("thuban-observe is killed", &ring(), || {
        // It reads nothing any more, so that reports are on the way when it ends.
        let still = Hanging::new(cluster, &observer.node, PROCESS)?;
        make_news(web, Duration::from_secs(2))?;
        delete(cluster, &["pod", "-n", NAMESPACE, "-l", LABEL, "--now"])?;
        drop(still);
        try_pod(cluster, "told-killed")
    });
    let workload = "deployment/thuban-observe";
    let status = ["rollout", "status", "-n", NAMESPACE, workload, "--timeout=120s"];
    cluster.kubectl(&status).unwrap();
    wait_told(cluster, web).unwrap();
    assert_ne!(Observer::find(cluster).unwrap().name, observer.name);
    // The nodes count what was on the way.
    cluster
        .wait_for("a number of lost events", TOLD_AGAIN, || {
            let lost = lost_before_the_stream(cluster)?;
            Ok(lost > before)
        })
        .unwrap();
    // The next tests ask of all nodes.
    wait_connected(cluster, CONNECTED).unwrap();
}

#[test]
fn flows_beyond_the_budget_are_told_as_lost() {
    let cluster = installed();
    let web = tenants().network("red-web")[0];
    let flows = Running::start(&kubeconfig(cluster), &with_kubectl(cluster, "flows -A -f")).unwrap();
    // The first flood may be over before the plugin follows.
    cluster
        .wait_for("a number of lost events", TOLD_AGAIN, || {
            let port = fresh_ports(FLOOD);
            plant_drops(web, fresh_outside(), port..port + FLOOD)?;
            let on_node = format!(" events on {} (budget)", web.node);
            flows.line(&["lost: ", &on_node], Duration::from_secs(3))?;
            Ok(true)
        })
        .unwrap();
}
