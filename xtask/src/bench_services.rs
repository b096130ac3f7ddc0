//! `cargo xtask bench services`: brings up a cluster with Thuban and one for kube-proxy, and measures Services on both
//! in turns.

use std::{ops::ControlFlow, process::ExitCode};

use anyhow::Result;
use clap::Parser;

use crate::{
    bench::{OwnClusters, ensure_known, options},
    build::{root, step},
    cluster, cni_tools,
    go_tools::GoTools,
    install, progress,
};

const THUBAN: &str = "bench";
const OTHER: &str = "benchkp";
/// Contestants by name, as the benchmark knows them.
const CONTESTANTS: [&str; 3] = ["thuban", "iptables", "nftables"];

pub const KUBE_PROXY: GoTools = GoTools {
    name: "kube-proxy",
    modules: "e2e/kube-proxy",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "-X k8s.io/component-base/version.gitVersion=v1.36.3",
    packages: &["tool"],
    tests: &[],
    binaries: &["kube-proxy"],
};

/// Measures ClusterIPs: Thuban beside kube-proxy in iptables and in nftables mode, in turns, on clusters of their own
///
/// It measures connections, throughput, memory, and the time from a change of an EndpointSlice to its effect: among few
/// Services and among very many.
#[derive(Parser)]
#[command(name = "cargo xtask bench services")]
struct Arguments {
    /// Numbers of Services to measure with, ascending, separated by commas. Each Service has 4 backends
    #[arg(long, value_delimiter = ',', default_value = "10,1000,10000")]
    services: Vec<usize>,
    /// Number of turns of each contestant for each number of Services
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Duration in seconds of each measure
    #[arg(long, default_value_t = 1.0)]
    time: f64,
    /// Number of changes of an EndpointSlice in each turn
    #[arg(long, default_value_t = 24)]
    changes: usize,
    /// Measure only these contestants, separated by commas: thuban, iptables, nftables. Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Check only that everything works: one short round with 10 and 100 Services. The figures mean nothing
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    clusters: OwnClusters,
}

pub fn run(arguments: &[String]) -> Result<ExitCode> {
    let mut given: Arguments = match options("bench services", arguments)? {
        ControlFlow::Continue(given) => given,
        ControlFlow::Break(code) => return Ok(code),
    };
    ensure_known(&given.only, &CONTESTANTS)?;
    if given.quick {
        (given.services, given.rounds, given.time, given.changes) = (vec![10, 100], 1, 0.5, 4);
    }
    step("plugins for the other cluster", cni_tools::ensure)?;
    let kube_proxy = step("kube-proxy", || {
        progress::watched("building kube-proxy", || KUBE_PROXY.ensure())
    })?;
    let list = |all: &[String]| all.join(",");
    let sizes: Vec<String> = given.services.iter().map(usize::to_string).collect();
    let plugins = root().join("target/cni-tools");
    let program = kube_proxy.join("kube-proxy");
    let mut own = vec![
        format!("--services={}", list(&sizes)),
        format!("--rounds={}", given.rounds),
        format!("--time={}", given.time),
        format!("--changes={}", given.changes),
        format!("--thuban={THUBAN}"),
        format!("--other={OTHER}"),
        format!("--kube-proxy={}", program.display()),
        format!("--plugins={}", plugins.display()),
    ];
    if !given.only.is_empty() {
        own.push(format!("--only={}", list(&given.only)));
    }
    let (clusters, up) = (&given.clusters, || up(&given.only));
    clusters.measure(&[THUBAN, OTHER], "services-bench", up, own)
}

/// Brings up only the clusters that are asked for.
fn up(asked: &[String]) -> Result<()> {
    let wants = |name: &str| asked.is_empty() || asked.iter().any(|only| only == name);
    if wants(CONTESTANTS[0]) {
        cluster::up(THUBAN)?;
        install::run(THUBAN)?;
    }
    if CONTESTANTS[1..].iter().any(|name| wants(name)) {
        cluster::up(OTHER)?;
    }
    Ok(())
}
