//! Waits for conditions that become true sooner or later.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, anyhow};

/// Asks until the answer is yes, with a pause after each. An error counts as a no; the last error is returned when the
/// patience ends.
pub fn wait_for(
    what: &str,
    patience: Duration,
    pause: Duration,
    mut ask: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let end = Instant::now() + patience;
    loop {
        let answer = ask();
        if matches!(answer, Ok(true)) {
            return Ok(());
        }
        if Instant::now() > end {
            let waited = format!("waited {} s for {what}", patience.as_secs_f32());
            return match answer {
                Err(error) => Err(error.context(waited)),
                Ok(_) => Err(anyhow!("{waited}")),
            };
        }
        thread::sleep(pause);
    }
}
