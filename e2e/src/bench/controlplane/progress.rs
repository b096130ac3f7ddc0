//! Waits and prints the progress.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::bench::float;

const LOOK: Duration = Duration::from_millis(20);
const SAY: Duration = Duration::from_secs(5);

/// Returns how long so many objects may take: some minutes, and longer the more they are.
pub fn patience(objects: usize) -> Duration {
    let each = Duration::from_millis(60);
    Duration::from_mins(3) + each * u32::try_from(objects).unwrap_or(u32::MAX)
}

/// Waits until the count reaches the total. Prints every few seconds how far it is and how fast it grows.
pub async fn until(
    what: &str,
    total: usize,
    patience: Duration,
    mut count: impl FnMut() -> Result<usize>,
) -> Result<()> {
    let start = Instant::now();
    let (mut said, mut last) = (start, count()?);
    loop {
        let now = count()?;
        if now >= total {
            let seconds = start.elapsed().as_secs_f64();
            println!("  {what}: {now} ({seconds:.1} s)");
            return Ok(());
        }
        if start.elapsed() > patience {
            bail!("{what}: {now} of {total} after {} s", patience.as_secs());
        }
        if said.elapsed() > SAY {
            let rate = float(now.saturating_sub(last) as u64) / said.elapsed().as_secs_f64();
            println!("  {what}: {now} of {total}, {rate:.0}/s");
            (said, last) = (Instant::now(), now);
        }
        super::go_on()?;
        tokio::time::sleep(LOOK).await;
    }
}
