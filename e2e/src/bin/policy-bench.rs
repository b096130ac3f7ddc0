//! `cargo xtask bench policy` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use thuban_e2e::bench::{datapath::Plan, policy};

/// Measures what policies cost packets, beside nftables on plain routing, in namespaces of its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench policy")]
struct Arguments {
    /// Number of runs of each case
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// Duration in seconds of each stream and ping-pong. Measures that settle faster take half of it
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Measure only these cases, separated by commas. A `*` at the end stands for the rest of a name. Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Measure only these metrics, separated by commas. Default: all
    #[arg(long, value_delimiter = ',')]
    metrics: Vec<String>,
    /// Check only that everything works: one run of one second. The figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Folder that the results are written to
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let plan = Plan {
        runs: if arguments.quick { 1 } else { arguments.runs.max(1) },
        time: Duration::from_secs(if arguments.quick {
            1
        } else {
            arguments.seconds.max(1)
        }),
        only: arguments.only,
        metrics: arguments.metrics,
    };
    match policy::run(&plan, &arguments.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
