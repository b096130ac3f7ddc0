//! ClusterIPs by Thuban beside kube-proxy: connections, throughput, the time from a change of an EndpointSlice to its
//! effect, and memory, among few Services and among very many.
//!
//! Two clusters of the same kind are up. One has Thuban. In the other one, plain routes join the pods, and the nodes
//! run kube-proxy in one mode or the other. All contestants take turns, round by round, with the same programs in their
//! pods. Each also measures its own way from pod to pod without a Service, which separates the Service's part from the
//! network's. Nothing is passed or failed by time; only a measurement that can't be made is an error.

pub(super) mod change;
pub(super) mod kube_proxy;
pub(super) mod memory;
mod objects;
mod plot;
mod pods;
mod report;
pub(super) mod routes;
pub(super) mod site;
pub(super) mod traffic;
mod turn;

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use tokio::runtime::Runtime;

use super::{float, go_on, kube_proxy::Mode, report::Session};
use report::Report;
use site::Site;
use turn::Contestant;

/// The amounts that are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Numbers of Services, ascending.
    pub sizes: Vec<usize>,
    /// Turns of each contestant at each size.
    pub rounds: usize,
    /// Length of one measure.
    pub time: Duration,
    /// Changes of an EndpointSlice in a turn.
    pub changes: usize,
    /// Contestants by name; all when empty.
    pub only: Vec<String>,
}

/// The parts that exist before the run.
#[derive(Args, Clone, Debug)]
pub struct Parts {
    /// Name of the cluster with Thuban
    #[arg(long)]
    pub thuban: String,
    /// Name of the cluster without a network plugin
    #[arg(long)]
    pub other: String,
    /// Binary of kube-proxy
    #[arg(long)]
    pub kube_proxy: PathBuf,
    /// Folder with the plugins ptp and host-local
    #[arg(long)]
    pub plugins: PathBuf,
}

/// Measures, prints the tables and writes `services.json`, `services.svg` and, if rsvg-convert is there,
/// `services.png`.
pub fn run(plan: &Plan, parts: &Parts, folder: &Path) -> Result<()> {
    let session = Session::begin("services", folder)?;
    let least = objects::LEAST;
    ensure!(
        plan.sizes.first().is_some_and(|size| *size >= least),
        "sizes must be at least {least}"
    );
    ensure!(plan.sizes.is_sorted(), "sizes must ascend");
    let mut contestants = vec![
        Contestant::Thuban,
        Contestant::KubeProxy(Mode::Iptables),
        Contestant::KubeProxy(Mode::Nftables),
    ];
    contestants.retain(|one| plan.only.is_empty() || plan.only.iter().any(|name| name == one.name()));
    ensure!(!contestants.is_empty(), "nothing of these names is known");

    let runtime = Runtime::new().context("starting tokio")?;
    let wants = |thuban: bool| contestants.iter().any(|one| one.is_thuban() == thuban);
    let mut sites = Vec::new();
    if wants(true) {
        sites.push(Site::up(&runtime, &parts.thuban, true)?);
    }
    if wants(false) {
        routes::lay(&parts.other, &parts.plugins)?;
        sites.push(Site::up(&runtime, &parts.other, false)?);
    }
    let mut report = Report::default();
    for &size in &plan.sizes {
        for site in &mut sites {
            let (took, served) = site.grow(&runtime, size)?;
            let (who, took) = (site.name(), took.as_secs_f64());
            report.add(size, 0, who, "fill_s", "s", took);
            if let Some(served) = served {
                report.add(size, 0, who, "provisioned", "Services", float(served as u64));
            }
        }
        for round in 1..=plan.rounds {
            // The first contestant of one round is the last of the next.
            let first = round % contestants.len();
            for contestant in contestants[first..].iter().chain(&contestants[..first]) {
                go_on()?;
                let began = Instant::now();
                let site = sites.iter().find(|site| site.is_thuban == contestant.is_thuban());
                let site = site.context("a site")?;
                let samples = turn::take(*contestant, site, plan, parts, &runtime)
                    .with_context(|| format!("{} at {size} Services", contestant.name()))?;
                println!(
                    "{size} Services, round {round} of {}, {:<9} ({:.0} s):{}",
                    plan.rounds,
                    contestant.name(),
                    began.elapsed().as_secs_f32(),
                    turn::line(&samples)
                );
                report.add_all(size, round, contestant.name(), samples);
            }
        }
    }
    report.write(plan, &session)
}
