//! The leader of the operators, and whether all droplets are served.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::jiff::Timestamp;
use thuban_cluster::Cluster;

use crate::support::get;

const SYSTEM: &str = "thuban-system";

/// The bound for a new leader. It is loose, because machines of tests are busy.
pub const BOUND: Duration = Duration::from_secs(30);

/// The time after which a leader's streams are as good as old ones: a stream that dies at once is dialled again with
/// pauses.
pub const LASTING: Duration = Duration::from_secs(8);

/// The time before which a leader judges no droplet.
pub const JUDGING: Duration = Duration::from_mins(1);

/// Returns the Lease's holder, and its epoch.
pub fn leader(cluster: &Cluster) -> Result<(String, u64)> {
    let lease = get(cluster, &["lease", "-n", SYSTEM, "thuban-operator"])?;
    let holder = lease["spec"]["holderIdentity"].as_str().unwrap_or_default();
    let epoch = lease["spec"]["leaseTransitions"].as_u64().unwrap_or_default();
    Ok((holder.to_owned(), epoch))
}

/// Returns the pod of a holder, and its node.
pub fn pod_of(cluster: &Cluster, holder: &str) -> Result<(String, String)> {
    let (pod, _) = holder.rsplit_once('_').context("no leader")?;
    let object = get(cluster, &["pod", "-n", SYSTEM, pod])?;
    let node = object["spec"]["nodeName"].as_str().context("a node")?;
    Ok((pod.to_owned(), node.to_owned()))
}

/// Waits until a leader of a higher epoch has the streams of all droplets. Returns from its log how long after `since`
/// it led, and how long after it all droplets had their programs.
pub fn wait_served(cluster: &Cluster, epoch: u64, since: Instant) -> Result<[Duration; 2]> {
    let begin = Timestamp::now().checked_sub(since.elapsed())?;
    let mut times = None;
    cluster.wait_for("streams of all droplets to a new leader", BOUND, || {
        let (holder, current) = leader(cluster)?;
        if holder.is_empty() || current <= epoch {
            return Ok(false);
        }
        let (pod, _) = pod_of(cluster, &holder)?;
        let log = cluster.kubectl(&["logs", "-n", SYSTEM, &pod])?;
        // Only lines of this leadership count: a process that lost one begins again under its old log.
        let lines: Vec<&str> = log.lines().collect();
        let leads = lines.iter().rposition(|line| line.contains(" leading "));
        let own = &lines[leads.unwrap_or_default()..];
        let at = |words: &[&str]| {
            let line = own
                .iter()
                .find(|line| words.iter().all(|word| line.contains(word)))?;
            let written: Timestamp = line.split_whitespace().next()?.parse().ok()?;
            Some(Duration::try_from(written.duration_since(begin)).unwrap_or_default())
        };
        let nodes = cluster.nodes()?;
        let opened = nodes
            .iter()
            .map(|node| at(&["stream opened", &format!("droplet=\"{node}\"")]));
        let served: Option<Vec<Duration>> = opened.chain([at(&["get their programs"])]).collect();
        times = at(&[" leading "]).zip(served.and_then(|all| all.into_iter().max()));
        Ok(times.is_some())
    })?;
    let (leads, serves) = times.context("no times")?;
    Ok([leads, serves])
}

/// Waits until a leader has led for a time.
pub fn wait_led(cluster: &Cluster, time: Duration) -> Result<()> {
    cluster.wait_for("a leader that lasts", time + BOUND, || {
        let lease = get(cluster, &["lease", "-n", SYSTEM, "thuban-operator"])?;
        let acquired: Timestamp = lease["spec"]["acquireTime"].as_str().context("a time")?.parse()?;
        Ok(Timestamp::now().duration_since(acquired) > time.try_into()?)
    })
}
