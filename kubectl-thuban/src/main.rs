//! kubectl thuban: says how Thuban stands in a cluster, and why, by the user's own rights at the API server.

use std::process::ExitCode;

use clap::Parser;
use kubectl_thuban::arguments::Arguments;

/// The exit status of a command that could not look.
const COULD_NOT_LOOK: u8 = 2;

#[tokio::main]
async fn main() -> ExitCode {
    // An error means that there is one already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match kubectl_thuban::run(Arguments::parse()).await {
        Ok(verdict) => ExitCode::from(verdict.exit_status()),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(COULD_NOT_LOOK)
        }
    }
}
