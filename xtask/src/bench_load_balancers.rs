//! `cargo xtask bench lb`: brings up a cluster with Thuban and its load balancers, and one for kube-proxy and haproxy,
//! and measures both in turns.

use std::{ops::ControlFlow, process::ExitCode};

use anyhow::Result;
use clap::Parser;
use thuban_cluster::Cluster;

use crate::{
    bench::{OwnClusters, ensure_known, options},
    bench_services::KUBE_PROXY,
    build::{root, step},
    cluster, cni_tools, deps, install, load_balancers, progress,
};

const THUBAN: &str = "lb";
const OTHER: &str = "lbkp";
/// The parts by name, as the benchmark knows them.
const PARTS: [&str; 5] = [RATES, "failover", "control", "memory", COST];
/// The part that needs the other cluster, too, and the one that needs none.
const RATES: &str = "rates";
const COST: &str = "cost";

/// Measures load balancers: Thuban beside kube-proxy (MetalLB's data path), haproxy and plain routing, in turns
///
/// A client is behind a router with routes to three nodes. Parts: rates of connections, streams and datagrams;
/// failover, when a front dies; control, until Services answer; memory; cost of the programs beside nftables.
#[derive(Parser)]
#[command(name = "cargo xtask bench lb")]
struct Arguments {
    /// Measure only these parts, separated by commas: rates, failover, control, memory, cost. Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Number of turns of each case
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Duration in seconds of each measure
    #[arg(long, default_value_t = 2.0)]
    time: f64,
    /// Number of deaths of a front
    #[arg(long, default_value_t = 20)]
    deaths: usize,
    /// Number of connections that are open at each death
    #[arg(long, default_value_t = 300)]
    held: usize,
    /// Number of Services that are made at once, below 128
    #[arg(long, default_value_t = 100)]
    services: usize,
    /// Number of changes of backends
    #[arg(long, default_value_t = 100)]
    changes: usize,
    /// Number of load balancers with which memory is measured
    #[arg(long, default_value_t = 1000)]
    vips: usize,
    /// Numbers of load balancers with which the programs are measured, ascending, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "10,1000,10000")]
    sizes: Vec<u32>,
    /// Check only that everything works: one short round of everything. The figures mean nothing
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    clusters: OwnClusters,
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let mut given: Arguments = match options("bench lb", arguments)? {
        ControlFlow::Continue(given) => given,
        ControlFlow::Break(code) => return Ok(code),
    };
    ensure_known(&given.only, &PARTS)?;
    if given.only.is_empty() {
        given.only = PARTS.map(str::to_owned).into();
    }
    if given.quick {
        (given.rounds, given.time, given.deaths, given.held) = (1, 0.5, 1, 60);
        (given.services, given.changes, given.vips) = (20, 4, 50);
    }
    deps::ensure_more(&deps::TRAFFIC_PACKAGES)?;
    step("plugins for the other cluster", cni_tools::ensure)?;
    let kube_proxy = step("kube-proxy", || {
        progress::watched("building kube-proxy", || KUBE_PROXY.ensure())
    })?;
    let sizes: Vec<String> = given.sizes.iter().map(u32::to_string).collect();
    let own = vec![
        format!("--only={}", given.only.join(",")),
        format!("--rounds={}", given.rounds),
        format!("--time={}", given.time),
        format!("--deaths={}", given.deaths),
        format!("--held={}", given.held),
        format!("--services={}", given.services),
        format!("--changes={}", given.changes),
        format!("--vips={}", given.vips),
        format!("--sizes={}", sizes.join(",")),
        format!("--thuban={THUBAN}"),
        format!("--other={OTHER}"),
        format!("--kube-proxy={}", kube_proxy.join("kube-proxy").display()),
        format!("--plugins={}", root().join("target/cni-tools").display()),
    ];
    let (clusters, up) = (&given.clusters, || up(&given.only));
    clusters.measure(&[THUBAN, OTHER], "lb-bench", up, own)
}

/// Brings up only the clusters that are asked for.
fn up(parts: &[String]) -> Result<()> {
    if parts.iter().any(|part| part != COST) {
        cluster::up(THUBAN)?;
        install::run(THUBAN)?;
        step("install/load-balancers/", || {
            load_balancers::install(&Cluster::named(THUBAN)?)
        })?;
    }
    if parts.iter().any(|part| part == RATES) {
        cluster::up(OTHER)?;
    }
    Ok(())
}
