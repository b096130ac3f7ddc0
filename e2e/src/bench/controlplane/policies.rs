//! Network policies: how long a change takes until the droplets of its pods have it, and what many policies cost the
//! operator and each endpoint that comes after them.

use std::{
    collections::HashSet,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kube::{
    Api,
    api::{DeleteParams, PostParams},
};
use serde_json::json;

use super::{Bench, hollow::Hollow, progress::until};
use crate::bench::float;

/// Policies that are measured one after the other.
const ALONE: usize = 100;
/// Policies that exist together.
const TOGETHER: usize = 500;
const PARALLEL: usize = 24;
/// The rate of the churn beside many policies.
const RATE: usize = 25;
const SECONDS: usize = 15;
/// The endpoints that this churn makes.
pub const CHURNED: usize = RATE * SECONDS;
const READY_TIMEOUT: Duration = Duration::from_mins(2);
/// The operator's memory counts as settled when it has fallen by less than this within that time. Its allocator gives
/// back what a burst has left within 10 s.
const SETTLED_MIB: f64 = 1.0;
const SETTLED: Duration = Duration::from_secs(12);
const SETTLE_TIMEOUT: Duration = Duration::from_mins(2);

/// Returns a policy for all pods of its namespace, in both directions.
fn policy() -> Result<NetworkPolicy> {
    Ok(serde_json::from_value(json!({
        "metadata": {"name": "within"},
        "spec": {
            "podSelector": {}, "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "load"}}}]}],
            "egress": [
                {"to": [{"podSelector": {}}]},
                {"to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]},
            ],
        },
    }))?)
}

impl Bench {
    pub(super) async fn policies(&mut self) -> Result<()> {
        let together = TOGETHER.min(self.plan.networks);
        let alone = ALONE.min(together);
        self.phase(&format!("network policies, {alone} one by one, then {together}"));
        let rss = self.settled_rss().await?;
        let mut took = Vec::new();
        for network in 0..alone {
            took.extend(self.policy_alone(network).await?);
        }
        self.report.add_times("policy_effect", &took);
        let start = Instant::now();
        stream::iter(alone..together)
            .map(|network| self.make_policy(network))
            .buffer_unordered(PARALLEL)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await?;
        let spaces: HashSet<String> = (0..together)
            .map(|network| self.tenants.namespace(network))
            .collect();
        self.until_judged(&spaces, true).await;
        self.report
            .add("policies_rest_s", "s", start.elapsed().as_secs_f64());
        self.report.add("policies", "", float(together as u64));
        let most = self.operator.usage()?.rss_mib - rss;
        self.report.add("policies_operator_most_mib", "MiB", most);
        let more = self.settled_rss().await? - rss;
        self.report.add("policies_operator_mib", "MiB", more);
        self.churn(RATE, SECONDS, "with_policies_").await?;
        for network in 0..together {
            self.policies_of(network)
                .delete("within", &DeleteParams::default())
                .await
                .context("deleting a NetworkPolicy")?;
        }
        self.until_judged(&spaces, false).await;
        Ok(())
    }

    /// Returns the operator's memory once nothing of a burst is left in it.
    async fn settled_rss(&self) -> Result<f64> {
        let end = Instant::now() + SETTLE_TIMEOUT;
        let mut rss = self.operator.usage()?.rss_mib;
        loop {
            tokio::time::sleep(SETTLED).await;
            super::go_on()?;
            let now = self.operator.usage()?.rss_mib;
            if now > rss - SETTLED_MIB || Instant::now() > end {
                return Ok(now);
            }
            rss = now;
        }
    }

    fn policies_of(&self, network: usize) -> Api<NetworkPolicy> {
        Api::namespaced(self.plane.admin.clone(), &self.tenants.namespace(network))
    }

    async fn make_policy(&self, network: usize) -> Result<()> {
        let made = self
            .policies_of(network)
            .create(&PostParams::default(), &policy()?)
            .await;
        made.map(|_| ()).context("creating a NetworkPolicy")
    }

    /// Makes the policy of a network's namespace. Returns the milliseconds from the API server's answer until all
    /// droplets of the pods judge by it; `None` if the namespace has no pods, or it takes too long.
    async fn policy_alone(&mut self, network: usize) -> Result<Option<f64>> {
        let spaces = HashSet::from([self.tenants.namespace(network)]);
        let droplets: Vec<Arc<Hollow>> = self
            .fleet
            .droplets
            .iter()
            .filter(|droplet| droplet.judged(&spaces).1 > 0)
            .cloned()
            .collect();
        self.make_policy(network).await?;
        let start = Instant::now();
        while !droplets.iter().all(|droplet| is_judged(droplet, &spaces, true)) {
            super::go_on()?;
            if start.elapsed() > READY_TIMEOUT {
                self.report
                    .problem(format!("the policy of network {network} is nowhere in force"));
                return Ok(None);
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok((!droplets.is_empty()).then(|| start.elapsed().as_secs_f64() * 1000.0))
    }

    /// Waits until all droplets judge the pods of these namespaces, or none of them.
    async fn until_judged(&mut self, spaces: &HashSet<String>, is: bool) {
        let droplets = &self.fleet.droplets;
        let waited = until(
            "droplets as the policies say",
            droplets.len(),
            READY_TIMEOUT,
            || {
                Ok(droplets
                    .iter()
                    .filter(|droplet| is_judged(droplet, spaces, is))
                    .count())
            },
        );
        if let Err(error) = waited.await {
            self.report.problem(format!("{error:#}"));
        }
    }
}

/// Whether all pods of these namespaces that live on a droplet have sets of policy, or none has.
fn is_judged(droplet: &Hollow, spaces: &HashSet<String>, is: bool) -> bool {
    let (judged, all) = droplet.judged(spaces);
    judged == if is { all } else { 0 }
}
