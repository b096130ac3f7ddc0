//! `cargo xtask bench datapath` builds and runs this as root.

use std::process::ExitCode;

use clap::Parser;
use thuban_e2e::bench::datapath::{self, PlanArguments, flows};

/// Measures Thuban's data plane beside plain routing and VXLAN, in namespaces of its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench datapath")]
struct Arguments {
    #[command(flatten)]
    plan: PlanArguments,
    /// Measure instead what telling of flows costs: off, drops and all beside each other
    #[arg(long)]
    flows: bool,
}

fn main() -> ExitCode {
    let Arguments { plan, flows } = Arguments::parse();
    plan.run(if flows { flows::run } else { datapath::run })
}
