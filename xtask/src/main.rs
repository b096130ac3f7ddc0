//! `cargo xtask`: builds, checks, clusters, demo and tests of Thuban.

use std::process::ExitCode;

use clap::{Parser, Subcommand, builder::PossibleValuesParser};
use thuban_cluster::Cluster;

mod alerts;
mod bench;
mod bench_cluster;
mod bench_load_balancers;
mod bench_peers;
mod bench_services;
mod btf;
mod build;
mod chart;
mod check;
mod cluster;
mod cni_tools;
mod conformance;
mod crds;
mod cross;
mod dashboards;
mod demo;
mod deps;
mod diagnostics;
mod dns;
mod drops;
mod ebpf;
mod flow_relay;
mod go_tools;
mod images;
mod install;
mod kube;
mod links;
mod load_balancers;
mod machine;
mod manifests;
mod observe;
mod otlp;
mod page;
mod platform;
mod plugin;
mod progress;
mod prometheus;
mod publish;
mod removal;
mod scraper;
mod soak;
mod test;
mod test_names;
mod uninstall;
mod upgrade;

#[derive(Parser)]
#[command(name = "cargo xtask", about, version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the eBPF programs, the release binaries and the images (target/images)
    Build,
    /// Build only the eBPF programs
    BuildEbpf,
    /// Write the CRDs of install/ and charts/thuban, docs/api.md, docs/drops.md and docs/reasons.md, from the code
    Crds {
        /// Write nothing. Fail if a file is not current
        #[arg(long)]
        check: bool,
    },
    /// Push the images to a registry, list what is in them, or start those of arm64 under emulation
    Images {
        #[command(subcommand)]
        action: publish::Action,
    },
    /// Write the other manifests of install/ from charts/thuban
    Manifests {
        /// Write nothing. Fail if a file is not current
        #[arg(long)]
        check: bool,
    },
    /// Run all checks that need no root: format, links of pages, names of tests, lints, dependencies, eBPF build
    Check,
    /// Run the tests. Needs root. Starts a cluster of its own
    Test {
        /// Run only this group of tests: check, unit, simulator, programs, netns, page or e2e. Default: all
        #[arg(long)]
        only: Option<String>,
        /// Number of random schedules that the simulator of the control plane runs
        #[arg(long, default_value_t = test::SCHEDULES)]
        schedules: u64,
        /// Count a test that waited too long as failed, even if it passes when it runs again
        #[arg(long)]
        strict: bool,
        /// Run only the tests of the programs: in a virtual machine, on Debian's kernel 6.12
        #[arg(long, conflicts_with_all = ["only", "strict"])]
        kernel: bool,
        /// Run only the tests of transit on virtio's network cards, at XDP and at tc: in a virtual machine, on Debian's
        /// kernel 6.12
        #[arg(long, conflicts_with_all = ["only", "strict", "kernel"])]
        nic: bool,
    },
    /// Run some tests with large counts. Needs root and takes long
    Soak {
        /// Run only this test. Default: all
        #[arg(long, value_parser = PossibleValuesParser::new(soak::names()))]
        only: Option<String>,
    },
    /// Run a benchmark. Needs root
    Bench {
        #[command(subcommand)]
        benchmark: bench::Benchmark,
    },
    /// Run Kubernetes' conformance tests of the network, without kube-proxy. Needs root
    Conformance(conformance::Arguments),
    /// Start a cluster with Thuban and three tenants, and show who reaches whom. Needs root
    Demo {
        /// lb: a load balancer instead of the tenants' matrix
        #[arg(value_parser = ["lb"])]
        what: Option<String>,
    },
    /// Run Prometheus beside the demo's cluster, ask it the dashboards' queries, and have real faults fire alerts.
    /// Needs root
    Observe,
    /// Ask a Prometheus that scrapes Thuban all queries of the dashboards. Fails if a query names an unknown metric
    Dashboards {
        /// The Prometheus, as http://HOST:PORT
        #[arg(long, value_name = "URL")]
        check: prometheus::Server,
    },
    /// Apply the manifests of install/ to a local cluster
    Install {
        /// Name of the cluster: demo, test, or another short name
        #[arg(long, default_value = "demo")]
        name: String,
        /// Install what load balancers need, on a cluster that has Thuban
        #[arg(long)]
        load_balancers: bool,
        /// Install thuban-observe, on a cluster that has Thuban, and have nodes tell it of all flows
        #[arg(long, conflicts_with = "load_balancers")]
        observe: bool,
    },
    /// Read the cluster of your kubeconfig, and print the values with which Thuban is installed on it
    Values {
        /// Print lines of install/config.env instead of the chart's values
        #[arg(long)]
        env: bool,
    },
    /// Remove Thuban from a local cluster
    Uninstall {
        /// Name of the cluster: demo, test, or another short name
        #[arg(long, default_value = "demo")]
        name: String,
    },
    /// Have Helm install a former version on a cluster, upgrade it to this tree and roll it back, under traffic. Needs
    /// root, and up to an hour for the builds
    UpgradeFrom {
        /// The former version: a tag, branch or commit that has charts/thuban
        reference: String,
        /// Leave the cluster up at the end
        #[arg(long)]
        keep: bool,
    },
    /// Manage a real Kubernetes cluster of three nodes on this machine. Needs root
    Cluster {
        /// Name of the cluster: demo, test, or another short name
        #[arg(long, default_value = "demo", global = true)]
        name: String,
        #[command(subcommand)]
        action: cluster::Action,
    },
    /// Install the programs that the other commands need. Needs root
    Deps,
    /// Build cnitool and the other programs that tests run against the CNI plugin
    CniTools,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Build => build::run()?,
        Command::BuildEbpf => {
            deps::ensure()?;
            println!("{}", ebpf::build()?.display());
        }
        Command::Images { action } => publish::run(&action)?,
        Command::Crds { check } => crds::run(check)?,
        Command::Manifests { check } => manifests::run(check)?,
        Command::Check => check::run()?,
        Command::Test { kernel: true, .. } => return test::kernel::run(),
        Command::Test { nic: true, .. } => return test::nic::run(),
        Command::Test {
            only,
            schedules,
            strict,
            kernel: false,
            nic: false,
        } => return test::run(only.as_deref(), schedules, strict),
        Command::Soak { only } => return soak::run(only.as_deref()),
        Command::Bench { benchmark } => return bench::run(&benchmark),
        Command::Conformance(arguments) => return conformance::run(&arguments),
        Command::Demo { what: Some(_) } => demo::load_balancer::run()?,
        Command::Demo { what: None } => demo::run()?,
        Command::Install {
            name,
            load_balancers: true,
            ..
        } => load_balancers::install(&Cluster::named(&name)?)?,
        Command::Install {
            name, observe: true, ..
        } => flow_relay::install(&Cluster::named(&name)?)?,
        Command::Install { name, .. } => {
            if name == build::DEMO {
                build::demo()?;
            }
            install::run(&name)?;
        }
        Command::Observe => observe::run()?,
        Command::Dashboards { check } => dashboards::ask(&check)?,
        Command::Values { env } => plugin::values(env)?,
        Command::Uninstall { name } => uninstall::run(&name)?,
        Command::UpgradeFrom { reference, keep } => upgrade::run(&reference, keep)?,
        Command::Cluster { name, action } => return cluster::run(&name, action),
        Command::Deps => deps::ensure()?,
        Command::CniTools => cni_tools::ensure()?,
    }
    Ok(ExitCode::SUCCESS)
}
