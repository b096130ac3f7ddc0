//! `cargo xtask bench cni` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use thuban_e2e::bench::{
    cni::{self, Parts, Plan},
    transitd,
};

/// Measures ADD and DEL of Thuban's CNI plugin beside ptp and bridge with host-local, in namespaces of its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench cni")]
struct Arguments {
    /// Number of runs
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Number of pods in each run that are added and removed one after the other
    #[arg(long, default_value_t = 40)]
    single: usize,
    /// Number of times in each run that many pods are added and removed at once
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// Number of pods that are added at once
    #[arg(long, default_value_t = 16)]
    at_once: usize,
    /// Number of pods on the node when the daemon's memory is read
    #[arg(long, default_value_t = 100)]
    pods: usize,
    /// Measure only these contestants, separated by commas: thuban, ptp, bridge, link, ip-link. Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Check only that everything works: one short run. The figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Folder that the results are written to
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
    #[command(flatten)]
    own: transitd::Parts,
    /// Folder with the plugins ptp, bridge and host-local
    #[arg(long, hide = true)]
    others: PathBuf,
}

fn main() -> ExitCode {
    let given = Arguments::parse();
    let mut plan = Plan {
        runs: given.runs.max(1),
        single: given.single.max(1),
        rounds: given.rounds.max(1),
        at_once: given.at_once.max(1),
        pods: given.pods,
        only: given.only,
    };
    if given.quick {
        plan = Plan {
            runs: 1,
            single: 5,
            rounds: 1,
            ..plan
        };
    }
    let parts = Parts {
        own: given.own,
        others: given.others,
    };
    match cni::run(&plan, &parts, &given.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
