//! Pods that come and go at once on one node: how long that takes, what of it the network takes, and what it costs the
//! peer's programs.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, TcpStream},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::json;
use thuban_cluster::{Cluster, NODES as ALL_NODES, wait::wait_until};

use super::{daemon::Daemons, site::Site};
use crate::bench::{
    go_on,
    machine::busy_ms,
    pods::{NODES, spec},
    results::Sample,
};

const SPACE: &str = "peers";
/// The node on which pods come and go: the server's.
const NODE: &str = NODES[1];
const TIMEOUT: &str = "--timeout=300s";
const READY_TIMEOUT: Duration = Duration::from_mins(5);
/// The pause between looks at memory and at the runtime's counts.
const LOOK: Duration = Duration::from_millis(100);
/// Where containerd tells its metrics (`e2e/cluster/src/node.rs`).
const METRICS_PORT: u16 = 1338;

/// Measures one burst of pods.
pub fn measure(site: &Site, pods: u32) -> Result<Vec<Sample>> {
    let (cluster, peer) = (&site.cluster, &site.peer);
    let daemons = Daemons::find(cluster, &[NODE], peer.daemons(), false)?;
    let controllers = Daemons::find(cluster, &ALL_NODES, peer.controllers(), true)?;
    let cpu_before = (daemons.cpu_ms()?, controllers.cpu_ms()?, busy_ms()?);
    let network_before = Operations::of(cluster)?;
    let is_done = AtomicBool::new(false);
    let (times, most) = thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most = 0.0;
            while !is_done.load(Ordering::Relaxed) {
                most = daemons.rss_mib()?.max(most);
                thread::sleep(LOOK);
            }
            anyhow::Ok(most)
        });
        let times = burst(cluster, pods, network_before);
        is_done.store(true, Ordering::Relaxed);
        let most = watcher.join().map_err(|_| anyhow!("the watcher panicked"))?;
        anyhow::Ok((times?, most?))
    })?;
    let busy = busy_ms()?;
    let network = Operations::of(cluster)?;
    let per_pod = |after: f64, before: f64| (after - before) / f64::from(pods);
    Ok(vec![
        Sample::new("add_all_s", "s", times.0.as_secs_f64()),
        Sample::new("del_all_s", "s", times.1.as_secs_f64()),
        Sample::new(
            "add_ms",
            "ms",
            network.set_up.mean_ms_since(network_before.set_up)?,
        ),
        Sample::new(
            "del_ms",
            "ms",
            network.tear_down.mean_ms_since(network_before.tear_down)?,
        ),
        Sample::new("churn_rss_mib", "MiB", most),
        Sample::new(
            "churn_cpu_ms_per_pod",
            "ms",
            per_pod(daemons.cpu_ms()?, cpu_before.0),
        ),
        Sample::new("churn_machine_cpu_ms_per_pod", "ms", per_pod(busy, cpu_before.2)),
        Sample::new(
            "churn_controller_cpu_ms_per_pod",
            "ms",
            per_pod(controllers.cpu_ms()?, cpu_before.1),
        ),
    ])
}

/// Returns how long it takes until all of these pods run, and until all are gone from the API server and the node.
fn burst(cluster: &Cluster, pods: u32, before: Operations) -> Result<(Duration, Duration)> {
    let mut spec = spec(NODE);
    // With 0 the API server forgets a pod long before its node has removed it.
    spec["terminationGracePeriodSeconds"] = json!(1);
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "burst", "namespace": SPACE},
        "spec": {"replicas": pods, "selector": {"matchLabels": {"app": "burst"}}, "template": {
            "metadata": {"labels": {"app": "burst"}}, "spec": spec,
        }},
    });
    let begin = Instant::now();
    cluster.kubectl_apply(&set.to_string())?;
    let ready = format!("--for=jsonpath={{.status.readyReplicas}}={pods}");
    cluster.kubectl(&["wait", "-n", SPACE, "replicaset/burst", &ready, TIMEOUT])?;
    let come = begin.elapsed();
    let begin = Instant::now();
    cluster.kubectl(&["delete", "replicaset", "-n", SPACE, "burst", "--wait=false"])?;
    cluster.kubectl(&[
        "wait",
        "-n",
        SPACE,
        "pods",
        "-l",
        "app=burst",
        "--for=delete",
        TIMEOUT,
    ])?;
    let wanted = before.tear_down.count + f64::from(pods);
    let left = READY_TIMEOUT.saturating_sub(begin.elapsed());
    wait_until("the end of all networks of pods", left, LOOK, || {
        go_on()?;
        let is_over = Operations::of(cluster)?.tear_down.count >= wanted;
        Ok(is_over.then_some(()))
    })?;
    Ok((come, begin.elapsed()))
}

/// The network's operations of a node, as its containerd has timed them: all plugins of a pod's chain together.
#[derive(Clone, Copy, Debug)]
struct Operations {
    set_up: Operation,
    tear_down: Operation,
}

#[derive(Clone, Copy, Debug)]
struct Operation {
    count: f64,
    seconds: f64,
}

impl Operations {
    fn of(cluster: &Cluster) -> Result<Self> {
        let text = cluster.in_node(NODE, || {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, METRICS_PORT))?;
            stream.write_all(b"GET /v1/metrics HTTP/1.0\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        });
        let text = text.context("containerd's metrics")?;
        Ok(Self {
            set_up: Operation::read(&text, "set_up_pod"),
            tear_down: Operation::read(&text, "tear_down_pod"),
        })
    }
}

impl Operation {
    /// Reads the metrics' text. Lines have the form `NAME_sum{operation_type="set_up_pod"} 1.5`. A kind that has not
    /// happened yet has no line.
    fn read(text: &str, name: &str) -> Self {
        let value = |ending: &str| {
            let is_wanted = |line: &&str| {
                line.contains("network_plugin_operations_duration_seconds")
                    && line.contains(&format!("_{ending}{{"))
                    && line.contains(&format!("\"{name}\""))
            };
            let line = text.lines().find(is_wanted)?;
            line.rsplit_once(' ')?.1.parse().ok()
        };
        Self {
            count: value("count").unwrap_or_default(),
            seconds: value("sum").unwrap_or_default(),
        }
    }

    fn mean_ms_since(self, before: Self) -> Result<f64> {
        let count = self.count - before.count;
        ensure!(count > 0.0, "containerd has timed no operation");
        Ok((self.seconds - before.seconds) / count * 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::Operation;

    #[test]
    fn times_of_the_plugin_are_read_by_their_kind() {
        let text = "x_network_plugin_operations_duration_seconds_sum{operation_type=\"tear_down_pod\"} 9\n\
            x_network_plugin_operations_duration_seconds_sum{operation_type=\"set_up_pod\"} 1.5\n\
            x_network_plugin_operations_duration_seconds_count{operation_type=\"set_up_pod\"} 3\n";
        let (read, none) = (
            Operation::read(text, "set_up_pod"),
            Operation::read("", "set_up_pod"),
        );
        assert!((read.mean_ms_since(none).unwrap() - 500.0).abs() < 1e-9);
        assert!(read.mean_ms_since(read).is_err());
    }
}
