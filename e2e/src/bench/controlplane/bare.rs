//! The same churn with pods that need no network: what the API server pays for a pod's life without Thuban.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::PostParams;
use tokio::task::JoinSet;

use super::Bench;
use super::tenants::at_once;
use crate::bench::float;

/// How long each pod lives.
const LIFE: Duration = Duration::from_secs(3);

impl Bench {
    /// Makes this many pods with `hostNetwork` a second for this long, and removes each [`LIFE`] later. The metrics get
    /// the prefix.
    pub(super) async fn bare_churn(&mut self, rate: usize, seconds: usize, prefix: &str) -> Result<()> {
        let total = rate * seconds;
        if total == 0 {
            return Ok(());
        }
        self.phase(&format!(
            "pods without a network: {rate}/s made, {rate}/s removed"
        ));
        let hand = self.hand(self.plan.droplets, self.plan.networks);
        let before = self.plane.usage("apiserver").cpu_seconds;
        let (start, mut tasks) = (Instant::now(), JoinSet::new());
        for number in 0..total {
            let due = start + Duration::from_secs_f64(float(number as u64) / float(rate as u64));
            tokio::time::sleep_until(due.into()).await;
            let (network, droplet) = (number % hand.networks, number % hand.droplets.len());
            let mut pod = self.tenants.pod(number, network, droplet)?;
            let name = format!("bare-{number}");
            pod.metadata.name = Some(name.clone());
            let spec = pod.spec.as_mut().context("a pod without a spec")?;
            spec.host_network = Some(true);
            let pods: Api<Pod> = Api::namespaced(hand.admin.clone(), &self.tenants.namespace(network));
            tasks.spawn(async move {
                pods.create(&PostParams::default(), &pod).await?;
                tokio::time::sleep(LIFE).await;
                pods.delete(&name, &at_once()).await?;
                anyhow::Ok(())
            });
        }
        while let Some(done) = tasks.join_next().await {
            done.context("a task")?.context("a pod without a network")?;
        }
        let spent = (self.plane.usage("apiserver").cpu_seconds - before) * 1000.0 / float(total as u64);
        self.report
            .add(&format!("{prefix}apiserver_cpu_ms_per_bare_life"), "ms", spent);
        println!("  {spent:.1} ms of the API server's CPU for each");
        super::go_on()
    }
}
