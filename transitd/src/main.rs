//! transitd: the daemon that owns a droplet's veths, programs, tables and attachments.
//!
//! `run` is the daemon; `status`, `counters`, `metrics` and `rows` look at a running one and change nothing, `trace`,
//! `denials` and `log` only what it says.

#[cfg(feature = "clock-steps")]
mod clock_steps;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, Subcommand};
use thuban_telemetry::control;

use transitd::dataplane::bpffs::PinSettings;
use transitd::settings::RunSettings;
use transitd::{daemon, dataplane, denials, scrape, trace};

/// The node daemon of Thuban: connects pods, and programs the node's data plane.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the daemon on this node. This is the default.
    Run(Box<RunSettings>),
    /// Ask the daemon whether it can serve pods. Exits with 0 if it can, else prints why not.
    Status {
        /// Unix socket of the daemon.
        #[arg(long, env = "THUBAN_SOCKET", default_value = thuban_proto::DEFAULT_CNI_SOCKET)]
        socket: PathBuf,
        /// Ask only whether the daemon answers.
        #[arg(long)]
        alive: bool,
    },
    /// Print all counters of this node as one JSON object.
    Counters {
        #[command(flatten)]
        pins: PinSettings,
        /// Print only what was dropped, as text: how often, why, and what to do.
        #[arg(long)]
        drops: bool,
    },
    /// Print the metrics of this node, as a scraper gets them from the node's loopback address.
    Metrics(scrape::ScrapeSettings),
    /// Print the tables of this node, one JSON object for each row.
    Rows(PinSettings),
    /// Print each packet of a pod or endpoint as this node's programs see it. Ends with Ctrl-C.
    Trace(Box<trace::TraceSettings>),
    /// Print which network policies denied which packets on this node.
    Denials(Box<denials::DenialsSettings>),
    #[command(flatten)]
    Control(control::Command),
}

fn main() -> anyhow::Result<()> {
    let mut arguments: Vec<std::ffi::OsString> = std::env::args_os().collect();
    // `transitd` and `transitd --flag …` mean `transitd run …`.
    if arguments
        .get(1)
        .is_none_or(|first| first.to_string_lossy().starts_with("--") && !is_global(first))
    {
        arguments.insert(1, "run".into());
    }
    match Arguments::parse_from(arguments).command {
        Command::Run(settings) => run(*settings),
        Command::Status { socket, alive } => {
            let path = socket.display().to_string();
            runtime()?
                .block_on(daemon::status(socket, alive))
                .with_context(|| format!("transitd at {path} is not ready"))
        }
        Command::Counters { pins, drops } => {
            let counters = dataplane::counters::read(&pins.maps())?;
            if drops {
                print!("{}", dataplane::counters::drops(&counters));
            } else {
                println!("{}", serde_json::to_string(&counters)?);
            }
            Ok(())
        }
        Command::Metrics(settings) => {
            print!("{}", scrape::read(settings)?);
            Ok(())
        }
        Command::Trace(settings) => Ok(following()?.block_on(trace::run(*settings))?),
        Command::Control(command) => Ok(command.run()?),
        Command::Denials(settings) => Ok(following()?.block_on(denials::run(*settings))?),
        Command::Rows(pins) => {
            let tables =
                dataplane::tables::Tables::open(&pins.maps()).context("has transitd run on this node?")?;
            let mut rows: Vec<String> = tables
                .held()
                .map(|(key, entry)| dataplane::rows::to_json(key, entry).to_string())
                .collect();
            rows.sort();
            for row in rows {
                println!("{row}");
            }
            Ok(())
        }
    }
}

/// Makes the runtime for the commands that only read.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

/// Makes the runtime for commands that follow: the connection lives while the output is not taken.
fn following() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
}

fn is_global(argument: &std::ffi::OsStr) -> bool {
    argument == "--help" || argument == "--version"
}

fn run(settings: RunSettings) -> anyhow::Result<()> {
    thuban_telemetry::process::begin_on("info", std::io::stderr);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.spawn(control::serve(None));
    Ok(runtime.block_on(daemon::run(settings))?)
}
