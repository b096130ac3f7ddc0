//! Workflows side by side: fifty VPCs made at once, compared with one.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use thuban_api::Vpc;

use super::{Bench, copies::Copies, metrics, progress::until, tenants::vpc};
use crate::bench::{float, stats::median};

const MANY: usize = 50;
const READY_TIMEOUT: Duration = Duration::from_mins(1);

impl Bench {
    pub(super) async fn vpc_rounds(&mut self) -> Result<()> {
        self.phase(&format!("VPCs, one and {MANY} at once"));
        let (mut one, mut many) = (Vec::new(), Vec::new());
        let (mut alone, mut writes) = (Vec::new(), 0);
        let copies = Copies::make(&self.plane.admin).await?;
        for round in 0..self.plan.rounds {
            one.push(self.vpc_round(round, 1).await?.0);
            let (took, made) = self.vpc_round(round, MANY).await?;
            many.push(took);
            writes = made;
            alone.push(copies.write(round, MANY, writes).await?);
            println!(
                "  round {}: one {:.0} ms, {MANY} {:.0} ms; {writes} writes of equal objects {:.0} ms",
                round + 1,
                one.last().copied().unwrap_or_default(),
                many.last().copied().unwrap_or_default(),
                alone.last().copied().unwrap_or_default()
            );
        }
        copies.remove().await?;
        let (one, many, alone) = (median(one), median(many), median(alone));
        self.report.add("vpc_1_ms", "ms", one);
        self.report.add("vpcs_50_ms", "ms", many);
        self.report.add("vpcs_50_over_1", "", many / one);
        self.report.add("vpcs_50_writes", "", float(writes as u64));
        self.report
            .add("writes_per_vpc", "", float(writes as u64) / float(MANY as u64));
        self.report.add("api_alone_ms", "ms", alone);
        self.report.add("vpcs_50_over_api_alone", "", many / alone);
        Ok(())
    }

    /// Measures the milliseconds until the last VPC is Provisioned, and the writes until then, without events. The VPCs
    /// are removed again.
    async fn vpc_round(&mut self, round: usize, number: usize) -> Result<(f64, usize)> {
        let before = metrics::read(&self.plane.admin).await?;
        let api: Api<Vpc> = Api::all(self.plane.admin.clone());
        let names: Vec<String> = (0..number)
            .map(|index| format!("r{round}-{number}-{index}"))
            .collect();
        let start = Instant::now();
        let create = |(index, name): (usize, &String)| {
            let (api, vpc) = (api.clone(), vpc(name, index));
            async move {
                let made = api.create(&PostParams::default(), &vpc?).await;
                made.map(|_| ()).context("creating a VPC")
            }
        };
        stream::iter(names.iter().enumerate())
            .map(create)
            .buffer_unordered(MANY)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await?;
        let seen = Arc::clone(&self.watches.vpcs);
        let end = Instant::now() + READY_TIMEOUT;
        let last = loop {
            if let Some(last) = seen.all(&names) {
                break last;
            }
            super::go_on()?;
            if Instant::now() > end {
                self.report.problem(format!(
                    "{number} VPCs are not Provisioned after {} s",
                    READY_TIMEOUT.as_secs()
                ));
                break Instant::now();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        let took = last.duration_since(start).as_secs_f64() * 1000.0;
        let change = metrics::read(&self.plane.admin).await?.since(&before);
        // Positive, and far below what a float holds exactly.
        #[allow(clippy::cast_sign_loss)]
        let writes = change.writes(|request| request.resource != "events") as usize;
        for name in &names {
            api.delete(name, &DeleteParams::default())
                .await
                .with_context(|| format!("deleting VPC {name}"))?;
        }
        let seen = Arc::clone(&self.watches.vpcs);
        let gone = until("VPCs gone", number, READY_TIMEOUT, || {
            Ok(number - seen.there(&names))
        });
        if let Err(error) = gone.await {
            super::go_on()?;
            self.report.problem(format!("{error:#}"));
        }
        Ok((took, writes))
    }
}
