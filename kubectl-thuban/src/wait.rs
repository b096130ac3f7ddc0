//! Waits until the installation is well, and tells the progress on standard error. What tenants have is waited for only
//! for a short time: it may be wrong for as long as its owner does nothing.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::time::{Instant, sleep};

use crate::error::CliError;
use crate::fetch::Cluster;
use crate::report::{Report, Verdict};
use crate::status;

const PAUSE: Duration = Duration::from_secs(1);
/// How long objects of tenants are waited for, once the installation is well.
const TENANTS_TIMEOUT: Duration = Duration::from_secs(10);

/// Returns the report as soon as nothing is wrong, or only what tenants have, or when the time is over. `seconds`: none
/// looks once.
pub async fn status(cluster: &Cluster, seconds: Option<u64>) -> Result<Report, CliError> {
    let end = Instant::now() + Duration::from_secs(seconds.unwrap_or_default());
    let mut told = None;
    let mut installed_since: Option<Instant> = None;
    loop {
        let objects = cluster.status().await?;
        let report = status::report(&objects, Timestamp::now());
        let now = Instant::now();
        installed_since = status::is_installed(&report).then(|| installed_since.unwrap_or(now));
        let is_installed = installed_since.is_some_and(|since| now.duration_since(since) >= TENANTS_TIMEOUT);
        if report.verdict != Verdict::Found || is_installed || now >= end {
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
