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

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use thuban_cluster::wait;

/// The pause between two questions of a wait.
const PAUSE: Duration = Duration::from_millis(100);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_signal: i32) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Returns an error if the run was interrupted.
pub fn go_on() -> Result<()> {
    ensure!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
    Ok(())
}

/// Asks until there is an answer, with a pause after each failure. An error of `go_on` ends the wait at once. The error
/// has that of the last question, too.
pub fn wait_for_answer<T>(
    what: &str,
    patience: Duration,
    go_on: impl FnMut() -> Result<()>,
    mut ask: impl FnMut() -> Result<T>,
) -> Result<T> {
    wait::wait_for_answer(what, patience, PAUSE, go_on, || ask().map(Some))
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use anyhow::bail;

    use super::wait_for_answer;

    #[test]
    fn a_wait_in_vain_says_the_last_error() {
        let waited = wait_for_answer::<()>("an answer", Duration::ZERO, || Ok(()), || bail!("refused"));
        assert_eq!(
            format!("{:#}", waited.unwrap_err()),
            "waited 0 s for an answer: refused"
        );
    }

    #[test]
    fn an_interrupt_ends_a_wait_at_once() {
        let mut asked = 0;
        let mut goes_on = true;
        let go_on = || {
            if !std::mem::take(&mut goes_on) {
                bail!("interrupted");
            }
            Ok(())
        };
        let waited = wait_for_answer::<()>("an answer", Duration::from_mins(1), go_on, || {
            asked += 1;
            bail!("refused")
        });
        assert_eq!(format!("{:#}", waited.unwrap_err()), "interrupted: refused");
        assert_eq!(asked, 1);
    }
}
