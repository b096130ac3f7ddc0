//! `cargo xtask bench policy` builds and runs this as root.

use std::process::ExitCode;

use clap::Parser;
use thuban_e2e::bench::{datapath::PlanArguments, policy};

/// Measures what policies cost packets, beside nftables on plain routing, in namespaces of its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench policy")]
struct Arguments {
    #[command(flatten)]
    plan: PlanArguments,
}

fn main() -> ExitCode {
    Arguments::parse().plan.run(policy::run)
}
