//! The operator is killed and started again: the bench measures how long it takes until every droplet has its whole
//! program from the new one.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{Api, api::GetParams};
use thuban_api::{OPERATOR_LEASE, SYSTEM_NAMESPACE};

use super::{
    Bench,
    process::Operator,
    progress::{patience, until},
    tally::Count,
};
use crate::bench::float;

impl Bench {
    pub(super) async fn resync(&mut self) -> Result<()> {
        self.phase("operator killed and started again");
        let epochs = self.fleet.droplets.iter().filter_map(|droplet| droplet.synced());
        let before = epochs.map(|synced| synced.epoch).max().unwrap_or_default();
        let rows = self.book.tally.now();
        let next = Operator::start(&self.plane.launch, self.operators)?;
        self.operators += 1;
        // The old operator is killed here; the Lease stays taken until it expires.
        let started = next.started;
        self.sampler.operator(next.process());
        std::mem::replace(&mut self.operator, next).kill()?;
        let leases: Api<Lease> = Api::namespaced(self.plane.admin.clone(), SYSTEM_NAMESPACE);
        let leads = loop {
            let lease = leases
                .get_with(OPERATOR_LEASE, &GetParams::any())
                .await
                .context("the operator's Lease")?;
            let transitions = lease.spec.and_then(|spec| spec.lease_transitions);
            if u64::try_from(transitions.unwrap_or_default()).unwrap_or_default() > before {
                break Instant::now();
            }
            super::go_on()?;
            self.operator.check(&self.plane.launch)?;
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        println!(
            "  leads after {:.1} s",
            leads.duration_since(started).as_secs_f64()
        );
        let droplets = &self.fleet.droplets;
        let again = || {
            let synced = droplets.iter().filter_map(|droplet| droplet.synced());
            synced.filter(|synced| synced.epoch > before)
        };
        until(
            "droplets with a new snapshot",
            droplets.len(),
            patience(droplets.len()),
            || Ok(again().count()),
        )
        .await?;
        let last = again().map(|synced| synced.at).max().unwrap_or(leads);
        let counts = self.book.tally.since(&rows);
        let usage = self.operator.usage()?;
        self.lock_held("resync_lock_held_p99_ms")?;
        let report = &mut self.report;
        report.add("resync_s", "s", last.duration_since(started).as_secs_f64());
        report.add(
            "resync_leadership_s",
            "s",
            leads.duration_since(started).as_secs_f64(),
        );
        report.add(
            "resync_from_leadership_s",
            "s",
            last.duration_since(leads).as_secs_f64(),
        );
        report.add("resync_rows", "", float(counts.of(Count::Snapshot)));
        report.add("resync_dials", "", float(counts.of(Count::Hello)));
        report.add("resync_cpu_s", "s", usage.cpu_seconds);
        report.add("resync_rss_most_mib", "MiB", usage.most_rss_mib);
        Ok(())
    }
}
