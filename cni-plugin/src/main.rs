//! The CNI plugin binary `thuban`: environment and stdin, one call to transitd, CNI JSON on stdout.
//!
//! Invariant: stdout carries exactly one JSON document or nothing; every failure is a CNI error object with exit
//! code 1. The plugin changes no network itself: transitd does. While transitd is away, DELs wait in the spool, and
//! STATUS bridges a restart.

mod clock;
mod config;
mod environment;
mod error;
mod file;
mod previous;
mod result;
mod spool;
mod transitd;
mod verbs;

use std::io::{Read, Write};
use std::process::ExitCode;

use crate::config::Config;
use crate::environment::{Environment, Verb};
use crate::error::{ErrorDocument, PluginError};

/// Versions of the CNI spec whose configurations and results this plugin speaks.
pub const SUPPORTED_VERSIONS: [&str; 3] = ["0.4.0", "1.0.0", "1.1.0"];
/// The largest network configuration that is read from stdin, bytes.
const MAXIMUM_CONFIG: u64 = 1 << 20;

fn main() -> ExitCode {
    let mut version = SUPPORTED_VERSIONS[2].to_owned();
    let (document, code) = match run(&mut version) {
        Ok(document) => (document, ExitCode::SUCCESS),
        Err(error) => (ErrorDocument::new(&version, &error).to_json(), ExitCode::FAILURE),
    };
    let Some(document) = document else { return code };
    let mut out = std::io::stdout().lock();
    if writeln!(out, "{document}").and_then(|()| out.flush()).is_err() {
        return ExitCode::FAILURE;
    }
    code
}

/// Runs the verb. Sets `version` as soon as the configuration has told which version the answer must have.
fn run(version: &mut String) -> Result<Option<serde_json::Value>, PluginError> {
    let environment = Environment::read(|name| std::env::var(name).ok())?;
    let mut input = Vec::new();
    std::io::stdin()
        .lock()
        .take(MAXIMUM_CONFIG)
        .read_to_end(&mut input)
        .map_err(PluginError::ReadStdin)?;
    if environment.verb == Verb::Version {
        return verbs::version::run(&input).map(Some);
    }
    let config = Config::parse(&input)?;
    version.clone_from(&config.cni_version);
    match environment.verb {
        Verb::Add => verbs::add::run(&config, &environment).map(Some),
        Verb::Del => verbs::del::run(&config, &environment).map(|()| None),
        Verb::Check => verbs::check::run(&config, &environment).map(|()| None),
        Verb::Gc => verbs::gc::run(&config).map(|()| None),
        Verb::Status => verbs::status::run(&config).map(|()| None),
        Verb::Version => verbs::version::run(&input).map(Some),
    }
}
