//! One contestant's turn: it is started, everything is measured once, and it is stopped.

use std::{
    fmt::Write,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use thuban_cluster::NODES;
use tokio::runtime::Runtime;

use super::{
    Parts, Plan,
    change::{self, Effect},
    kube_proxy::KubeProxy,
    memory,
    site::Site,
    traffic::{Target, connections, throughput, wait_for_answers, warm_up},
};
use crate::bench::{
    float, go_on,
    kube_proxy::Mode,
    pods,
    report::Number,
    stats::{median, quantile},
    table::number,
};

#[derive(Clone, Copy, Debug)]
pub enum Contestant {
    Thuban,
    KubeProxy(Mode),
}

impl Contestant {
    pub const fn name(self) -> &'static str {
        match self {
            Self::Thuban => "thuban",
            Self::KubeProxy(mode) => mode.name(),
        }
    }

    pub const fn is_thuban(self) -> bool {
        matches!(self, Self::Thuban)
    }
}

/// Clients at once where connections a second are counted.
const WORKERS: usize = 8;
const STREAMS: usize = 4;
const READY_TIMEOUT: Duration = Duration::from_mins(5);
/// The pause after each measure, for other work that waits on this machine, such as the control plane.
const REST: Duration = Duration::from_millis(300);
const REST_BEFORE_CHANGES: Duration = Duration::from_secs(2);
/// The pause between changes. kube-proxy holds back a change that comes within its minSyncPeriod (1 s by default) after
/// the one before. The pause avoids that.
const PAUSE_THUBAN: Duration = Duration::from_millis(300);
const PAUSE_KUBE_PROXY: Duration = Duration::from_millis(1200);

/// Takes the numbers of the turn.
pub fn take(
    contestant: Contestant,
    site: &Site,
    plan: &Plan,
    parts: &Parts,
    runtime: &Runtime,
) -> Result<Vec<Number>> {
    let mut samples = Samples::default();
    match contestant {
        Contestant::Thuban => {
            let before = counters(site)?;
            answering(site, None, go_on)?;
            measure(site, plan, &mut samples)?;
            let effects = change::effects(site, runtime, plan.changes, PAUSE_THUBAN)?;
            samples.changes(&effects);
            for (index, node) in NODES.iter().enumerate() {
                let (services, traffic) = memory::tables_mib(&site.cluster, node)?;
                let node = if index == 0 { "client" } else { *node };
                samples.add(&format!("tables_{node}_mib"), "MiB", services);
                samples.add(&format!("connections_{node}_mib"), "MiB", traffic);
            }
            samples.memory(site, "transitd");
            samples.memory(site, "thuban-operator");
            let after = counters(site)?;
            for name in ["service_stateless", "service_collision"] {
                let of = |all: &std::collections::BTreeMap<String, u64>| all.get(name).copied().unwrap_or(0);
                let more = of(&after).saturating_sub(of(&before));
                samples.add(name, "packets", float(more));
            }
        }
        Contestant::KubeProxy(mode) => {
            let start = Instant::now();
            let mut proxy = KubeProxy::start(&site.cluster, &parts.kube_proxy, mode, &pods::NODES)?;
            answering(site, site.made.last.as_ref(), || {
                ensure!(
                    proxy.is_running(),
                    "kube-proxy has ended: see logs/kube-proxy-*.log in the cluster's folder"
                );
                go_on()
            })?;
            samples.add("start_s", "s", start.elapsed().as_secs_f64());
            // kube-proxy writes all rules once more when it has seen its own node.
            thread::sleep(Duration::from_secs(2));
            measure(site, plan, &mut samples)?;
            let effects = change::effects(site, runtime, plan.changes, PAUSE_KUBE_PROXY)?;
            samples.changes(&effects);
            samples.memory(site, "kube-proxy");
        }
    }
    Ok(samples.0)
}

/// Returns the counters of the client's droplet.
fn counters(site: &Site) -> Result<std::collections::BTreeMap<String, u64>> {
    site.cluster.counters(pods::NODES[0])
}

/// Waits until all used Services, and another one, answer; everything has been used then.
fn answering(site: &Site, other: Option<&Target>, go_on: impl FnMut() -> Result<()>) -> Result<()> {
    let (client, made) = (&site.pods.client, &site.made);
    wait_for_answers(client, made.targets().chain(other), READY_TIMEOUT, go_on)?;
    let all: Vec<&Target> = made.targets().chain(&site.near).chain(&site.far).collect();
    warm_up(client, &all)
}

fn measure(site: &Site, plan: &Plan, samples: &mut Samples) -> Result<()> {
    let (pods, made) = (&site.pods, &site.made);
    let ways = [
        ("near_direct", &site.near),
        ("near_service", &made.near),
        ("far_direct", &site.far),
        ("far_service", &made.far),
    ];
    let mut failed = 0;
    for (way, targets) in ways {
        go_on()?;
        thread::sleep(REST);
        let one = connections(std::slice::from_ref(&pods.client), targets, 1, plan.time)?;
        for (part, name) in [(0.50, "p50"), (0.99, "p99")] {
            samples.add(&format!("{way}_{name}_us"), "us", quantile(&one.micros, part));
        }
        samples.add(&format!("{way}_crr1_per_s"), "1/s", one.per_second);
        failed += one.failed;
    }
    for (way, targets) in ways {
        go_on()?;
        thread::sleep(REST);
        let many = connections(&pods.crowd, targets, WORKERS, plan.time)?;
        samples.add(&format!("{way}_crr8_per_s"), "1/s", many.per_second);
        failed += many.failed;
    }
    for streams in [1, STREAMS] {
        for (way, targets) in ways {
            go_on()?;
            thread::sleep(REST);
            let gbps = throughput(&pods.client, targets, streams, &site.taken, plan.time)?;
            samples.add(&format!("{way}_tcp{streams}_gbps"), "Gbit/s", gbps);
        }
    }
    thread::sleep(REST_BEFORE_CHANGES);
    samples.add("failed", "connections", float(failed as u64));
    Ok(())
}

#[derive(Default)]
struct Samples(Vec<Number>);

impl Samples {
    fn add(&mut self, metric: &str, unit: &'static str, value: f64) {
        self.0.push(Number::new(metric, unit, value));
    }

    /// Adds one sample for each change.
    fn changes(&mut self, effects: &[Effect]) {
        for effect in effects {
            self.add("change_ms", "ms", effect.seen.as_secs_f64() * 1e3);
            self.add("change_written_ms", "ms", effect.written.as_secs_f64() * 1e3);
        }
        let failed: usize = effects.iter().map(|effect| effect.failed).sum();
        self.add("change_failed", "connections", float(failed as u64));
    }

    /// Adds the most memory that one node's process of that name takes.
    fn memory(&mut self, site: &Site, name: &str) {
        let all = NODES
            .iter()
            .filter_map(|node| memory::process_mib(&site.cluster, node, name));
        if let Some(most) = all.max_by(f64::total_cmp) {
            self.add(&format!("{name}_rss_mib"), "MiB", most);
        }
    }
}

/// Returns the most important samples as a line.
pub fn line(samples: &[Number]) -> String {
    const SHOWN: [&str; 6] = [
        "near_service_p50_us",
        "far_direct_p50_us",
        "far_service_p50_us",
        "far_service_crr8_per_s",
        "far_service_tcp1_gbps",
        "failed",
    ];
    let mut text = String::new();
    for sample in samples
        .iter()
        .filter(|sample| SHOWN.contains(&sample.metric.as_str()))
    {
        // A write to a String never fails, here and below.
        let _ = write!(text, " {} {}", sample.metric, number(sample.value));
    }
    let changes = samples.iter().filter(|sample| sample.metric == "change_ms");
    let changes: Vec<f64> = changes.map(|sample| sample.value).collect();
    if let Some(most) = changes.iter().copied().reduce(f64::max) {
        let _ = write!(text, " change {} to {} ms", number(median(changes)), number(most));
    }
    text
}
