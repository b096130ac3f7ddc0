//! Transit on a network card: a virtual machine is one droplet, and this test plays the droplets around it by frames.
//!
//! `cargo xtask test --nic` builds the machine's root and starts this program twice: in the machine, where it loads the
//! programs and makes a pod (`guest`), and beside it, where it sends frames and judges what comes back (`host`).

mod cases;
mod frames;
mod guest;
mod host;
mod machine;
mod plan;
mod request;
mod table;
mod wire;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

/// Tests transit on virtio's network cards.
#[derive(Parser)]
#[command(name = "cargo xtask test --nic")]
struct Arguments {
    #[command(subcommand)]
    side: Option<Side>,
}

#[derive(Subcommand)]
enum Side {
    /// Start the virtual machine, and play the other droplets
    Host {
        /// Kernel of the machine
        #[arg(long)]
        kernel: PathBuf,
        /// Archive with the machine's root
        #[arg(long)]
        root: PathBuf,
        /// Test only this card, by its number in the table
        #[arg(long)]
        card: Option<usize>,
    },
    /// Do what the host asks for, in the machine
    Guest,
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().side {
        Some(Side::Host { kernel, root, card }) => host::run(&kernel, &root, card),
        Some(Side::Guest) => guest::run(),
        None => {
            println!("nothing is tested here: `cargo xtask test --nic` tests transit on a network card");
            Ok(true)
        }
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
