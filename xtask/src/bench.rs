//! `cargo xtask bench`: builds what a benchmark runs, and runs it.

use std::{
    iter,
    ops::ControlFlow,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};

use crate::{
    bench_cluster, bench_load_balancers, bench_peers, bench_services,
    build::{self, root, step},
    cluster, cni_tools, deps, ebpf,
    go_tools::GoTools,
    kube, progress,
};

const NETWORK_POLICIES: GoTools = GoTools {
    name: "kube-network-policies",
    modules: "e2e/peers/kube-network-policies",
    files: &["go.mod", "go.sum"],
    tags: "",
    needs_c: false,
    flags: "",
    packages: &["tool"],
    tests: &[],
    binaries: &["cmd"],
};

#[derive(Subcommand)]
pub enum Benchmark {
    /// Measure packets beside plain routing and VXLAN, in network namespaces. `--help` lists the options
    #[command(disable_help_flag = true)]
    Datapath {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure packets with network policies beside nftables and kube-network-policies, in network namespaces. `--help`
    /// lists the options
    #[command(disable_help_flag = true)]
    Policy {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure ADD and DEL of the CNI plugin beside ptp and bridge, in network namespaces. With `--cluster` as the
    /// first option: measure bursts of pods on a cluster. `--help` lists the options of either
    #[command(disable_help_flag = true)]
    Cni {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure what a tenant loses while other tenants attack what the node's tenants share. `--help` lists the options
    #[command(disable_help_flag = true)]
    Neighbours {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure the operator with a real API server and 1,000 droplets without a data plane. `--help` lists the options
    #[command(disable_help_flag = true)]
    Scale {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure Services beside kube-proxy (iptables, nftables), on two clusters. `--help` lists the options
    #[command(disable_help_flag = true)]
    Services {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure load balancers beside kube-proxy, haproxy and nftables, on two clusters. `--help` lists the options
    #[command(disable_help_flag = true)]
    Lb {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Measure Thuban beside other network plugins, each on a cluster of its own. `--help` lists the options
    #[command(disable_help_flag = true)]
    Peers {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

/// Options of a benchmark that measures on clusters of its own.
#[derive(Args)]
pub struct OwnClusters {
    /// Use the clusters that an earlier run left with --keep, with what is on them
    #[arg(long)]
    reuse: bool,
    /// Leave the clusters running at the end
    #[arg(long)]
    keep: bool,
    /// Folder that the results are written to
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
}

impl OwnClusters {
    /// Runs a benchmark on clusters of these names. `up`: brings up those that it needs. They go at the end.
    pub fn measure(
        &self,
        names: &[&str],
        benchmark: &str,
        up: impl FnOnce() -> Result<()>,
        mut arguments: Vec<String>,
    ) -> Result<ExitCode> {
        if !self.reuse {
            for name in names {
                cluster::down(name)?;
            }
            build::run()?;
        }
        let benchmark = step("benchmark", || build::bench_of_clusters(benchmark))?;
        let are_up = if self.reuse { Ok(()) } else { up() };
        arguments.push(format!("--output={}", self.output.display()));
        let result = are_up.and_then(|()| execute(&benchmark, &arguments));
        if !self.keep {
            for name in names {
                cluster::down(name).with_context(|| format!("cluster {name}"))?;
            }
        }
        result
    }
}

pub fn run(benchmark: &Benchmark) -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!("a benchmark makes network namespaces and cgroups, and loads eBPF programs: run it as root");
    }
    deps::ensure()?;
    match benchmark {
        Benchmark::Datapath { arguments } => of_packets("datapath-bench", &[], arguments),
        Benchmark::Policy { arguments } => policy(arguments),
        Benchmark::Cni { arguments } => cni(arguments),
        Benchmark::Neighbours { arguments } => with_node("neighbours-bench", &[], arguments),
        Benchmark::Scale { arguments } => scale(arguments),
        Benchmark::Services { arguments } => bench_services::run(arguments),
        Benchmark::Lb { arguments } => bench_load_balancers::run(arguments),
        Benchmark::Peers { arguments } => bench_peers::run(arguments),
    }
}

/// Runs a benchmark that needs the programs alone, and files that flags name.
fn of_packets(name: &str, files: &[(&str, PathBuf)], arguments: &[String]) -> Result<ExitCode> {
    deps::ensure_more(&deps::TRAFFIC_PACKAGES)?;
    step("eBPF programs", ebpf::build)?;
    let benchmark = step("benchmark", || build::bench_of_packets(name))?;
    execute(&benchmark, &with_files(files, arguments))
}

fn policy(arguments: &[String]) -> Result<ExitCode> {
    let binaries = kube::binaries()?;
    let peer = step("kube-network-policies", || {
        progress::watched("building kube-network-policies", || NETWORK_POLICIES.ensure())
    })?;
    // Go names a program after the last folder of its package.
    let files = [("--binaries", binaries), ("--peer", peer.join("cmd"))];
    of_packets("policy-bench", &files, arguments)
}

fn cni(arguments: &[String]) -> Result<ExitCode> {
    if let Some((_, rest)) = arguments.split_first().filter(|(first, _)| *first == "--cluster") {
        return bench_cluster::run(rest);
    }
    step("plugins to compare with", cni_tools::ensure)?;
    let others = root().join("target/cni-tools");
    with_node(
        "cni-bench",
        &["--others", &others.display().to_string()],
        arguments,
    )
}

/// Builds transitd, the plugin and the benchmark of that name, and runs it.
fn with_node(benchmark: &str, more: &[&str], arguments: &[String]) -> Result<ExitCode> {
    let programs = step("eBPF programs", ebpf::build)?;
    let built = step("transitd, plugin and benchmark", || build::with_node(benchmark))?;
    let mut own: Vec<String> = more.iter().map(ToString::to_string).collect();
    let files = [
        ("--transitd", built.transitd),
        ("--plugin", built.plugin),
        ("--programs", programs),
    ];
    own.extend(with_files(&files, arguments));
    execute(&built.benchmark, &own)
}

fn scale(arguments: &[String]) -> Result<ExitCode> {
    let binaries = kube::binaries()?;
    let built = step("operator and benchmark", build::scale)?;
    let files = [
        ("--binaries", binaries),
        ("--operator", built.join("thuban-operator")),
    ];
    execute(&built.join("scale-bench"), &with_files(&files, arguments))
}

/// Returns the arguments of a benchmark: flags with the files that were built for it, then what the user gave.
fn with_files(files: &[(&str, PathBuf)], arguments: &[String]) -> Vec<String> {
    let flags = files
        .iter()
        .flat_map(|(flag, path)| [(*flag).to_owned(), path.display().to_string()]);
    flags.chain(arguments.iter().cloned()).collect()
}

/// Reads the options of a benchmark. Prints the help, or what is wrong; then the code to exit with is given.
pub fn options<A: Parser>(name: &str, arguments: &[String]) -> Result<ControlFlow<ExitCode, A>> {
    match A::try_parse_from(iter::once(&name.to_owned()).chain(arguments)) {
        Ok(given) => Ok(ControlFlow::Continue(given)),
        Err(error) => {
            error.print()?;
            let code = u8::try_from(error.exit_code()).unwrap_or(2);
            Ok(ControlFlow::Break(ExitCode::from(code)))
        }
    }
}

/// Refuses what `--only` can't name.
pub fn ensure_known(only: &[String], known: &[&str]) -> Result<()> {
    match only.iter().find(|name| !known.contains(&name.as_str())) {
        Some(unknown) => bail!("--only {unknown}: expected some of {}", known.join(", ")),
        None => Ok(()),
    }
}

/// Runs a benchmark's program from the workspace's root.
pub fn execute(benchmark: &Path, arguments: &[String]) -> Result<ExitCode> {
    let status = Command::new(benchmark)
        .current_dir(root())
        .args(arguments)
        .status()
        .with_context(|| format!("starting {}", benchmark.display()))?;
    // The benchmark has printed the reason.
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
