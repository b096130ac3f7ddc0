//! `cargo xtask bench`: builds what a benchmark runs, and runs it.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};
use clap::Subcommand;

use crate::{
    build::{root, run_command, step},
    deps, ebpf,
};

#[derive(Subcommand)]
pub enum Benchmark {
    /// The data plane beside plain routing and VXLAN, in namespaces on this machine; `--help` says more
    #[command(disable_help_flag = true)]
    Datapath {
        /// Arguments of the benchmark
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
}

pub fn run(benchmark: &Benchmark) -> Result<ExitCode> {
    match benchmark {
        Benchmark::Datapath { arguments } => datapath(arguments),
    }
}

fn datapath(arguments: &[String]) -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!("the benchmark makes network namespaces and loads eBPF programs: run it as root");
    }
    deps::ensure()?;
    deps::ensure_traffic()?;
    step("eBPF programs", ebpf::build)?;
    step("benchmark", || {
        run_command(Command::new("cargo").current_dir(root()).args([
            "build",
            "--release",
            "--quiet",
            "-p",
            "thuban-e2e",
            "--bin",
            "datapath-bench",
        ]))
    })?;
    let status = Command::new(root().join("target/release/datapath-bench"))
        .current_dir(root())
        .args(arguments)
        .status()
        .context("starting datapath-bench")?;
    // It has said why.
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
