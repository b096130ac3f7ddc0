//! The leading operator dies or stops: how long until the next one serves all droplets; traffic doesn't notice.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use thuban_cluster::Cluster;

use crate::flows::none_lost_while;
use crate::support::get;
use crate::tenants::tenants;

const SYSTEM: &str = "thuban-system";
/// Loose: machines of tests are busy.
const BOUND: Duration = Duration::from_secs(30);

/// The Lease's holder, and its epoch.
pub fn leader(cluster: &Cluster) -> Result<(String, u64)> {
    let lease = get(cluster, &["lease", "-n", SYSTEM, "thuban-operator"])?;
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
    let epoch = lease["spec"]["leaseTransitions"].as_u64().unwrap_or_default();
    Ok((holder.to_owned(), epoch))
}

/// The pod of a holder, and its node.
pub fn pod_of(cluster: &Cluster, holder: &str) -> Result<(String, String)> {
    let (pod, _) = holder.rsplit_once('_').context("no leader")?;
    let object = get(cluster, &["pod", "-n", SYSTEM, pod])?;
    let node = object["spec"]["nodeName"].as_str().context("a node")?;
    Ok((pod.to_owned(), node.to_owned()))
}

/// Waits until a leader of a higher epoch has the streams of all droplets; how long that took.
pub fn wait_served(cluster: &Cluster, epoch: u64, since: Instant) -> Result<[Duration; 2]> {
    let mut leads = None;
    cluster.wait_for("streams of all droplets to a new leader", BOUND, || {
        let (holder, current) = leader(cluster)?;
        if holder.is_empty() || current <= epoch {
            return Ok(false);
        }
        leads.get_or_insert_with(|| since.elapsed());
        let (pod, _) = pod_of(cluster, &holder)?;
        let log = cluster.kubectl(&["logs", "-n", SYSTEM, &pod])?;
        // Of this leadership: a process that lost one begins again under its old log.
        let lines: Vec<&str> = log.lines().collect();
        let begin = lines.iter().rposition(|line| line.contains(" leading "));
        let own = &lines[begin.unwrap_or_default()..];
        let opened = |node: &String| {
            own.iter()
                .any(|line| line.contains("stream opened") && line.contains(&format!("droplet=\"{node}\"")))
        };
        Ok(cluster.nodes()?.iter().all(opened))
    })?;
    Ok([leads.unwrap_or_default(), since.elapsed()])
}

fn replaced(what: &str, end: impl FnOnce(&Cluster, &str, &str) -> Result<()>) {
    let cluster = &tenants().cluster;
    let ways = tenants().ring("red-web");
    none_lost_while(what, &ways, || {
        let (holder, epoch) = leader(cluster)?;
        let (pod, node) = pod_of(cluster, &holder)?;
        let since = Instant::now();
        end(cluster, &pod, &node)?;
        let [leads, serves] = wait_served(cluster, epoch, since)?;
        eprintln!("{what}: the next one leads after {leads:.1?}, serves all droplets after {serves:.1?}");
        ensure!(serves < BOUND);
        Ok(())
    });
    cluster
        .kubectl(&[
            "rollout",
            "status",
            "-n",
            SYSTEM,
            "deployment/thuban-operator",
            "--timeout=120s",
        ])
        .unwrap();
}

#[test]
fn a_leader_that_is_killed_is_replaced_and_traffic_flows() {
    replaced("the leader is killed", |cluster, _, node| {
        cluster.signal(node, "thuban-operator", "KILL")
    });
}

#[test]
fn a_leader_that_stops_hands_over_and_traffic_flows() {
    replaced("the leader stops", |cluster, pod, _| {
        cluster
            .kubectl(&["delete", "pod", "-n", SYSTEM, pod, "--wait=false"])
            .map(|_| ())
    });
}
