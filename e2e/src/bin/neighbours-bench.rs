//! `cargo xtask bench neighbours` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use thuban_e2e::bench::{
    neighbours::{self, ANSWER_TIMEOUT, Plan},
    transitd::Parts,
};

/// Measures what a tenant of a node loses while other tenants attack what all of them share, in namespaces of its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench neighbours")]
struct Arguments {
    /// Number of rounds
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Duration in seconds of each measurement
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Number of VPCs that attack at the same time, 1 to 100. Each has two pods
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=100))]
    attackers: u8,
    /// Number of packets per second that each attacking pod sends. Scenes of DNS and `policy-denials` have rates of
    /// their own
    #[arg(long, default_value_t = 1300)]
    rate: u32,
    /// Run only these scenes, separated by commas, such as policy-denials,policy-flows. A wrong name lists all.
    /// Default: all
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Check only that everything works: one short round. The figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Folder that the results are written to
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
    #[command(flatten)]
    parts: Parts,
}

fn main() -> ExitCode {
    let given = Arguments::parse();
    let mut plan = Plan {
        rounds: given.rounds.max(1),
        seconds: given.seconds.max(1),
        patience: ANSWER_TIMEOUT,
        attackers: given.attackers,
        rate: given.rate.max(1),
        only: given.only,
    };
    if given.quick {
        plan = Plan {
            rounds: 1,
            seconds: 3,
            ..plan
        };
    }
    match neighbours::run(&plan, &given.parts, &given.output) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
