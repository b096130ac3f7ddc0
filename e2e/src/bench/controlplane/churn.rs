//! Endpoints that come and go at a steady rate, whatever the operator does meanwhile. The bench measures how long each
//! waits.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use tokio::task::JoinSet;

use super::load::OF_ENDPOINTS;
use super::{Bench, metrics, progress::until, track::Step};
use crate::bench::float;

const AFTER: Duration = Duration::from_mins(1);

/// The requests to the API server.
struct Asked {
    /// Requests that have not been answered yet.
    tasks: JoinSet<Result<()>>,
    deleted: Vec<usize>,
    /// The longest delay of the bench itself.
    latest: Duration,
}

impl Bench {
    /// Makes and removes this many endpoints a second for this long; the metrics get the prefix.
    pub(super) async fn churn(&mut self, rate: usize, seconds: usize, prefix: &str) -> Result<()> {
        let total = rate * seconds;
        if total == 0 {
            return Ok(());
        }
        self.phase(&format!("churn: {rate} endpoints/s made, {rate}/s removed"));
        let before = metrics::read(&self.plane.admin).await?;
        let rows = self.book.tally.now();
        let cpu = self.operator.usage()?.cpu_seconds;
        let server = self.plane.usage("apiserver").cpu_seconds;
        let (first, gone) = (self.book.track.added(), self.book.track.count(Step::Gone));
        self.watches.probes.take();
        let start = Instant::now();
        let Asked {
            mut tasks,
            deleted,
            latest,
        } = self.make_and_delete(rate, total).await?;
        let elapsed = start.elapsed().as_secs_f64();
        let left = self.on_the_way();
        let cpu = self.operator.usage()?.cpu_seconds - cpu;
        let server = self.plane.usage("apiserver").cpu_seconds - server;
        while let Some(done) = tasks.join_next().await {
            done.context("a task")??;
        }
        let probes = self.watches.probes.take();
        let all = first..first + total;
        let track = &self.book.track;
        let mut problems = Vec::new();
        for (what, step) in [
            ("of the churn ready", Step::Ready),
            ("of the churn Provisioned", Step::Provisioned),
        ] {
            let have = || Ok(all.clone().filter(|number| track.has(*number, step)).count());
            problems.extend(until(what, total, AFTER, have).await.err());
        }
        let waited = until("of the churn gone", deleted.len(), AFTER, || {
            Ok((track.count(Step::Gone) - gone) as usize)
        });
        problems.extend(waited.await.err());
        super::go_on()?;
        let change = metrics::read(&self.plane.admin).await?.since(&before);
        let counts = self.book.tally.since(&rows);
        let between = |from, to| track.between(all.clone(), from, to);
        let named = |metric: &str| format!("{prefix}{metric}");
        let report = &mut self.report;
        report.churned = all.clone();
        report.add_times(&named("provisioned"), &between(Step::Sent, Step::Provisioned));
        report.add_times(&named("ready"), &between(Step::Sent, Step::Ready));
        report.add_times(&named("pod_create"), &between(Step::Sent, Step::Answered));
        report.add_times(&named("configmap_watch"), &probes);
        let gone = track.between(deleted.iter().copied(), Step::Deleted, Step::Gone);
        report.add_times(&named("gone"), &gone);
        for (name, part) in [("api_write_p50_ms", 0.5), ("api_write_p99_ms", 0.99)] {
            if let Some(bound) = change.quantile_ms(part) {
                report.add(&named(name), "ms", bound);
            }
        }
        let writes = change.writes(|request| request.is(&OF_ENDPOINTS));
        report.add(
            &named("churn_writes_per_endpoint"),
            "",
            writes / float(total as u64),
        );
        report.add(&named("churn_rate"), "1/s", float(total as u64) / elapsed);
        report.add(&named("churn_left"), "", float(left as u64));
        report.add(&named("operator_cpu_s"), "s", cpu);
        report.add(&named("operator_cores"), "", cpu / elapsed);
        report.add(&named("api_server_cores"), "", server / elapsed);
        let spent = server * 1000.0 / float(total as u64);
        report.add(&named("apiserver_cpu_ms_per_life"), "ms", spent);
        report.add(
            &named("churn_rows_per_endpoint"),
            "",
            float(counts.endpoint_rows()) / float(total as u64),
        );
        for problem in problems {
            report.problem(format!("{problem:#}"));
        }
        println!(
            "  the bench itself was at most {:.1} ms late; operator {:.2} cores, API server {:.2} cores, {spent:.1} ms \
             for each",
            latest.as_secs_f64() * 1000.0,
            cpu / elapsed,
            server / elapsed
        );
        Ok(())
    }

    /// Makes endpoints at that rate, and deletes as many older ones.
    async fn make_and_delete(&mut self, rate: usize, total: usize) -> Result<Asked> {
        let mut tasks = JoinSet::new();
        let (start, mut said) = (Instant::now(), Instant::now());
        let hand = self.hand(self.plan.droplets, self.plan.networks);
        let mut deleted = Vec::new();
        let mut latest = Duration::ZERO;
        for number in 0..total {
            let due = start + Duration::from_secs_f64(float(number as u64) / float(rate as u64));
            tokio::time::sleep_until(due.into()).await;
            latest = latest.max(due.elapsed());
            let created = hand.add()?;
            self.live.push_back(created);
            let own = hand.clone();
            tasks.spawn(async move { own.create(created).await });
            // The endpoint is Provisioned, so that both ends of a life are measured.
            let track = &self.book.track;
            if self
                .live
                .front()
                .is_some_and(|oldest| track.has(*oldest, Step::Ready))
                && let Some(oldest) = self.live.pop_front()
            {
                deleted.push(oldest);
                let own = hand.clone();
                tasks.spawn(async move { own.delete(oldest).await });
            }
            while let Some(done) = tasks.try_join_next() {
                done.context("a task")??;
            }
            if said.elapsed() > Duration::from_secs(5) {
                said = Instant::now();
                println!(
                    "  {} s: {} on the way",
                    start.elapsed().as_secs(),
                    self.on_the_way()
                );
                super::go_on()?;
            }
        }
        Ok(Asked {
            tasks,
            deleted,
            latest,
        })
    }

    /// Returns the number of endpoints that were made and are not Provisioned yet.
    fn on_the_way(&self) -> usize {
        let track = &self.book.track;
        track
            .count(Step::Sent)
            .saturating_sub(track.count(Step::Provisioned)) as usize
    }
}
