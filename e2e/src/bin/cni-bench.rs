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
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Pods of a run that come and go one after the other
    #[arg(long, default_value_t = 40)]
    single: usize,
    /// How often all pods come at once, and go at once, in a run
    #[arg(long, default_value_t = 4)]
    rounds: usize,
    /// How many pods come at once
    #[arg(long, default_value_t = 16)]
    at_once: usize,
    /// Pods that exist when the daemon's memory is read
    #[arg(long, default_value_t = 100)]
    pods: usize,
    /// Names of the contestants that are compared: thuban, ptp, bridge, link, ip-link
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// One short run: says whether everything works, no more
    #[arg(long)]
    quick: bool,
    /// Folder of the results
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
    #[command(flatten)]
    own: transitd::Parts,
    /// Folder with ptp, bridge and host-local
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
