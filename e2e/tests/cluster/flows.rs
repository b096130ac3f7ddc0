//! Flows that are always new: each is one question by UDP from a port of its own, and its answer. Losses are reported.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use anyhow::{Context, Result};
use thuban_cluster::Cluster;

use crate::requests::{self, Failure, LATE, Load, Way, under_load};
use crate::support::{Pod, REACHED, get};
use crate::tenants::tenants;

const PAUSE: Duration = Duration::from_millis(4);

/// The results of the flows of one sender.
#[derive(Debug, Default)]
pub struct Tally {
    pub sent: usize,
    /// The lost flows: when each began, since the first, and why it counts as lost.
    pub lost: Vec<Failure>,
}

/// Sends flows from each pod to its address while `work` runs, and asserts that none is lost.
pub fn none_lost_while(what: &str, ways: &[(&Pod, Ipv4Addr)], work: impl FnOnce() -> Result<()>) {
    let cluster = &tenants().cluster;
    let before = Counted::now(cluster);
    let tallies = while_flowing(ways, LATE, work).unwrap_or_else(|error| panic!("{what}: {error:#}"));
    let sent: usize = tallies.iter().map(|tally| tally.sent).sum();
    let lost: Vec<&Failure> = tallies.iter().flat_map(|tally| &tally.lost).collect();
    eprintln!("{what}: {sent} flows, {} lost", lost.len());
    assert!(sent > 20, "{what}: only {sent} flows");
    before.assert_not_lost(cluster, &lost, what);
}

/// Sends flows while `work` runs, and returns their results. An answer that takes longer than `waits` counts as lost.
pub fn while_flowing(
    ways: &[(&Pod, Ipv4Addr)],
    waits: Duration,
    work: impl FnOnce() -> Result<()>,
) -> Result<Vec<Tally>> {
    for (pod, address) in ways {
        pod.udp(*address, REACHED)?;
    }
    let loads: Vec<_> = ways.iter().map(|way| load(way, waits)).collect();
    let tallies = under_load(&loads, |_| work())?;
    let told = |tally: requests::Tally| Tally {
        sent: tally.answers.values().sum::<u64>() as usize + tally.failures.len(),
        lost: tally.failures,
    };
    Ok(tallies.into_iter().map(told).collect())
}

fn load<'a>((pod, address): &(&'a Pod, Ipv4Addr), waits: Duration) -> Load<'a> {
    Load {
        pod,
        address: *address,
        way: Way::Udp,
        pause: PAUSE,
        waits,
    }
}

/// The names of the counters of what the machine itself has dropped: the queues of its CPUs were full, or those of the
/// veths that play the underlay (256 packets, `VETH_RING_SIZE`).
const MACHINE_DROPS: [&str; 2] = ["backlog_dropped", "uplink_dropped"];

/// How many lost datagrams are the machine's at most, in a test.
const MAX_EXCUSED: u64 = 2;

/// Counters of all nodes at one time, and what the machine itself has dropped.
pub struct Counted(BTreeMap<(String, String), u64>);

impl Counted {
    pub fn now(cluster: &Cluster) -> Self {
        let mut counters = counters(cluster).unwrap_or_default();
        let dropped = backlog_drops().unwrap_or_default();
        counters.insert(("machine".into(), MACHINE_DROPS[0].into()), dropped);
        for node in cluster.nodes().unwrap_or_default() {
            if let Ok(dropped) = uplink_drops(cluster, &node) {
                counters.insert((node, MACHINE_DROPS[1].into()), dropped);
            }
        }
        Self(counters)
    }

    /// Returns by how much a counter has grown in all, where both know it.
    fn growth_of(&self, now: &Self, name: &str) -> u64 {
        let own = now.0.iter().filter(|((_, other), _)| other == name);
        own.filter_map(|(at, count)| Some(count.saturating_sub(*self.0.get(at)?)))
            .sum()
    }

    /// Asserts that no datagram was lost but a few that the machine itself dropped. Each is sent once, so one that
    /// the machine drops is missed.
    pub fn assert_not_lost(&self, cluster: &Cluster, lost: &[&Failure], what: &str) {
        if lost.is_empty() {
            return;
        }
        let now = Self::now(cluster);
        // A packet that does not fit into a CPU's queue may count at its link, too.
        let dropped = MACHINE_DROPS
            .map(|name| self.growth_of(&now, name))
            .into_iter()
            .max();
        let dropped = dropped.unwrap_or_default().min(MAX_EXCUSED);
        let told = format!(
            "{what}: {} lost, {lost:?}; counters since: {}",
            lost.len(),
            self.growth(cluster)
        );
        assert!(lost.len() as u64 <= dropped, "{told}");
        eprintln!("  not counted, for the machine dropped {dropped} packets: {told}");
    }

    /// Returns the counters that have grown since, and by how much.
    pub fn growth(&self, cluster: &Cluster) -> String {
        let mut told = String::new();
        for (at, count) in Self::now(cluster).0 {
            let more = count.saturating_sub(self.0.get(&at).copied().unwrap_or_default());
            if more > 0 {
                let _ = write!(told, "{} {} {more}, ", at.0, at.1);
            }
        }
        told
    }
}

/// Returns how many packets did not fit into the queues of the machine's CPUs: the second column of `softnet_stat`,
/// hexadecimal, one line for each CPU (`net/core/net-procfs.c`).
fn backlog_drops() -> Result<u64> {
    let table = fs::read_to_string("/proc/net/softnet_stat")?;
    let drops = table.lines().map(|line| {
        let column = line.split_whitespace().nth(1).context("no second column")?;
        Ok(u64::from_str_radix(column, 16)?)
    });
    drops.sum()
}

/// Returns how many packets the veth of a node's uplink has dropped, at both ends.
fn uplink_drops(cluster: &Cluster, node: &str) -> Result<u64> {
    let port = cluster.instance().uplink(node);
    let inside = cluster.exec_on_node(node, &["cat", "/proc/net/dev"])?;
    Ok(dropped(&fs::read_to_string("/proc/net/dev")?, &port)? + dropped(&inside, "eth0")?)
}

/// Reads the drops of a link, received and sent, from `/proc/net/dev`.
fn dropped(table: &str, link: &str) -> Result<u64> {
    let own = |line: &str| Some(line.trim().strip_prefix(link)?.strip_prefix(':')?.to_owned());
    let line = table.lines().find_map(own).context("no such link")?;
    let columns: Vec<&str> = line.split_whitespace().collect();
    let column = |at: usize| Ok::<u64, anyhow::Error>(columns.get(at).context("a column")?.parse()?);
    Ok(column(3)? + column(11)?)
}

/// Returns the counters by node and name.
fn counters(cluster: &Cluster) -> Result<BTreeMap<(String, String), u64>> {
    let mut all = BTreeMap::new();
    for node in cluster.nodes()? {
        for (name, count) in cluster.counters(&node)? {
            all.insert((node.clone(), name), count);
        }
    }
    Ok(all)
}

/// Returns how many packets bouncers and dividers of all nodes have passed on.
pub fn passed_on(cluster: &Cluster) -> Result<u64> {
    let counters = counters(cluster)?;
    let of_roles = counters
        .iter()
        .filter(|((_, name), _)| name == "bounced" || name == "divided");
    Ok(of_roles.map(|(_, count)| count).sum())
}

/// Returns where the roles of a parent work: `kind` is `bouncers` or `dividers`. Returns none while one of them is on
/// the way, or their number is another one.
pub fn settled(cluster: &Cluster, kind: &str, parent: &str, number: usize) -> Result<Option<Vec<String>>> {
    let field = if kind == "bouncers" { "network" } else { "vpc" };
    let list = get(cluster, &[&format!("{kind}.thuban.dev")])?;
    let mut droplets = Vec::new();
    for role in list["items"].as_array().into_iter().flatten() {
        if role["spec"][field] != parent {
            continue;
        }
        let is_settled = role["metadata"]["deletionTimestamp"].is_null()
            && role["status"]["phase"] == "Provisioned"
            && role["status"]["droplet"] == role["spec"]["droplet"];
        match role["spec"]["droplet"].as_str() {
            Some(droplet) if is_settled => droplets.push(droplet.to_owned()),
            _ => return Ok(None),
        }
    }
    Ok((droplets.len() == number).then_some(droplets))
}

/// Waits until the roles are settled; returns where.
pub fn wait_settled(cluster: &Cluster, kind: &str, parent: &str, number: usize) -> Result<Vec<String>> {
    let mut droplets = Vec::new();
    let what = format!("{number} {kind} of {parent} at work");
    cluster.wait_for(&what, Duration::from_mins(1), || {
        Ok(settled(cluster, kind, parent, number)?.is_some_and(|found| {
            droplets = found;
            true
        }))
    })?;
    Ok(droplets)
}
