//! The cluster at rest: what all of Thuban asks the API server when nobody does anything.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::{Bench, metrics};

/// What went before may go on: events, and what the operator holds back of statuses. A window with at most so many
/// requests a second is quiet.
const WINDOW: Duration = Duration::from_secs(15);
const QUIET: f64 = 1.0;
/// How long that is waited for.
const SETTLE: Duration = Duration::from_mins(5);
const REST: Duration = Duration::from_mins(1);

impl Bench {
    pub(super) async fn rest(&mut self) -> Result<()> {
        self.phase("at rest");
        let begin = Instant::now();
        while begin.elapsed() < SETTLE && self.requests_for(WINDOW).await?.0 > QUIET {}
        self.report.add("settled_s", "s", begin.elapsed().as_secs_f64());
        let (rate, change) = self.requests_for(REST).await?;
        self.report.add("requests_at_rest_per_s", "1/s", rate);
        for (request, count) in &change.done {
            println!("  {} {}: {count}", request.verb, request.resource);
        }
        Ok(())
    }

    /// Returns the requests a second of all of Thuban in the next time, and what changed in it.
    async fn requests_for(&self, time: Duration) -> Result<(f64, metrics::Metrics)> {
        let before = metrics::read(&self.plane.admin).await?;
        let start = Instant::now();
        wait(time).await?;
        let change = metrics::read(&self.plane.admin).await?.since(&before);
        Ok((change.from_thuban / start.elapsed().as_secs_f64(), change))
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
