//! Waits until all that can be looked at is well, and tells the progress on standard error.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::{Instant, sleep};

use crate::error::CliError;
use crate::fetch::Cluster;
use crate::report::{Report, Verdict};
use crate::status;

const PAUSE: Duration = Duration::from_secs(1);

/// Returns the report as soon as nothing is wrong, or when the time is over. `seconds`: none looks once.
pub async fn status(cluster: &Cluster, seconds: Option<u64>) -> Result<Report, CliError> {
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or_default());
    let mut told = None;
    loop {
        let objects = cluster.status().await?;
        let report = status::report(&objects, Timestamp::now());
        if report.verdict != Verdict::Found || Instant::now() >= end {
            return Ok(report);
        }
        let first = report.problems().next();
        // Ages in messages change each second.
        let why = first.map(|problem| format!("{} {}", problem.object, problem.reason));
        if told != why {
            eprintln!("not yet: {}", why.as_deref().unwrap_or_default());
        }
        told = why;
        sleep(PAUSE).await;
    }
}
