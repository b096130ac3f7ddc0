//! `cargo xtask bench datapath` builds and runs this as root.

use std::process::ExitCode;

use clap::Parser;
use thuban_e2e::bench::datapath::{self, PlanArguments};

/// Measures Thuban's data plane beside plain routing and VXLAN, in namespaces of its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench datapath")]
struct Arguments {
    #[command(flatten)]
    plan: PlanArguments,
}

fn main() -> ExitCode {
    Arguments::parse().plan.run(datapath::run)
}
