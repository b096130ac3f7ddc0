//! Thuban beside other network plugins, each at its own best documented setting: packets from pod to pod and by a
//! Service, pods that come and go, and what the daemons take.
//!
//! Each peer has a cluster of its own. All clusters are of the same kind, on the same machine, with the same underlay.
//! They take turns, round by round. A cluster is paused while it is not its turn, so that it takes no CPU time.
//! Nothing is passed or failed by time; only a measurement that can't be made is an error.

mod churn;
mod cilium;
mod daemon;
mod flannel;
mod peer;
mod plot;
mod report;
mod site;
mod thuban;
mod turn;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use super::{
    go_on,
    report::Session,
    results::{Results, Sample},
    table::number,
};
use site::Site;

/// The amounts that are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Turns of each peer.
    pub rounds: usize,
    /// Length of one measure of packets.
    pub time: Duration,
    /// Length of the measure at rest.
    pub rest: Duration,
    /// Pods that come and go at once.
    pub pods: u32,
}

/// The parts that exist before the run.
#[derive(Clone, Debug)]
pub struct Parts {
    /// Peers by name, each with the name of its cluster.
    pub clusters: Vec<(String, String)>,
    /// Programs and folders of the peers, by name.
    pub paths: BTreeMap<String, PathBuf>,
}

impl Parts {
    fn path(&self, name: &str) -> Result<&Path> {
        let path = self
            .paths
            .get(name)
            .with_context(|| format!("no path of {name}"))?;
        Ok(path)
    }
}

/// Measures, prints the tables and writes `peers.json`, `peers.svg` and, if rsvg-convert is there, `peers.png`.
pub fn run(plan: &Plan, parts: &Parts, folder: &Path) -> Result<()> {
    let session = Session::begin("peers", folder)?;
    let mut sites = Vec::new();
    for (name, cluster) in &parts.clusters {
        go_on()?;
        let peer = peer::named(name)?;
        println!("setting up {name} on cluster {cluster}");
        let site = Site::up(peer, cluster, parts).with_context(|| format!("setting up {name}"))?;
        for line in &site.setting {
            println!("  {line}");
        }
        site.cluster.pause()?;
        sites.push(site);
    }
    ensure!(!sites.is_empty(), "no peer");
    let mut results = Results::default();
    for round in 1..=plan.rounds {
        // The first peer of one round is the last of the next.
        let first = round % sites.len();
        for site in sites[first..].iter().chain(&sites[..first]) {
            go_on()?;
            let (name, began) = (site.peer.name(), Instant::now());
            let samples = turn::take(site, plan).with_context(|| name.to_owned())?;
            println!(
                "round {round} of {}, {name} ({:.0} s): {}",
                plan.rounds,
                began.elapsed().as_secs_f32(),
                line(&samples)
            );
            results.add(name, &samples);
        }
    }
    report::write(&results, &sites, plan, &session)
}

/// Returns the samples of one turn as a line.
fn line(samples: &[Sample]) -> String {
    let parts = samples
        .iter()
        .map(|sample| format!("{} {}", sample.metric, number(sample.value)));
    parts.collect::<Vec<_>>().join("  ")
}
