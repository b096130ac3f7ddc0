//! `cargo xtask bench lb` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use thuban_e2e::bench::{
    load_balancers::{self, Part, Plan},
    services::Parts,
};

/// Measures load balancers by Thuban beside their peers, on clusters that are up.
#[derive(Parser)]
struct Arguments {
    /// What to measure, separated by commas
    #[arg(long, value_delimiter = ',')]
    only: Vec<Part>,
    /// Number of turns of each case
    #[arg(long)]
    rounds: usize,
    /// Duration in seconds of each measure
    #[arg(long)]
    time: f64,
    /// Number of deaths of a front
    #[arg(long)]
    deaths: usize,
    /// Number of connections that are open at each death
    #[arg(long)]
    held: usize,
    /// Number of Services that are made at once
    #[arg(long)]
    services: usize,
    /// Number of changes of backends
    #[arg(long)]
    changes: usize,
    /// Number of load balancers with which memory is measured
    #[arg(long)]
    vips: usize,
    /// Numbers of load balancers with which the programs are measured, ascending, separated by commas
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<u32>,
    /// Folder that the results are written to
    #[arg(long)]
    output: PathBuf,
    #[command(flatten)]
    parts: Parts,
}

fn main() -> ExitCode {
    let given = Arguments::parse();
    let plan = Plan {
        parts: given.only,
        rounds: given.rounds.max(1),
        time: Duration::from_secs_f64(given.time.clamp(0.2, 60.0)),
        deaths: given.deaths,
        held: given.held,
        services: given.services,
        changes: given.changes,
        vips: given.vips,
        sizes: given.sizes,
    };
    match load_balancers::run(&plan, &given.parts, &given.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
