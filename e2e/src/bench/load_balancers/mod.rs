//! What load balancers cost, beside their peers: packets of a client outside over routes to three nodes, what a node's
//! death does, the time from a Service to its first answer, memory, and the programs beside nftables.
//!
//! Two clusters of the same kind are up, each with a router and a client behind it. One has Thuban and what load
//! balancers need. In the other one plain routes join the pods, and kube-proxy runs in its turns. MetalLB itself
//! forwards no packet: its data path is kube-proxy's, so kube-proxy stands for it. All cases take turns, round by
//! round, with the same programs. Nothing is passed or failed by time; only a measurement that can't be made is an
//! error.

mod control;
mod cost;
mod failover;
mod haproxy;
mod memory;
mod objects;
mod plot;
mod rates;
mod report;
mod site;

use std::{path::Path, time::Duration};

use anyhow::{Context, Result};
use clap::ValueEnum;
use thuban_cluster::Cluster;
use tokio::runtime::Runtime;

use super::{
    report::Session,
    results::Results,
    services::{Parts, routes},
};
use site::Site;

/// What may be measured by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Part {
    /// Connections, streams and datagrams beside the peers.
    Rates,
    /// New and open connections while a front dies.
    Failover,
    /// Services that are made at once, and backends that change.
    Control,
    /// Memory with many load balancers.
    Memory,
    /// The programs of a front beside nftables.
    Cost,
}

/// The amounts that are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    pub parts: Vec<Part>,
    /// Turns of each case.
    pub rounds: usize,
    /// Length of one measure.
    pub time: Duration,
    /// Deaths of a front.
    pub deaths: usize,
    /// Connections of each kind that are open meanwhile.
    pub held: usize,
    /// Services that are made at once.
    pub services: usize,
    /// Changes of backends.
    pub changes: usize,
    /// Load balancers with which memory is measured.
    pub vips: usize,
    /// Numbers of load balancers with which the programs are measured.
    pub sizes: Vec<u32>,
}

impl Plan {
    pub fn wants(&self, part: Part) -> bool {
        self.parts.contains(&part)
    }

    /// Whether a part needs the cluster with Thuban.
    pub fn wants_thuban(&self) -> bool {
        self.parts.iter().any(|part| *part != Part::Cost)
    }
}

/// Measures, prints the tables and writes `lb.json`, `lb.svg` and, if rsvg-convert is there, `lb.png`.
pub fn run(plan: &Plan, parts: &Parts, folder: &Path) -> Result<()> {
    let session = Session::begin("lb", folder)?;
    let mut results = Results::default();
    let runtime = Runtime::new().context("starting tokio")?;
    let thuban = if plan.wants_thuban() {
        Some(Site::of_thuban(&parts.thuban)?)
    } else {
        None
    };
    if plan.wants(Part::Rates) {
        let thuban = thuban.as_ref().context("no cluster with Thuban")?;
        routes::lay(&parts.other, &parts.plugins)?;
        let other = Site::of_peer(&parts.other)?;
        rates::measure(thuban, &other, plan, parts, &mut results).context("rates")?;
    }
    if let Some(site) = &thuban {
        if plan.wants(Part::Failover) {
            failover::measure(site, plan, &mut results).context("failover")?;
        }
        if plan.wants(Part::Control) {
            control::measure(site, plan, &runtime, &mut results).context("control plane")?;
        }
        if plan.wants(Part::Memory) {
            memory::measure(site, plan, &runtime, &mut results).context("memory")?;
        }
    }
    if plan.wants(Part::Cost) {
        let names = [&parts.thuban, &parts.other];
        let paused = names.into_iter().filter_map(|name| Paused::new(name).transpose());
        let paused = paused.collect::<Result<Vec<_>>>()?;
        cost::measure(plan, &mut results).context("cost of the programs")?;
        drop(paused);
    }
    report::write(plan, &results, &session)
}

/// A cluster whose processes take no time until this is dropped.
struct Paused(Cluster);

impl Paused {
    /// Pauses the cluster if it is up.
    fn new(name: &str) -> Result<Option<Self>> {
        let Ok(cluster) = Cluster::named(name) else {
            return Ok(None);
        };
        let paused = Self(cluster);
        paused.0.pause()?;
        Ok(Some(paused))
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        if let Err(error) = self.0.resume() {
            eprintln!("cluster {}: {error:#}", self.0.name());
        }
    }
}
