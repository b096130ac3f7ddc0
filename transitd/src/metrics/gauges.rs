//! The state of a node at a scrape, in the form that Prometheus reads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::{Because, InTable, OfInterface};
use crate::netlink::traffic::Traffic;

/// The state of the node that a look found.
#[derive(Debug)]
pub struct Observed {
    pub attachments: usize,
    pub attachments_without_agent: usize,
    /// The rows of each table.
    pub rows: BTreeMap<&'static str, Rows>,
    /// The programs' counters, by name.
    pub packets: Vec<(&'static str, u64)>,
    /// Those of `packets` that count dropped packets, and no others.
    pub drops: Vec<(&'static str, u64)>,
    /// Bytes of the uplink since it was made; `None`: it is gone.
    pub uplink: Option<Traffic>,
    /// Bytes that pods have sent.
    pub sent_by_pods: u64,
    /// The epoch of the operator, while its stream is open and has sent this node's program.
    pub epoch: Option<u64>,
    pub is_ready: bool,
    pub spooled_dels: usize,
    pub service_connections: usize,
    pub silent_members: usize,
    pub policy_sets: usize,
    pub policy_classes: usize,
    pub policy_flows: usize,
}

/// The rows of one table.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    pub held: usize,
    pub capacity: u32,
}

pub(super) struct Gauges {
    attachments: Gauge,
    without_agent: Gauge,
    rows: Family<InTable, Gauge>,
    capacity: Family<InTable, Gauge>,
    packets: Family<Because, Counter<u64, AtomicU64>>,
    drops: Family<Because, Counter<u64, AtomicU64>>,
    bytes: Family<OfInterface, Counter<u64, AtomicU64>>,
    stream: Gauge,
    epoch: Gauge,
    ready: Gauge,
    spooled: Gauge,
    connections: Gauge,
    silent: Gauge,
    policy_sets: Gauge,
    policy_classes: Gauge,
    policy_flows: Gauge,
}

impl Gauges {
    pub(super) fn new(registry: &mut Registry) -> Self {
        let gauges = Self {
            attachments: Gauge::default(),
            without_agent: Gauge::default(),
            rows: Family::default(),
            capacity: Family::default(),
            packets: Family::default(),
            drops: Family::default(),
            bytes: Family::default(),
            stream: Gauge::default(),
            epoch: Gauge::default(),
            ready: Gauge::default(),
            spooled: Gauge::default(),
            connections: Gauge::default(),
            silent: Gauge::default(),
            policy_sets: Gauge::default(),
            policy_classes: Gauge::default(),
            policy_flows: Gauge::default(),
        };
        let mut gauge = |name: &str, help: &str, of: &Gauge| registry.register(name, help, of.clone());
        gauge("attachments", "Attachments on this node", &gauges.attachments);
        gauge(
            "attachments_without_agent",
            "Attachments whose veth has no agent: their packets are not handled",
            &gauges.without_agent,
        );
        gauge(
            "stream",
            "1 while the operator's stream is open and has sent this node's program",
            &gauges.stream,
        );
        gauge("epoch", "Of the operator that sent it", &gauges.epoch);
        gauge("ready", "1 while an ADD would be served", &gauges.ready);
        gauge("spooled_dels", "DELs that wait in the spool", &gauges.spooled);
        gauge(
            "service_connections_held",
            "Connections of pods of this node to services that it remembers",
            &gauges.connections,
        );
        gauge(
            "silent_members",
            "Droplets whose roles this node uses and that do not answer it",
            &gauges.silent,
        );
        gauge(
            "policy_sets",
            "Sets of rules of network policy on this node",
            &gauges.policy_sets,
        );
        gauge(
            "policy_classes",
            "Classes of endpoints that those sets tell apart",
            &gauges.policy_classes,
        );
        gauge(
            "policy_flows",
            "Flows to endpoints of this node that network policy let pass",
            &gauges.policy_flows,
        );
        registry.register("rows", "Rows in the tables", gauges.rows.clone());
        registry.register("rows_capacity", "Rows that they hold", gauges.capacity.clone());
        registry.register(
            "packets",
            "Packets by what became of them",
            gauges.packets.clone(),
        );
        registry.register("drops", "Packets dropped, by reason", gauges.drops.clone());
        registry.register(
            "bytes",
            "Bytes that the uplink has received and sent, and that pods have sent",
            gauges.bytes.clone(),
        );
        gauges
    }

    pub(super) fn set(&self, observed: &Observed) {
        let count = |number: usize| i64::try_from(number).unwrap_or(i64::MAX);
        for (family, counted) in [(&self.packets, &observed.packets), (&self.drops, &observed.drops)] {
            for (reason, value) in counted {
                let counter = family.get_or_create(&Because { reason });
                counter.inner().store(*value, Ordering::Relaxed);
            }
        }
        let uplink = observed.uplink.into_iter();
        let uplink = uplink.flat_map(|uplink| {
            [
                ("uplink", "received", uplink.received),
                ("uplink", "sent", uplink.sent),
            ]
        });
        for (interface, direction, bytes) in uplink.chain([("pods", "sent", observed.sent_by_pods)]) {
            let counter = self.bytes.get_or_create(&OfInterface { interface, direction });
            counter.inner().store(bytes, Ordering::Relaxed);
        }
        for (table, rows) in &observed.rows {
            let of = InTable { table };
            self.rows.get_or_create(&of).set(count(rows.held));
            self.capacity.get_or_create(&of).set(i64::from(rows.capacity));
        }
        self.attachments.set(count(observed.attachments));
        self.without_agent.set(count(observed.attachments_without_agent));
        self.stream.set(i64::from(observed.epoch.is_some()));
        if let Some(epoch) = observed.epoch {
            self.epoch.set(i64::try_from(epoch).unwrap_or(i64::MAX));
        }
        self.ready.set(i64::from(observed.is_ready));
        self.spooled.set(count(observed.spooled_dels));
        self.connections.set(count(observed.service_connections));
        self.silent.set(count(observed.silent_members));
        self.policy_sets.set(count(observed.policy_sets));
        self.policy_classes.set(count(observed.policy_classes));
        self.policy_flows.set(count(observed.policy_flows));
    }
}
