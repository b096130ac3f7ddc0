//! What the node has and what its programs counted, looked up at each scrape.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter as Count;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thiserror::Error;
use thuban_common::counters::Counter;
use thuban_telemetry::{Answer, Pages};

use super::{Because, InTable, METRICS};
use crate::cni::{spool, status};
use crate::dataplane::connections::CONNECTIONS;
use crate::dataplane::counters::{self, CounterError};
use crate::dataplane::filter;
use crate::dataplane::room;
use crate::dataplane::tables::{self, TableError};
use crate::netlink::NetlinkError;
use crate::node::Node;

/// Why nothing is told.
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

pub(super) struct States {
    attachments: Gauge,
    without_agent: Gauge,
    rows: Family<InTable, Gauge>,
    capacity: Family<InTable, Gauge>,
    packets: Family<Because, Count<u64, AtomicU64>>,
    drops: Family<Because, Count<u64, AtomicU64>>,
    stream: Gauge,
    epoch: Gauge,
    ready: Gauge,
    spooled: Gauge,
    connections: Gauge,
}

impl States {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let states = Self {
            attachments: Gauge::default(),
            without_agent: Gauge::default(),
            rows: Family::default(),
            capacity: Family::default(),
            packets: Family::default(),
            drops: Family::default(),
            stream: Gauge::default(),
            epoch: Gauge::default(),
            ready: Gauge::default(),
            spooled: Gauge::default(),
            connections: Gauge::default(),
        };
        let mut gauge = |name: &str, help: &str, of: &Gauge| registry.register(name, help, of.clone());
        gauge("attachments", "Attachments on this node", &states.attachments);
        gauge(
            "attachments_without_agent",
            "Attachments whose veth has no agent: their packets are not handled",
            &states.without_agent,
        );
        gauge(
            "stream",
            "1 while the operator's stream is open and has sent this node's program",
            &states.stream,
        );
        gauge("epoch", "Of the operator that sent it", &states.epoch);
        gauge("ready", "1 while an ADD would be served", &states.ready);
        gauge("spooled_dels", "DELs that wait in the spool", &states.spooled);
        gauge(
            "service_connections_held",
            "Connections of pods of this node to services that it remembers",
            &states.connections,
        );
        registry.register("rows", "Rows in the tables", states.rows.clone());
        registry.register("rows_capacity", "Rows that they hold", states.capacity.clone());
        registry.register(
            "packets",
            "Packets by what became of them",
            states.packets.clone(),
        );
        registry.register("drops", "Packets dropped, by reason", states.drops.clone());
        states
    }

    async fn refresh(&self, node: &Node) -> Result<(), ScrapeError> {
        let maps = node.settings.pins.maps();
        for (name, value) in counters::read(&maps)? {
            let is_drop = Counter::ALL.iter().any(|c| c.name() == name && c.is_drop());
            let family = if is_drop { &self.drops } else { &self.packets };
            let of = Because { reason: name };
            family.get_or_create(&of).inner().store(value, Ordering::Relaxed);
        }
        let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        let (rows, attachments, epoch, connections) = {
            let state = node.state();
            let mut rows: BTreeMap<&'static str, i64> = BTreeMap::new();
            for (key, _) in state.tables.held() {
                *rows.entry(key.table()).or_default() += 1;
            }
            for (table, held) in room::TABLES.into_iter().zip(state.services_rows.0) {
                rows.insert(table, count(held));
            }
            // Two entries each.
            rows.insert(CONNECTIONS, count(state.connections_held * 2));
            let indexes: Vec<u32> = state.attachments.values().map(|a| a.host_ifindex).collect();
            (rows, indexes, state.stream, state.connections_held)
        };
        for table in tables::NAMES.into_iter().chain(room::TABLES).chain([CONNECTIONS]) {
            let of = InTable { table };
            let held = rows.get(table).copied().unwrap_or_default();
            self.rows.get_or_create(&of).set(held);
            let capacity = tables::capacity(&maps, table)?;
            self.capacity.get_or_create(&of).set(i64::from(capacity));
        }
        self.attachments.set(count(attachments.len()));
        let mut without = 0;
        for index in attachments {
            without += usize::from(filter::program(&node.netlink, index).await?.is_none());
        }
        self.without_agent.set(count(without));
        self.stream.set(i64::from(epoch.is_some()));
        if let Some(epoch) = epoch {
            self.epoch.set(i64::try_from(epoch).unwrap_or(i64::MAX));
        }
        self.ready.set(i64::from(status::run(node).await.is_ok()));
        self.spooled.set(count(spool::waiting(node)));
        self.connections.set(count(connections));
        Ok(())
    }
}

/// `/metrics` of a running node.
#[derive(Debug)]
pub struct TransitdPages(pub Arc<Node>);

impl Pages for TransitdPages {
    async fn answer(&self, path: &str) -> Answer {
        if path != "/metrics" {
            return Answer::Unknown("there is /metrics");
        }
        match text(&self.0).await {
            Ok(text) => Answer::Text(text),
            Err(error) => Answer::Failed(error.to_string()),
        }
    }
}

async fn text(node: &Node) -> Result<String, ScrapeError> {
    METRICS.states.refresh(node).await?;
    let mut text = String::new();
    encode(&mut text, &METRICS.registry)?;
    Ok(text)
}
