//! How long a flow stays on its bouncer: from its first packet to the first that goes direct, seen by `transitd trace`.
//!
//! Times are printed, never judged; that every flow becomes direct without a loss is.

use std::{
    collections::{BTreeMap, HashMap},
    io::{BufRead, BufReader},
    net::{Ipv4Addr, UdpSocket},
    process::Child,
    sync::mpsc::{self, Receiver},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use thuban_cluster::Cluster;

use crate::support::Pod;

/// Packets of a flow, a millisecond apart.
const PACKETS: u64 = 100;
/// How late a flow may become direct on a machine that is busy with other tests.
const LATEST: Duration = Duration::from_secs(2);
/// A trace that shows nothing for so long has shown all.
const QUIET: Duration = Duration::from_secs(2);
/// A port that nobody listens at: what comes back doesn't matter.
const PORT: u16 = 9;

/// `transitd trace` of a pod on its node.
struct Trace<'a> {
    cluster: &'a Cluster,
    node: &'a str,
    /// The process that entered the node.
    child: Child,
    /// The trace's process id on its node.
    process: String,
    lines: Receiver<String>,
}

impl<'a> Trace<'a> {
    /// Returns when it traces.
    fn start(cluster: &'a Cluster, pod: &'a Pod) -> Result<Self> {
        let name = format!("{}/{}", pod.namespace, pod.name);
        // By the node, not by kubectl exec, which would carry every line through the API server.
        let trace = format!("echo $$; exec /proc/$(pgrep -o -x transitd)/exe trace --json --pod {name}");
        let mut child = cluster.spawn_on_node(&pod.node, &["sh", "-c", &trace])?;
        let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        let stderr = BufReader::new(child.stderr.take().context("no stderr")?);
        let (give, lines) = mpsc::channel();
        thread::spawn(move || {
            stdout
                .lines()
                .map_while(Result::ok)
                .try_for_each(|line| give.send(line))
        });
        let trace = Self {
            cluster,
            node: &pod.node,
            child,
            process: lines.recv()?,
            lines,
        };
        let mut said = stderr.lines();
        let is_ready = said
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.starts_with("tracing"));
        ensure!(is_ready, "the trace of {name} ended before it began");
        // It may say more, so the pipe stays open.
        thread::spawn(move || said.for_each(drop));
        Ok(trace)
    }

    /// Returns all lines that it has shown.
    fn end(self) -> Vec<String> {
        let mut all = Vec::new();
        while let Ok(line) = self.lines.recv_timeout(QUIET) {
            all.push(line);
        }
        all
    }
}

impl Drop for Trace<'_> {
    fn drop(&mut self) {
        let _ = self
            .cluster
            .exec_on_node(self.node, &["kill", "-TERM", &self.process]);
        let _ = self.child.wait();
    }
}

/// Sends a flow from the client to each address and answers how long those that take a bouncer elsewhere need to become
/// direct, sorted.
pub fn times(cluster: &Cluster, client: &Pod, addresses: &[Ipv4Addr]) -> Result<Vec<Duration>> {
    let trace = Trace::start(cluster, client)?;
    client.inside(|| {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
        for count in [PACKETS, 1] {
            for address in addresses {
                for _ in 0..count {
                    // An error tells of an earlier packet's ICMP answer.
                    let _ = socket.send_to(b"flow", (*address, PORT));
                    thread::sleep(Duration::from_millis(1));
                }
            }
            // Once more in the end: the slowest must be direct by then.
            thread::sleep(LATEST);
        }
        Ok(())
    })?;
    let mut flows: HashMap<String, Flow> = HashMap::new();
    for line in trace.end() {
        let record: Value = serde_json::from_str(&line).with_context(|| line.clone())?;
        ensure!(record["lost"].is_null(), "the trace has lost records: {record}");
        if record["source"] == client.address.to_string() && record["destinationPort"] == PORT {
            let destination = record["destination"].as_str().unwrap_or_default().to_owned();
            flows.entry(destination).or_default().add(&record)?;
        }
    }
    let mut times = Vec::new();
    for address in addresses {
        let flow = flows.get(&address.to_string());
        let flow = flow.with_context(|| format!("no packet to {address} was traced"))?;
        ensure!(
            flow.packets == PACKETS + 1,
            "{} packets to {address} traced",
            flow.packets
        );
        if flow.is_at_bouncer {
            continue;
        }
        let direct = flow
            .direct
            .with_context(|| format!("{address} never became direct: {:?}", flow.verdicts))?;
        times.push(Duration::from_nanos(direct - flow.first));
    }
    times.sort();
    Ok(times)
}

#[derive(Default)]
struct Flow {
    packets: u64,
    first: u64,
    is_at_bouncer: bool,
    direct: Option<u64>,
    verdicts: BTreeMap<String, u64>,
}

impl Flow {
    fn add(&mut self, record: &Value) -> Result<()> {
        let time = record["monotonicNs"].as_u64().context("no time")?;
        let verdict = record["verdict"].as_str().context("no verdict")?;
        ensure!(!verdict.starts_with("dropped"), "{record}");
        if self.packets == 0 {
            self.first = time;
            // On the bouncer's own droplet its role sends straight to the endpoint.
            self.is_at_bouncer = verdict == "bounced";
        }
        self.packets += 1;
        *self.verdicts.entry(verdict.to_owned()).or_default() += 1;
        if self.direct.is_none() && verdict == "sent_direct" {
            self.direct = Some(time);
        }
        Ok(())
    }
}

/// The time that so many percent of the sorted ones don't exceed.
pub fn percentile(times: &[Duration], percent: usize) -> Duration {
    let index = (times.len() * percent).div_ceil(100);
    times[index.clamp(1, times.len()) - 1]
}
