//! `cargo xtask bench scale` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use thuban_e2e::bench::controlplane::{self, Parts, Plan};

/// Measures Thuban's operator with a real API server and droplets without a data plane.
#[derive(Parser)]
#[command(name = "cargo xtask bench scale")]
struct Arguments {
    #[arg(long, default_value_t = 1000)]
    droplets: usize,
    #[arg(long, default_value_t = 200)]
    vpcs: usize,
    /// Networks of all VPCs; a multiple of the VPCs
    #[arg(long, default_value_t = 1000)]
    networks: usize,
    #[arg(long, default_value_t = 20_000)]
    endpoints: usize,
    /// Bouncers of each network
    #[arg(long, default_value_t = 2)]
    bouncers: u32,
    /// Endpoints made, and as many removed, a second
    #[arg(long, default_value_t = 100)]
    churn: usize,
    /// How long the churn takes
    #[arg(long, default_value_t = 60)]
    seconds: usize,
    /// Rates of churn that come before the main churn, each for 15 s: they show what the machine carries
    #[arg(long, value_delimiter = ',', default_value = "10,25,50")]
    ladder: Vec<usize>,
    /// How often one VPC and fifty at once are made
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// 100 droplets, 20 VPCs, 100 networks, 2,000 endpoints, a churn of 15 s: says whether everything works
    #[arg(long)]
    quick: bool,
    /// Folder of the results
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
    /// Folder with etcd, kube-apiserver and kubectl
    #[arg(long, hide = true)]
    binaries: PathBuf,
    /// Binary of the operator
    #[arg(long, hide = true)]
    operator: PathBuf,
    /// Folder of the manifests
    #[arg(long, hide = true, default_value = "install")]
    install: PathBuf,
}

#[tokio::main]
async fn main() -> ExitCode {
    let given = Arguments::parse();
    let mut plan = Plan {
        ladder: given.ladder,
        droplets: given.droplets.max(1),
        vpcs: given.vpcs.max(1),
        networks: given.networks,
        endpoints: given.endpoints.max(1),
        bouncers: given.bouncers,
        churn: given.churn,
        seconds: given.seconds,
        rounds: given.rounds.max(1),
    };
    if given.quick {
        plan = Plan {
            droplets: 100,
            vpcs: 20,
            networks: 100,
            endpoints: 2000,
            seconds: 15,
            rounds: 3,
            ..plan
        };
    }
    let parts = Parts {
        binaries: given.binaries,
        operator: given.operator,
        install: given.install,
    };
    match controlplane::run(plan, &parts, &given.output).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
