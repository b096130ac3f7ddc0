//! Workflows side by side: fifty VPCs made at once beside one.

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

use super::{Bench, progress::until, report::median, tenants::vpc};

const MANY: usize = 50;
const PATIENCE: Duration = Duration::from_mins(1);

impl Bench {
    pub(super) async fn vpc_rounds(&mut self) -> Result<()> {
        self.phase(&format!("VPCs, one and {MANY} at once"));
        let (mut one, mut many) = (Vec::new(), Vec::new());
        for round in 0..self.plan.rounds {
            one.push(self.vpc_round(round, 1).await?);
            many.push(self.vpc_round(round, MANY).await?);
            println!(
                "  round {}: one {:.0} ms, {MANY} {:.0} ms",
                round + 1,
                one.last().copied().unwrap_or_default(),
                many.last().copied().unwrap_or_default()
            );
        }
        let (one, many) = (median(&one), median(&many));
        self.report.add("vpc_1_ms", "ms", one);
        self.report.add("vpcs_50_ms", "ms", many);
        self.report.add("vpcs_50_over_1", "", many / one);
        Ok(())
    }

    /// Milliseconds until the last is Provisioned. They are removed again.
    async fn vpc_round(&mut self, round: usize, number: usize) -> Result<f64> {
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
        let end = Instant::now() + PATIENCE;
        let last = loop {
            if let Some(last) = seen.all(&names) {
                break last;
            }
            super::go_on()?;
            if Instant::now() > end {
                self.report.problem(format!(
                    "{number} VPCs are not Provisioned after {} s",
                    PATIENCE.as_secs()
                ));
                break Instant::now();
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        };
        let took = last.duration_since(start).as_secs_f64() * 1000.0;
        for name in &names {
            api.delete(name, &DeleteParams::default())
                .await
                .with_context(|| format!("deleting VPC {name}"))?;
        }
        let seen = Arc::clone(&self.watches.vpcs);
        let gone = until("VPCs gone", number, PATIENCE, || Ok(number - seen.there(&names)));
        if let Err(error) = gone.await {
            super::go_on()?;
            self.report.problem(format!("{error:#}"));
        }
        Ok(took)
    }
}
