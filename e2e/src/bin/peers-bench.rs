//! `cargo xtask bench peers` builds and runs this as root.

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, Result};
use clap::Parser;
use thuban_e2e::bench::peers::{self, Parts, Plan};

/// Measures Thuban beside other network plugins, on clusters that are up.
#[derive(Parser)]
struct Arguments {
    /// Peers with their clusters: NAME=CLUSTER, separated by commas
    #[arg(long, value_delimiter = ',')]
    clusters: Vec<String>,
    /// Number of turns of each peer
    #[arg(long)]
    rounds: usize,
    /// Duration in seconds of each measure of packets
    #[arg(long)]
    time: f64,
    /// Duration in seconds of the measure at rest
    #[arg(long)]
    rest: f64,
    /// Number of pods that come and go at once
    #[arg(long)]
    pods: u32,
    /// Folder that the results are written to
    #[arg(long)]
    output: PathBuf,
    /// Programs and folders of the peers: NAME=PATH
    #[arg(long)]
    path: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(given: &Arguments) -> Result<()> {
    let plan = Plan {
        rounds: given.rounds.max(1),
        time: Duration::from_secs_f64(given.time.clamp(0.5, 60.0)),
        rest: Duration::from_secs_f64(given.rest.clamp(0.5, 600.0)),
        pods: given.pods.clamp(1, 100),
    };
    let pair = |text: &String| {
        let (name, value) = text.split_once('=').with_context(|| format!("{text}: no ="))?;
        anyhow::Ok((name.to_owned(), value.to_owned()))
    };
    let paths = given.path.iter().map(pair).collect::<Result<Vec<_>>>()?;
    let parts = Parts {
        clusters: given.clusters.iter().map(pair).collect::<Result<_>>()?,
        paths: paths
            .into_iter()
            .map(|(name, path)| (name, path.into()))
            .collect(),
    };
    peers::run(&plan, &parts, &given.output)
}
