//! The cluster at rest: what all of Thuban asks the API server when nobody does anything.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Bench, metrics};

/// How long what went before may go on: events, numbers in statuses, droplets that look at their objects.
const SETTLE: Duration = Duration::from_secs(15);
const REST: Duration = Duration::from_mins(1);

impl Bench {
    pub(super) async fn rest(&mut self) -> Result<()> {
        self.phase("at rest");
        wait(SETTLE).await?;
        let before = metrics::read(&self.plane.admin).await?;
        let start = Instant::now();
        wait(REST).await?;
        let change = metrics::read(&self.plane.admin).await?.since(&before);
        let rate = change.from_thuban / start.elapsed().as_secs_f64();
        self.report.add("requests_at_rest_per_s", "1/s", rate);
        Ok(())
    }
}

async fn wait(time: Duration) -> Result<()> {
    let end = Instant::now() + time;
    while Instant::now() < end {
        super::go_on()?;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    Ok(())
}
