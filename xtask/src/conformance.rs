//! `cargo xtask conformance`: Kubernetes' own end-to-end tests of the network, on a cluster with Thuban and CoreDNS and
//! without kube-proxy.
//!
//! A test that needs something that this cluster can't have is *not runnable*; no test is left out silently.

mod pods;
mod report;
mod suite;

use std::{fs, process::ExitCode};

use anyhow::{Context, Result, bail};
use thuban_cluster::Cluster;

use crate::{
    build::{self, root, step},
    cluster, cni_tools, deps, diagnostics, dns, install,
};
use report::Outcome;

/// The name of the cluster.
const NAME: &str = "conform";

#[derive(clap::Args)]
pub struct Arguments {
    /// Run only tests whose name matches this Go regular expression. Default: all
    #[arg(long, default_value = "")]
    focus: String,
    /// Number of tests that run at the same time
    #[arg(long, default_value_t = 4)]
    procs: u32,
    /// Leave the cluster running at the end. The next run uses it
    #[arg(long)]
    keep: bool,
}

/// Runs the tests. Fails when a test failed or did not end.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!("a cluster needs root");
    }
    build::run()?;
    deps::ensure_more(&deps::POD_PACKAGES)?;
    let tools = step("Kubernetes' tests", suite::tools)?;
    let images = step("images of the tests' pods", pods::images)?;
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
    let path = root().join("target/conformance.json");
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

fn on_cluster(
    tools: &std::path::Path,
    images: &[std::path::PathBuf],
    arguments: &Arguments,
) -> Result<Vec<Outcome>> {
    let cluster = Cluster::named(NAME)?;
    for image in images {
        cluster.import_image(image)?;
    }
    step("portmap", || cni_tools::portmap_on_nodes(&cluster))?;
    step("Thuban from install/", || install::run(NAME))?;
    step("CoreDNS", || {
        dns::wait_ready(&cluster).inspect_err(|_| diagnostics::print(&cluster))
    })?;
    step("tests", || {
        suite::run(tools, &cluster, &arguments.focus, arguments.procs)
    })
}
