//! `cargo xtask bench services` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use thuban_e2e::bench::services::{self, Parts, Plan};

/// Measures Services by Thuban beside kube-proxy, on clusters that are up.
#[derive(Parser)]
struct Arguments {
    /// Numbers of Services to measure with, ascending, separated by commas
    #[arg(long, value_delimiter = ',')]
    services: Vec<usize>,
    /// Number of turns of each contestant for each number of Services
    #[arg(long)]
    rounds: usize,
    /// Duration in seconds of each measure
    #[arg(long)]
    time: f64,
    /// Number of changes of an EndpointSlice in each turn
    #[arg(long)]
    changes: usize,
    /// Measure only these contestants, separated by commas: thuban, iptables, nftables. Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Folder that the results are written to
    #[arg(long)]
    output: PathBuf,
    #[command(flatten)]
    parts: Parts,
}

fn main() -> ExitCode {
    let given = Arguments::parse();
    let plan = Plan {
        sizes: given.services,
        rounds: given.rounds.max(1),
        time: Duration::from_secs_f64(given.time.clamp(0.2, 60.0)),
        changes: given.changes,
        only: given.only,
    };
    match services::run(&plan, &given.parts, &given.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
