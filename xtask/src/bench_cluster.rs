//! `cargo xtask bench cni --cluster`: how long a node takes to bring up a burst of pods, by Thuban and by the bridge
//! plugin.
//!
//! Both run on the same node of one cluster, in turns: each turn has another file with the node's network
//! configuration. The operator is away while the bridge plugin has its turn, so that this turn doesn't pay for Thuban's
//! work. Times are of this program's clock, from before it asks for the pods until the last pod runs. The ratio is
//! taken round by round, and the report has its median.

use std::{
    fs,
    ops::ControlFlow,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::Parser;
use serde_json::{Value, json};
use thuban_cluster::Cluster;

use crate::{
    bench::options,
    build::{self, root, step},
    cluster, cni_tools, install,
};

const CLUSTER: &str = "bench";
const NODE: &str = "node-b";
const SPACE: &str = "burst";
/// A name before Thuban's 05-thuban.conflist: a runtime takes the first.
const CONFLIST: &str = "/etc/cni/net.d/01-bridge.conflist";
const READY_TIMEOUT: Duration = Duration::from_mins(5);

/// Measures how long a node takes to start many pods at once: Thuban beside the bridge plugin, on a cluster of its own
#[derive(Parser)]
#[command(name = "cargo xtask bench cni --cluster")]
struct Arguments {
    /// Number of rounds of each plugin
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Number of pods that are created at once, at most 110
    #[arg(long, default_value_t = 50)]
    pods: u32,
    /// Leave the cluster running at the end
    #[arg(long)]
    keep: bool,
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let given: Arguments = match options("bench cni --cluster", arguments)? {
        ControlFlow::Continue(given) => given,
        ControlFlow::Break(code) => return Ok(code),
    };
    if given.rounds == 0 || given.pods == 0 {
        bail!("--rounds and --pods must be at least 1");
    }
    step("plugins to compare with", cni_tools::ensure)?;
    cluster::down(CLUSTER)?;
    build::run()?;
    let result = cluster::up(CLUSTER)
        .and_then(|()| install::run(CLUSTER))
        .and_then(|()| measure(&given));
    if !given.keep {
        cluster::down(CLUSTER)?;
    }
    result.map(|()| ExitCode::SUCCESS)
}

fn measure(given: &Arguments) -> Result<()> {
    let cluster = Cluster::named(CLUSTER)?;
    let space = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SPACE}});
    cluster.kubectl_apply(&space.to_string())?;
    for name in ["bridge", "host-local"] {
        let built = root().join("target/cni-tools").join(name);
        let built = built.display().to_string();
        cluster.exec_on_node(NODE, &["cp", &built, "/opt/cni/bin/"])?;
    }
    // Loads programs, fills caches and makes the bridge.
    burst(&cluster, 2)?;
    by_bridge(&cluster, || burst(&cluster, 2))?;
    let mut rounds = Vec::new();
    for round in 1..=given.rounds {
        let thuban = burst(&cluster, given.pods)?;
        let bridge = by_bridge(&cluster, || burst(&cluster, given.pods))?;
        println!(
            "round {round} of {}: {} pods by Thuban in {thuban:.1} s, by bridge in {bridge:.1} s",
            given.rounds, given.pods
        );
        rounds.push((thuban, bridge));
    }
    report(given, &rounds)
}

/// Does `work` while the node's pods get their network from the bridge plugin and the operator is away.
fn by_bridge(cluster: &Cluster, work: impl FnOnce() -> Result<f64>) -> Result<f64> {
    let conflist = json!({
        "cniVersion": "1.0.0", "name": "bridge",
        "plugins": [{
            "type": "bridge", "bridge": "burst0", "isGateway": true,
            "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.240.0.0/22"}]],
                     "routes": [{"dst": "0.0.0.0/0"}]},
        }],
    });
    operators(cluster, 0)?;
    let write = format!("printf %s '{conflist}' > {CONFLIST}.tmp && mv {CONFLIST}.tmp {CONFLIST}");
    cluster.exec_on_node(NODE, &["sh", "-c", &write])?;
    let took = known(cluster).and_then(|()| work());
    cluster.exec_on_node(NODE, &["rm", "-f", CONFLIST])?;
    known(cluster)?;
    operators(cluster, 2)?;
    took
}

/// Waits until the runtime knows the folder's new content. A runtime reads its folder when the folder changes, and
/// doesn't say when it has read it.
fn known(cluster: &Cluster) -> Result<()> {
    std::thread::sleep(Duration::from_secs(3));
    wait_node(cluster)
}

fn wait_node(cluster: &Cluster) -> Result<()> {
    cluster.wait_for("the node", READY_TIMEOUT, || {
        Ok(install::is_ready(&install::get(cluster, &["node", NODE])?))
    })
}

fn operators(cluster: &Cluster, number: u64) -> Result<()> {
    let scale = format!("--replicas={number}");
    cluster.kubectl(&[
        "scale",
        "-n",
        install::NAMESPACE,
        "deployment/thuban-operator",
        &scale,
    ])?;
    cluster.wait_for("the operators", READY_TIMEOUT, || {
        let selector = "app.kubernetes.io/name=thuban-operator";
        let pods = install::get(cluster, &["pods", "-n", install::NAMESPACE, "-l", selector])?;
        Ok(pods["items"].as_array().map_or(0, Vec::len) as u64 == number)
    })?;
    if number > 0 {
        // The streams must be back too: the droplets report that.
        cluster.wait_for("the droplets", READY_TIMEOUT, || {
            let droplets = install::get(cluster, &["droplets.thuban.dev"])?;
            let all = droplets["items"].as_array().cloned().unwrap_or_default();
            Ok(!all.is_empty() && all.iter().all(is_connected))
        })?;
    }
    Ok(())
}

fn is_connected(droplet: &Value) -> bool {
    let conditions = droplet["status"]["conditions"].as_array();
    conditions.is_some_and(|all| {
        all.iter()
            .any(|is| is["type"] == "Ready" && is["reason"] == "Connected")
    })
}

/// Returns the seconds from before the pods are asked for until all run. The pods are gone when it returns.
fn burst(cluster: &Cluster, pods: u32) -> Result<f64> {
    let set = json!({
        "apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "burst", "namespace": SPACE},
        "spec": {"replicas": pods, "selector": {"matchLabels": {"app": "burst"}}, "template": {
            "metadata": {"labels": {"app": "burst"}},
            "spec": {"nodeSelector": {"kubernetes.io/hostname": NODE}, "terminationGracePeriodSeconds": 0,
                "containers": [{"name": "pause", "image": "registry.k8s.io/pause:3.10"}]},
        }},
    });
    let begin = Instant::now();
    cluster.kubectl_apply(&set.to_string())?;
    let ready = format!("--for=jsonpath={{.status.readyReplicas}}={pods}");
    let timeout = format!("--timeout={}s", READY_TIMEOUT.as_secs());
    cluster.kubectl(&["wait", "-n", SPACE, "replicaset/burst", &ready, &timeout])?;
    let took = begin.elapsed().as_secs_f64();
    cluster.kubectl(&["delete", "replicaset", "-n", SPACE, "burst", "--wait=false"])?;
    cluster.wait_for("the pods gone", READY_TIMEOUT, || {
        let pods = install::get(cluster, &["pods", "-n", SPACE])?;
        Ok(pods["items"].as_array().is_none_or(Vec::is_empty))
    })?;
    Ok(took)
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 {
        values[middle]
    } else {
        f64::midpoint(values[middle - 1], values[middle])
    }
}

fn report(given: &Arguments, rounds: &[(f64, f64)]) -> Result<()> {
    let thuban = median(rounds.iter().map(|(thuban, _)| *thuban));
    let bridge = median(rounds.iter().map(|(_, bridge)| *bridge));
    let ratio = median(rounds.iter().map(|(thuban, bridge)| thuban / bridge));
    println!(
        "\n{} pods of one node, from asked for to running; medians of {} rounds\n",
        given.pods,
        rounds.len()
    );
    println!("  Thuban           {thuban:>6.1} s\n  bridge           {bridge:>6.1} s");
    println!("  Thuban / bridge  {ratio:>6.3}   goal: not slower");
    let number =
        |metric: &str, unit: &str, value: f64| json!({"metric": metric, "unit": unit, "value": value});
    let file = json!({
        "pods": given.pods, "rounds": rounds.len(),
        "results": [
            number("burst_thuban_s", "s", thuban),
            number("burst_bridge_s", "s", bridge),
            number("burst_thuban_to_bridge", "ratio", ratio),
        ],
    });
    let path = root().join("target/bench/cni-cluster.json");
    fs::create_dir_all(root().join("target/bench"))?;
    fs::write(&path, format!("{file:#}\n")).with_context(|| format!("writing {}", path.display()))?;
    println!("\nwrote {}", path.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::median;

    #[test]
    fn the_median_is_the_middle() {
        assert!((median([3.0, 1.0, 2.0].into_iter()) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0, 2.0, 3.0].into_iter()) - 2.5).abs() < 1e-9);
    }
}
