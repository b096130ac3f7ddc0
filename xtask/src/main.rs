//! `cargo xtask`: builds, checks, clusters, demo and tests of Thuban.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod bench;
mod bench_cluster;
mod bench_services;
mod build;
mod check;
mod cluster;
mod cni_tools;
mod conformance;
mod crds;
mod demo;
mod deps;
mod diagnostics;
mod dns;
mod ebpf;
mod go_tools;
mod images;
mod install;
mod kube;
mod links;
mod progress;
mod removal;
mod soak;
mod test;
mod test_names;
mod uninstall;

#[derive(Parser)]
#[command(name = "cargo xtask", about, version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the eBPF programs, release binaries and images
    Build,
    /// Build only the eBPF programs
    BuildEbpf,
    /// Write install/10-crds.yaml from the types of api/
    Crds {
        /// Only say whether the file is current
        #[arg(long)]
        check: bool,
    },
    /// Run what needs no root: format, references of pages, names of tests, lints, dependencies, eBPF build
    Check,
    /// Run the tests: as root, with a cluster of their own
    Test {
        /// Run only this part of the tests
        #[arg(long)]
        only: Option<String>,
        /// Number of schedules that the simulator of the control plane runs
        #[arg(long, default_value_t = test::SCHEDULES)]
        schedules: u64,
        /// Count tests that waited too long as failed, even if they pass when they are run again
        #[arg(long)]
        strict: bool,
    },
    /// Run tests with large counts: as root
    Soak {
        /// Run only this one
        #[arg(long)]
        only: Option<String>,
    },
    /// Measure: as root
    Bench {
        #[command(subcommand)]
        benchmark: bench::Benchmark,
    },
    /// Run Kubernetes' own conformance tests of the network, without kube-proxy: as root
    Conformance(conformance::Arguments),
    /// Bring up a cluster with Thuban and show what it does
    Demo,
    /// Apply install/ to a local cluster
    Install {
        /// demo, test, or any short name
        #[arg(long, default_value = "demo")]
        name: String,
    },
    /// Remove Thuban from a local cluster
    Uninstall {
        /// demo, test, or any short name
        #[arg(long, default_value = "demo")]
        name: String,
    },
    /// A real Kubernetes cluster of three nodes on this machine
    Cluster {
        /// demo, test, or any short name
        #[arg(long, default_value = "demo", global = true)]
        name: String,
        #[command(subcommand)]
        action: cluster::Action,
    },
    /// Install the programs that the other commands need
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
        Command::Crds { check } => crds::run(check)?,
        Command::Check => check::run()?,
        Command::Test {
            only,
            schedules,
            strict,
        } => return test::run(only.as_deref(), schedules, strict),
        Command::Soak { only } => return soak::run(only.as_deref()),
        Command::Bench { benchmark } => return bench::run(&benchmark),
        Command::Conformance(arguments) => return conformance::run(&arguments),
        Command::Demo => demo::run()?,
        Command::Install { name } => install::run(&name)?,
        Command::Uninstall { name } => uninstall::run(&name)?,
        Command::Cluster { name, action } => return cluster::run(&name, action),
        Command::Deps => deps::ensure()?,
        Command::CniTools => cni_tools::ensure()?,
    }
    Ok(ExitCode::SUCCESS)
}
