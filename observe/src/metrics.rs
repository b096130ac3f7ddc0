//! Metrics and probes of this process. The sums of flows that readers get are in [`crate::series`].

use std::sync::LazyLock;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thuban_telemetry::process::{OBJECTS_UNREAD, RegistryPages, register_ca_expiry};

use crate::flow::Lost;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Cause {
    cause: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Field {
    field: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Status {
    status: u16,
}

struct Metrics {
    droplets: Gauge,
    streams_refused: Family<Cause, Counter>,
    flows: Counter,
    flows_held: Gauge,
    flows_lost: Family<Cause, Counter>,
    flows_refused: Family<Field, Counter>,
    readers: Gauge,
    lines_lost: Counter,
    sums_refused: Counter,
    answers: Family<Status, Counter>,
    registry: Registry,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

impl Metrics {
    fn new() -> Self {
        let mut metrics = Self {
            droplets: Gauge::default(),
            streams_refused: Family::default(),
            flows: Counter::default(),
            flows_held: Gauge::default(),
            flows_lost: Family::default(),
            flows_refused: Family::default(),
            readers: Gauge::default(),
            lines_lost: Counter::default(),
            sums_refused: Counter::default(),
            answers: Family::default(),
            registry: Registry::with_prefix("thuban_observe"),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        registry.register("droplets", "Droplets with a stream", self.droplets.clone());
        registry.register(
            "streams_refused",
            "Streams that were refused, by cause",
            self.streams_refused.clone(),
        );
        registry.register("flows", "Flows that droplets told of", self.flows.clone());
        registry.register("flows_held", "Flows in memory", self.flows_held.clone());
        registry.register(
            "flows_lost",
            "Events of flows that droplets could not tell of, by cause",
            self.flows_lost.clone(),
        );
        registry.register(
            "flows_refused",
            "Flows of reports that make no sense, by field",
            self.flows_refused.clone(),
        );
        registry.register("readers", "Readers that follow", self.readers.clone());
        registry.register(
            "lines_lost",
            "Lines that readers lost because they were too slow",
            self.lines_lost.clone(),
        );
        registry.register(
            "sums_refused",
            "Flows that were not added up because there are too many sums",
            self.sums_refused.clone(),
        );
        registry.register(
            "answers",
            "Answers to readers, by HTTP status",
            self.answers.clone(),
        );
        register_ca_expiry(registry, "When the CA of thuban-observe expires");
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Notes how many droplets have a stream.
pub fn droplets(count: usize) {
    METRICS.droplets.set(gauge(count));
}

/// Counts a stream that is refused.
pub fn stream_refused(cause: &'static str) {
    METRICS.streams_refused.get_or_create(&Cause { cause }).inc();
}

/// Counts flows of a report, and notes how many are in memory then.
pub fn flows(count: usize, held: usize) {
    METRICS.flows.inc_by(count as u64);
    METRICS.flows_held.set(gauge(held));
}

/// Counts events that a droplet could not tell of.
pub fn flows_lost(lost: &Lost) {
    let causes = [
        ("budget", lost.budget),
        ("table", lost.table),
        ("ring", lost.ring),
        ("stream", lost.stream),
    ];
    for (cause, count) in causes {
        METRICS.flows_lost.get_or_create(&Cause { cause }).inc_by(count);
    }
}

/// Counts a flow with a field that makes no sense.
pub fn flow_refused(field: &'static str) {
    METRICS.flows_refused.get_or_create(&Field { field }).inc();
}

/// Notes how many readers follow.
pub fn readers(count: usize) {
    METRICS.readers.set(gauge(count));
}

/// Counts a line that a reader lost.
pub fn line_lost() {
    METRICS.lines_lost.inc();
}

/// Counts a flow that has no sum.
pub fn sum_refused() {
    METRICS.sums_refused.inc();
}

/// Counts an answer to a reader.
pub fn answered(status: u16) {
    METRICS.answers.get_or_create(&Status { status }).inc();
}

/// Returns the pages of this process.
pub fn pages() -> RegistryPages {
    RegistryPages {
        registry: &METRICS.registry,
        unready: OBJECTS_UNREAD,
    }
}
