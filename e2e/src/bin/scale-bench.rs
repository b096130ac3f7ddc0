//! `cargo xtask bench scale` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use thuban_e2e::bench::controlplane::{self, Parts, Plan};

/// Measures Thuban's operator with a real API server and droplets without a data plane.
#[derive(Parser)]
#[command(name = "cargo xtask bench scale")]
struct Arguments {
    /// Number of droplets, all without a data plane
    #[arg(long, default_value_t = 1000)]
    droplets: usize,
    /// Number of VPCs
    #[arg(long, default_value_t = 200)]
    vpcs: usize,
    /// Number of networks in all VPCs together; a multiple of --vpcs
    #[arg(long, default_value_t = 1000)]
    networks: usize,
    /// Number of endpoints
    #[arg(long, default_value_t = 20_000)]
    endpoints: usize,
    /// Number of bouncers of each network
    #[arg(long, default_value_t = 2)]
    bouncers: u32,
    /// Number of endpoints that are created per second in the main churn; as many are deleted
    #[arg(long, default_value_t = 100)]
    churn: usize,
    /// Duration in seconds of the main churn
    #[arg(long, default_value_t = 60)]
    seconds: usize,
    /// Rates of churn per second before the main churn, for 15 s each. They show what the machine can do
    #[arg(long, value_delimiter = ',', default_value = "10,25,50")]
    ladder: Vec<usize>,
    /// Number of times that one VPC, and then fifty at once, are created
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Check only that everything works: 100 droplets, 20 VPCs, 100 networks, 2,000 endpoints, 15 s of churn.
    /// The figures mean nothing
    #[arg(long)]
    quick: bool,
    /// Measure a large cluster: 5,000 droplets, 1,000 VPCs, 5,000 networks, 100,000 endpoints in bulk, then 60 s of
    /// churn at 25 per second. It takes more than an hour
    #[arg(long, conflicts_with = "quick")]
    large: bool,
    /// Folder that the results are written to
    #[arg(long, default_value = "target/bench")]
    output: PathBuf,
    /// Folder with etcd, kube-apiserver and kubectl
    #[arg(long, hide = true)]
    binaries: PathBuf,
    /// Binary of the operator
    #[arg(long, hide = true)]
    operator: PathBuf,
    /// Folder with Thuban's manifests
    #[arg(long, hide = true, default_value = "install")]
    install: PathBuf,
}

/// Threads on which all hollow droplets apply their rows. More would take the CPU from their streams: a real droplet
/// has its node for itself.
const APPLYING: usize = 4;

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .max_blocking_threads(APPLYING)
        .build();
    match runtime {
        Ok(runtime) => runtime.block_on(bench()),
        Err(error) => {
            eprintln!("error: starting tokio: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn bench() -> ExitCode {
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
    if given.large {
        plan = Plan {
            droplets: 5000,
            vpcs: 1000,
            networks: 5000,
            endpoints: 100_000,
            churn: 25,
            ladder: Vec::new(),
            rounds: 1,
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
