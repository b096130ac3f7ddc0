//! The control-plane benchmark: the real operator and a real API server, with droplets that have no data plane.
//!
//! The whole cost of an endpoint is measured where it arrives: rows at the droplets, times by the bench's own clock and
//! watches, writes by the API server's own counters. Nothing is passed or failed by time. A step that does not end is
//! reported, and makes the run fail.

mod bare;
mod churn;
mod copies;
mod fleet;
mod hollow;
mod load;
mod lock;
mod metrics;
mod plane;
mod plot;
mod policies;
pub mod process;
mod progress;
pub mod report;
mod rest;
mod resync;
mod sampler;
mod tally;
mod tenants;
mod track;
mod vpcs;
mod watches;

use std::{
    collections::VecDeque,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, api::PostParams};
use tokio::task::JoinSet;

use super::report::Session;
use fleet::Fleet;
use hollow::Book;
pub use plane::Parts;
use plane::Plane;
use process::Operator;
use progress::{patience, until};
use report::Report;
use sampler::Sampler;
use tally::Tally;
use tenants::Tenants;
use track::Track;
use watches::Watches;

/// The amounts that are measured.
#[derive(Clone, Debug)]
pub struct Plan {
    pub droplets: usize,
    pub vpcs: usize,
    pub networks: usize,
    pub endpoints: usize,
    /// Bouncers of each network.
    pub bouncers: u32,
    /// Endpoints that are made in a second; as many are deleted.
    pub churn: usize,
    /// Length of the churn.
    pub seconds: usize,
    /// Rates of churn that come before the main churn, for [`LADDER_SECONDS`] each.
    pub ladder: Vec<usize>,
    /// Rounds of VPCs made at once.
    pub rounds: usize,
}

/// Droplets at the beginning, for rows that must not become more with more droplets.
const FEW: usize = 10;
const LADDER_SECONDS: usize = 15;
/// Networks that exist while the droplets are few.
const FEW_NETWORKS: usize = 20;
/// Endpoints made while the droplets are few.
const FEW_ENDPOINTS: usize = 200;

/// Whether the operator ended without being asked to.
static OPERATOR_GONE: AtomicBool = AtomicBool::new(false);

/// Returns an error if there is nothing to wait for any more.
fn go_on() -> Result<()> {
    super::go_on()?;
    ensure!(
        !OPERATOR_GONE.load(Ordering::Relaxed),
        "the operator has ended, the end of scale-operator.log says why"
    );
    Ok(())
}

/// Everything that is up during a run. It is taken down in this order.
struct Bench {
    plan: Plan,
    tenants: Tenants,
    book: Arc<Book>,
    /// Existing pods, oldest first.
    live: VecDeque<usize>,
    report: Report,
    watches: Watches,
    fleet: Fleet,
    sampler: Sampler,
    operator: Operator,
    /// The number of operators that were started.
    operators: u32,
    plane: Plane,
    _tasks: JoinSet<()>,
}

/// Measures, prints the table and writes `scale.json`, `scale.svg` and `scale.png` into the folder.
pub async fn run(plan: Plan, parts: &Parts, folder: &Path) -> Result<()> {
    let session = Session::begin("scale", folder)?;
    let _ = rustls::crypto::ring::default_provider().install_default();
    ensure!(
        plan.networks >= plan.vpcs && plan.networks.is_multiple_of(plan.vpcs),
        "--networks must be a multiple of --vpcs"
    );
    ensure!(
        plan.networks / plan.vpcs <= 200 && plan.endpoints / plan.networks <= 200,
        "at most 200 networks in a VPC and 200 endpoints in a network"
    );
    let mut bench = Bench::up(plan.clone(), parts).await?;
    let result = bench.measure().await;
    std::fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
    bench.plane.save_log(folder);
    if let Err(error) = result {
        // The measurements up to then are reported all the same.
        bench.report.problem(format!("{error:#}"));
    }
    let points = bench.sampler.points();
    bench.report.write(&plan, &points, &bench.book.track, &session)?;
    let problems = bench.report.problems.len();
    drop(bench);
    if problems > 0 {
        bail!("{problems} things did not come to their end, see PROBLEM above");
    }
    Ok(())
}

impl Bench {
    async fn up(plan: Plan, parts: &Parts) -> Result<Self> {
        println!("etcd, API server, operator");
        let plane = Plane::up(parts).await?;
        let probes = serde_json::json!({"metadata": {"name": watches::PROBES}});
        Api::<Namespace>::all(plane.admin.clone())
            .create(&PostParams::default(), &serde_json::from_value(probes)?)
            .await
            .context("the namespace of probes")?;
        let ladder = plan.ladder.iter().sum::<usize>() * LADDER_SECONDS;
        let churned = ladder + plan.churn * plan.seconds + policies::CHURNED;
        let capacity = plan.endpoints + FEW_ENDPOINTS + churned + 10;
        let book = Arc::new(Book {
            track: Track::new(capacity),
            tally: Tally::default(),
        });
        let mut tasks = JoinSet::new();
        let watches = Watches::start(&plane.admin, &book, &mut tasks);
        let operator = Operator::start(&plane.launch, 0)?;
        let sampler = Sampler::start(plane.processes("apiserver"), plane.processes("etcd"));
        sampler.operator(operator.process());
        let probes = (Arc::clone(&watches.probes), plane.admin.clone());
        tasks.spawn(async move { probes.0.send(probes.1).await });
        Ok(Self {
            tenants: Tenants {
                networks_per_vpc: plan.networks / plan.vpcs,
                bouncers: plan.bouncers,
            },
            plan,
            fleet: Fleet::new(&plane)?,
            book,
            live: VecDeque::new(),
            report: Report::default(),
            watches,
            sampler,
            operator,
            operators: 1,
            plane,
            _tasks: tasks,
        })
    }

    async fn measure(&mut self) -> Result<()> {
        let plan = self.plan.clone();
        let few = FEW.min(plan.droplets);
        self.phase(&format!("{few} droplets"));
        self.fleet.grow(&self.plane, &self.book, few).await?;
        let few_networks = FEW_NETWORKS.min(plan.networks).max(self.tenants.networks_per_vpc);
        self.make_tenants(0, few_networks).await?;
        self.few(few, few_networks).await?;
        self.phase(&format!("{} droplets", plan.droplets));
        let cpu = self.operator.usage()?.cpu_seconds;
        let start = Instant::now();
        self.fleet.grow(&self.plane, &self.book, plan.droplets).await?;
        self.report.add("droplets_s", "s", start.elapsed().as_secs_f64());
        self.report
            .add("droplets_cpu_s", "s", self.operator.usage()?.cpu_seconds - cpu);
        self.operator.check(&self.plane.launch)?;
        self.phase(&format!("{} VPCs, {} networks", plan.vpcs, plan.networks));
        self.make_tenants(few_networks, plan.networks).await?;
        self.load().await?;
        self.operator.check(&self.plane.launch)?;
        self.rest().await?;
        for &rate in &plan.ladder {
            self.churn(rate, LADDER_SECONDS, &format!("at_{rate}_")).await?;
        }
        self.churn(plan.churn, plan.seconds, "").await?;
        self.bare_churn(plan.churn, plan.seconds, "").await?;
        self.operator.check(&self.plane.launch)?;
        let usage = self.operator.usage()?;
        self.report.add("operator_rss_mib", "MiB", usage.rss_mib);
        self.report
            .add("operator_rss_most_mib", "MiB", usage.most_rss_mib);
        self.lock_held("lock_held_p99_ms")?;
        self.policies().await?;
        self.vpc_rounds().await?;
        self.resync().await?;
        self.check_rows().await;
        self.drain().await?;
        Ok(())
    }

    fn phase(&mut self, name: &str) {
        println!("{name}");
        self.report
            .phases
            .push((self.book.track.seconds(), name.to_owned()));
    }

    /// Makes the networks of these numbers with their VPCs, and waits until all are Provisioned.
    async fn make_tenants(&mut self, from: usize, to: usize) -> Result<()> {
        let each = self.tenants.networks_per_vpc;
        let admin = self.plane.admin.clone();
        let vpcs = from.div_ceil(each)..to.div_ceil(each);
        let patience = patience(to);
        self.tenants.make_vpcs(&admin, vpcs.clone()).await?;
        // There is one more of each: the default one.
        let (seen, total) = (Arc::clone(&self.watches.vpcs), vpcs.end + 1);
        until("VPCs Provisioned", total, patience, || Ok(seen.count())).await?;
        self.tenants.make_networks(&admin, from..to).await?;
        let seen = Arc::clone(&self.watches.networks);
        until("networks Provisioned", to + 1, patience, || Ok(seen.count())).await
    }
}
