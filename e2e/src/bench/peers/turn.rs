//! One peer's turn: its cluster goes on, everything is measured once, and the cluster is paused.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use thuban_cluster::{Cluster, NODES as ALL_NODES, Stay};

use super::{Plan, churn, daemon::Daemons, site::Site};
use crate::bench::{
    float, go_on,
    pods::NODES,
    results::Sample,
    traffic::{Ends, Measure},
    wait_for_answer,
};

/// The time after a pause until the control plane has caught up.
const SETTLE: Duration = Duration::from_secs(5);
/// The pause after each measure.
const REST: Duration = Duration::from_millis(300);
/// The least number of packets in a tunnel that proves that a turn's traffic went there.
const PROOF: u64 = 10_000;
const READY_TIMEOUT: Duration = Duration::from_mins(2);

/// Metrics of traffic from pod to pod, each with that of the same traffic by a Service.
pub const BY_SERVICE: [(&str, &str); 9] = [
    ("tcp1_gbps", "service_tcp1_gbps"),
    ("cpu_ms_per_gb", "service_cpu_ms_per_gb"),
    ("tcp8_gbps", "service_tcp8_gbps"),
    ("rr_p50_us", "service_rr_p50_us"),
    ("rr_p99_us", "service_rr_p99_us"),
    ("crr_per_s", "service_crr_per_s"),
    ("udp64_pps", "service_udp64_pps"),
    ("udp64_loss", "service_udp64_loss"),
    ("udp64_cpu_us", "service_udp64_cpu_us"),
];

/// Pauses a cluster at its end.
struct Turn<'a> {
    cluster: &'a Cluster,
    /// This program's threads play the pods' programs: some peers serve Services to cgroups of pods.
    stay: Option<Stay>,
}

impl<'a> Turn<'a> {
    fn begin(cluster: &'a Cluster) -> Result<Self> {
        let mut turn = Self { cluster, stay: None };
        cluster.resume()?;
        cluster.wait_nodes_ready(READY_TIMEOUT)?;
        turn.stay = Some(cluster.stay_among_pods(NODES[0])?);
        Ok(turn)
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // A pause stops whoever is still there.
        self.stay = None;
        if let Err(error) = self.cluster.pause() {
            eprintln!("cluster {}: {error:#}", self.cluster.name());
        }
    }
}

/// Takes the samples of the turn.
pub fn take(site: &Site, plan: &Plan) -> Result<Vec<Sample>> {
    let turn = Turn::begin(&site.cluster)?;
    for ends in site.ends() {
        answering(ends)?;
    }
    thread::sleep(SETTLE);
    let sent = tunnelled(site)?;
    let mut samples = traffic(site, plan.time)?;
    let more = tunnelled(site)?.zip(sent).map(|(after, before)| after - before);
    ensure!(
        more.is_none_or(|more| more > PROOF),
        "the tunnel sent only {more:?} packets"
    );
    samples.extend(rest(site, plan.rest)?);
    go_on()?;
    samples.extend(churn::measure(site, plan.pods).context("pods that come and go")?);
    drop(turn);
    Ok(samples)
}

/// Returns how many packets the client's node has sent through the peer's tunnel.
fn tunnelled(site: &Site) -> Result<Option<u64>> {
    let Some(link) = site.peer.tunnel() else {
        return Ok(None);
    };
    let file = format!("/sys/class/net/{link}/statistics/tx_packets");
    let count = site.cluster.exec_on_node(NODES[0], &["cat", &file])?;
    Ok(Some(
        count.trim().parse().with_context(|| format!("{file}: {count}"))?,
    ))
}

/// Waits until the server answers.
fn answering(ends: Ends) -> Result<()> {
    let what = format!("an answer of {}", ends.address);
    let ask = || Measure::RoundTrips.run(ends, Duration::from_millis(200));
    wait_for_answer(&what, READY_TIMEOUT, go_on, ask).map(drop)
}

fn traffic(site: &Site, time: Duration) -> Result<Vec<Sample>> {
    let [direct, service] = site.ends();
    let mut samples = Vec::new();
    for measure in Measure::ALL {
        for (ends, is_service) in [(direct, false), (service, true)] {
            go_on()?;
            thread::sleep(REST);
            let found = measure.run(ends, time);
            let found = found.with_context(|| format!("{measure:?} to {}", ends.address))?;
            samples.extend(found.into_iter().map(|sample| Sample {
                metric: if is_service {
                    by_service(sample.metric)
                } else {
                    sample.metric
                },
                ..sample
            }));
        }
    }
    Ok(samples)
}

fn by_service(metric: &'static str) -> &'static str {
    let found = BY_SERVICE.iter().find(|(direct, _)| *direct == metric);
    found.map_or(metric, |(_, service)| *service)
}

/// Measures the peer's programs while nothing happens.
fn rest(site: &Site, time: Duration) -> Result<Vec<Sample>> {
    let (cluster, peer) = (&site.cluster, &site.peer);
    let daemons = Daemons::find(cluster, &[NODES[1]], peer.daemons(), false)?;
    let controllers = Daemons::find(cluster, &ALL_NODES, peer.controllers(), true)?;
    let (start, before) = (Instant::now(), (daemons.cpu_ms()?, controllers.cpu_ms()?));
    thread::sleep(time);
    let millis = float(u64::try_from(start.elapsed().as_millis())?);
    let percent = |after: f64, before: f64| (after - before) / millis * 100.0;
    Ok(vec![
        Sample::new("rest_rss_mib", "MiB", daemons.rss_mib()?),
        Sample::new("rest_cpu_percent", "%", percent(daemons.cpu_ms()?, before.0)),
        Sample::new("rest_controller_rss_mib", "MiB", controllers.rss_mib()?),
        Sample::new(
            "rest_controller_cpu_percent",
            "%",
            percent(controllers.cpu_ms()?, before.1),
        ),
    ])
}

#[cfg(test)]
mod tests {
    use super::{BY_SERVICE, by_service};
    use crate::bench::traffic::Measure;

    #[test]
    fn every_metric_of_traffic_has_one_by_a_service() {
        for metric in Measure::ALL.iter().flat_map(|measure| measure.metrics()) {
            assert!(BY_SERVICE.iter().any(|(direct, _)| direct == metric), "{metric}");
            assert_ne!(by_service(metric), *metric);
        }
    }
}
