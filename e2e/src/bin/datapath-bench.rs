//! `cargo xtask bench datapath` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::Parser;
use thuban_e2e::bench::datapath::{self, Plan};

/// Measures Thuban's data plane beside plain routing and VXLAN, in namespaces of its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench datapath")]
struct Arguments {
    /// How often each case is measured
    #[arg(long, default_value_t = 5)]
    runs: usize,
    /// How long a stream and a ping-pong take; measures that settle faster take half
    #[arg(long, default_value_t = 3)]
    seconds: u64,
    /// Cases by name; a `*` at the end stands for the rest of a name
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Metrics by name
    #[arg(long, value_delimiter = ',')]
    metrics: Vec<String>,
    /// One run of one second: says whether everything works, no more
    #[arg(long)]
    quick: bool,
    /// Folder of the results
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
    match datapath::run(&plan, &arguments.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
