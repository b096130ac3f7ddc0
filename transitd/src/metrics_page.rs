//! `/metrics` of a running node. The node's state and its programs' counters are looked up at each scrape.
//!
//! Reads only.

use std::collections::BTreeMap;
use std::sync::Arc;

use thiserror::Error;
use thuban_common::counters::Counter;
use thuban_rows::Kind;
use thuban_telemetry::{Answer, Pages};
use tokio::sync::Mutex;

use crate::cni::error::chain;
use crate::cni::{spool, status};
use crate::dataplane::connections::{CONNECTIONS, FLOWS};
use crate::dataplane::counters::{self, CounterError};
use crate::dataplane::filter;
use crate::dataplane::policy::{BLOCKS, GRANTS, LISTS};
use crate::dataplane::quota;
use crate::dataplane::tables::{self, TableError};
use crate::metrics::{self, Observed, PodTraffic, Rows};
use crate::netfilter;
use crate::netlink::traffic::{self, Traffic};
use crate::netlink::{self, NetlinkError};
use crate::node::Node;
use crate::state::State;

/// The reason why a scrape gets no metrics.
#[derive(Debug, Error)]
enum ScrapeError {
    #[error(transparent)]
    Counters(#[from] CounterError),
    #[error(transparent)]
    Tables(#[from] TableError),
    #[error(transparent)]
    Netlink(#[from] NetlinkError),
    #[error("cannot encode the metrics")]
    Encode(#[from] std::fmt::Error),
}

#[derive(Debug)]
pub struct MetricsPage {
    node: Arc<Node>,
    /// Locked from before interfaces are read, so that a later scrape never adds an earlier reading.
    pod_traffic: Mutex<PodTraffic>,
}

impl MetricsPage {
    pub fn new(node: Arc<Node>) -> Self {
        Self {
            node,
            pod_traffic: Mutex::default(),
        }
    }

    async fn text(&self) -> Result<String, ScrapeError> {
        let observed = observe(&self.node, &self.pod_traffic).await?;
        Ok(metrics::text(&observed)?)
    }
}

impl Pages for MetricsPage {
    async fn answer(&self, path: &str) -> Answer {
        if path != "/metrics" {
            return Answer::Unknown("there is /metrics");
        }
        match self.text().await {
            Ok(text) => Answer::Metrics(text),
            Err(error) => Answer::Failed(chain(&error)),
        }
    }
}

async fn observe(node: &Node, pod_traffic: &Mutex<PodTraffic>) -> Result<Observed, ScrapeError> {
    let maps = node.settings.pins.maps();
    let is_drop = |name| Counter::ALL.iter().any(|c| c.name() == name && c.is_drop());
    let counted = counters::read(&maps)?.into_iter();
    let (mut drops, packets): (Vec<_>, Vec<_>) = counted.partition(|(name, _)| is_drop(*name));
    let nft = node.settings.nft();
    let limited = tokio::task::spawn_blocking(move || netfilter::dropped(&nft)).await;
    drops.extend(limited.unwrap_or_default());
    let looked = Looked::at(&node.state());
    let mut rows = BTreeMap::new();
    for table in
        tables::NAMES
            .into_iter()
            .chain(quota::TABLES)
            .chain([CONNECTIONS, GRANTS, BLOCKS, LISTS, FLOWS])
    {
        let held = looked.rows.get(table).copied().unwrap_or_default();
        let capacity = tables::capacity(&maps, table)?;
        rows.insert(table, Rows { held, capacity });
    }
    let (uplink, sent_by_pods) = bytes(node, &looked.interfaces, pod_traffic).await?;
    let attachments = looked.interfaces.len();
    let mut attachments_without_agent = 0;
    for interface in looked.interfaces {
        attachments_without_agent += usize::from(filter::program(&node.netlink, interface).await?.is_none());
    }
    Ok(Observed {
        attachments,
        attachments_without_agent,
        rows,
        packets,
        drops,
        uplink,
        sent_by_pods,
        epoch: looked.epoch,
        is_ready: status::run(node).await.is_ok(),
        spooled_dels: spool::waiting(node),
        service_connections: looked.connections,
        silent_members: looked.silent_members,
        policy_sets: looked.policy_sets,
        policy_classes: looked.policy_classes,
        policy_flows: looked.flows,
    })
}

/// Returns the bytes of the uplink, and those that pods have sent by these interfaces.
async fn bytes(
    node: &Node,
    interfaces: &[u32],
    pod_traffic: &Mutex<PodTraffic>,
) -> Result<(Option<Traffic>, u64), ScrapeError> {
    let mut pods = pod_traffic.lock().await;
    let look = async { traffic::read(&netlink::connect()?).await };
    let all = netlink::in_time(look).await?;
    // What the node's end of a veth has received, the pod has sent. What a pod receives is not counted at that end:
    // programs redirect it to the other one.
    let sent = interfaces
        .iter()
        .filter_map(|interface| Some((*interface, all.get(interface)?.received)));
    let sent = pods.look(sent.collect());
    Ok((all.get(&node.uplink.ifindex).copied(), sent))
}

/// The part of the state that is told.
struct Looked {
    /// The rows of each table.
    rows: BTreeMap<&'static str, usize>,
    interfaces: Vec<u32>,
    epoch: Option<u64>,
    connections: usize,
    silent_members: usize,
    policy_sets: usize,
    policy_classes: usize,
    flows: usize,
}

impl Looked {
    fn at(state: &State) -> Self {
        let mut rows: BTreeMap<&'static str, usize> = BTreeMap::new();
        for (key, _) in state.tables.held() {
            *rows.entry(key.table()).or_default() += 1;
        }
        rows.extend(quota::TABLES.into_iter().zip(state.services_rows.0));
        let policy = state.policies.usage();
        rows.extend([
            // Each connection has two entries.
            (CONNECTIONS, state.connections_held * 2),
            (GRANTS, policy.grants),
            (BLOCKS, policy.blocks),
            (LISTS, policy.lists),
            (FLOWS, state.flows_held),
        ]);
        let of_kind = |kind| state.policies.keys().filter(|key| key.kind() == kind).count();
        Self {
            rows,
            interfaces: state.attachments.values().map(|a| a.host_ifindex).collect(),
            epoch: state.stream,
            connections: state.connections_held,
            silent_members: state.silent().0.len(),
            policy_sets: of_kind(Kind::PolicySet),
            policy_classes: of_kind(Kind::Class),
            flows: state.flows_held,
        }
    }
}
