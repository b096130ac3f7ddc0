//! `cargo xtask conformance`: Kubernetes' own end-to-end tests of the network, and others' tests of policies, on a
//! cluster with Thuban and CoreDNS and without kube-proxy.
//!
//! A test that needs something that this cluster can't have is *not runnable*, or is left out with a reason; no test is
//! left out silently.

mod cluster_policies;
mod cyclonus;
mod isolation;
mod left_out;
mod pods;
mod report;
mod suite;

use std::{fs, process::ExitCode};

use anyhow::{Context, Result, bail};
use thuban_cluster::{Cluster, NODES};

use crate::{
    build::{self, root, step},
    cluster, cni_tools, deps, diagnostics, dns, install,
};
use report::Outcome;

/// The name of the cluster.
pub const NAME: &str = "conform";

/// Which of Kubernetes' tests run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Suite {
    /// Tests of the network that every conformant cluster passes
    Conformance,
    /// All tests of the network, except those that the documentation lists with a reason
    Network,
    /// Tests of NetworkPolicies
    Netpol,
    /// Tests of ClusterNetworkPolicies, by network-policy-api
    Cnp,
    /// Cyclonus's cases of NetworkPolicies
    Cyclonus,
    /// The same in a VPC of their own, with another VPC of the same addresses beside it
    CyclonusVpc,
}

#[derive(clap::Args)]
pub struct Arguments {
    /// Tests to choose from. The results are in target/SUITE.json
    #[arg(long, value_enum, default_value = "conformance")]
    suite: Suite,
    /// Run only tests whose name matches this Go regular expression. Default: all
    #[arg(long, default_value = "")]
    focus: String,
    /// Number of tests that run at the same time
    #[arg(long, default_value_t = 4)]
    procs: u32,
    /// Have policy judge every packet: a ClusterNetworkPolicy selects all pods and accepts everything
    #[arg(long)]
    judged: bool,
    /// Isolate all pods of every namespace by NetworkPolicies: they talk within it, and to cluster DNS and nodes
    #[arg(long)]
    isolated: bool,
    /// Leave the cluster running at the end. The next run uses it
    #[arg(long)]
    keep: bool,
}

impl Suite {
    /// The labels that Kubernetes gives the tests, as a filter of ginkgo's.
    fn labels(self) -> &'static str {
        match self {
            Self::Conformance => "Conformance && sig-network",
            Self::Network => "sig-network",
            Self::Netpol => "Feature:NetworkPolicy",
            Self::Cnp | Self::Cyclonus | Self::CyclonusVpc => "",
        }
    }

    /// The limit of the whole run. A test that has not ended by then has no result.
    fn timeout(self) -> &'static str {
        match self {
            Self::Conformance => "55m",
            Self::Network => "150m",
            Self::Netpol | Self::Cnp | Self::Cyclonus | Self::CyclonusVpc => "120m",
        }
    }

    /// The name of the file with the results.
    fn file(self) -> &'static str {
        match self {
            Self::Conformance => "conformance.json",
            Self::Network => "network.json",
            Self::Netpol => "netpol.json",
            Self::Cnp => "cnp.json",
            Self::Cyclonus => "cyclonus.json",
            Self::CyclonusVpc => "cyclonus-vpc.json",
        }
    }
}

/// Runs the tests. Fails when a test failed or did not end.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!("a cluster needs root");
    }
    if arguments.isolated && !matches!(arguments.suite, Suite::Conformance | Suite::Network) {
        bail!("--isolated is for the suites conformance and network: the others make policies of their own");
    }
    build::run()?;
    let (tools, images) = match arguments.suite {
        Suite::Cyclonus | Suite::CyclonusVpc => {
            let tools = step("cyclonus", cyclonus::tools)?;
            let image = cyclonus::image(&tools)?;
            (tools, vec![image])
        }
        _ => {
            deps::ensure_more(&deps::POD_PACKAGES)?;
            let tools = step("Kubernetes' tests", suite::tools)?;
            let images = step("images of the tests' pods", || pods::images(&tools))?;
            (tools, images)
        }
    };
    step("cluster of three nodes, with CoreDNS", || {
        cluster::up_with_dns(NAME)
    })?;
    let outcomes = on_cluster(&tools, &images, arguments);
    if !arguments.keep {
        cluster::down(NAME)?;
        println!("cluster {NAME} is down");
    }
    let outcomes = outcomes?;
    report::print(&outcomes);
    let path = root().join("target").join(arguments.suite.file());
    fs::write(&path, format!("{:#}\n", report::to_json(&outcomes)))
        .with_context(|| format!("writing {}", path.display()))?;
    println!(
        "{}; the tests' own words: {}",
        path.display(),
        suite::folder().display()
    );
    Ok(if outcomes.iter().any(Outcome::is_bad) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Puts each node into a zone of its own: tests of traffic distribution need them.
fn zones(cluster: &Cluster) -> Result<()> {
    for (node, zone) in NODES.iter().zip(["zone-1", "zone-2", "zone-3"]) {
        let label = format!("topology.kubernetes.io/zone={zone}");
        cluster.kubectl(&["label", "--overwrite", "node", node, &label])?;
    }
    Ok(())
}

fn on_cluster(
    tools: &std::path::Path,
    images: &[std::path::PathBuf],
    arguments: &Arguments,
) -> Result<Vec<Outcome>> {
    let cluster = Cluster::named(NAME)?;
    for image in images {
        cluster.import_image(image)?;
    }
    step("zones", || zones(&cluster))?;
    step("portmap", || cni_tools::portmap_on_nodes(&cluster))?;
    step("Thuban from install/", || install::run(NAME))?;
    if arguments.judged {
        step("a policy for all pods", || cluster_policies::judge_all(&cluster))?;
    }
    let isolation = arguments.isolated.then(|| isolation::Isolation::begin(&cluster));
    let isolation = isolation.transpose().context("policies in every namespace")?;
    step("CoreDNS", || {
        dns::wait_ready(&cluster).inspect_err(|_| diagnostics::print(&cluster))
    })?;
    let focus = &arguments.focus;
    let outcomes = step("tests", || match arguments.suite {
        Suite::Cnp => cluster_policies::run(&cluster, focus, Suite::Cnp.timeout()),
        Suite::Cyclonus | Suite::CyclonusVpc => cyclonus::run(tools, &cluster, arguments.suite, focus),
        suite => suite::run(tools, &cluster, suite, focus, arguments.procs),
    })?;
    isolation.map_or(Ok(()), isolation::Isolation::end)?;
    Ok(outcomes)
}
