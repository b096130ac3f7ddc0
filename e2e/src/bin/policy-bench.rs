//! `cargo xtask bench policy` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use thuban_e2e::bench::{
    datapath::PlanArguments,
    policy::{self, Parts},
};

/// Measures what policies cost packets, beside nftables and kube-network-policies on plain routing, in namespaces of
/// its own.
#[derive(Parser)]
#[command(name = "cargo xtask bench policy")]
struct Arguments {
    #[command(flatten)]
    plan: PlanArguments,
    /// Folder with etcd, kube-apiserver and kubectl
    #[arg(long, hide = true)]
    binaries: PathBuf,
    /// Program of kube-network-policies
    #[arg(long, hide = true)]
    peer: PathBuf,
}

fn main() -> ExitCode {
    let given = Arguments::parse();
    let parts = Parts {
        binaries: given.binaries,
        program: given.peer,
    };
    given.plan.run(|plan, folder| policy::run(plan, &parts, folder))
}
