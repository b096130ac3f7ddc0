//! The benchmarks, each with the name of its command `cargo xtask bench …` (`controlplane` is `bench scale`,
//! `load_balancers` is `bench lb`), and the parts that they share: statistics, tables, the report and its plot, the
//! machine, an API server, processes and threads on one core.
//!
//! A benchmark passes or fails nothing by time; only a measurement that can't be made is an error.

pub mod api_server;
pub mod cni;
pub mod controlplane;
pub mod datapath;
mod kube_proxy;
pub mod load_balancers;
pub mod machine;
pub mod neighbours;
mod node;
pub mod peers;
pub mod plot;
mod plugin;
mod pods;
pub mod policy;
pub mod process;
pub mod report;
pub mod results;
pub mod services;
pub mod stats;
pub mod table;
pub mod traffic;
pub mod transitd;

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_signal: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Returns an error if the run was interrupted.
pub fn go_on() -> Result<()> {
    ensure!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
    Ok(())
}

/// Makes Ctrl-C end the run in order, so that everything that the run made is removed.
pub fn catch_interrupts() -> Result<()> {
    let action = SigAction::new(
        SigHandler::Handler(interrupt),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler stores to an atomic and nothing else.
        #[allow(unsafe_code)]
        unsafe { sigaction(signal, &action) }.context("sigaction")?;
    }
    Ok(())
}

/// Returns a count as a floating-point number; counts here are far below 2^52.
#[allow(clippy::cast_precision_loss)]
pub const fn float(count: u64) -> f64 {
    count as f64
}
