//! Metrics and probes of this process.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thuban_telemetry::process::RegistryPages;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

struct Metrics {
    failures: Family<OfKind, Counter>,
    polls: Counter,
    ca_expiry: Gauge,
    registry: Registry,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);
static IS_READY: AtomicBool = AtomicBool::new(false);

impl Metrics {
    fn new() -> Self {
        let mut metrics = Self {
            failures: Family::default(),
            polls: Counter::default(),
            ca_expiry: Gauge::default(),
            registry: Registry::with_prefix("thuban_lbaasd"),
        };
        let registry = &mut metrics.registry;
        registry.register(
            "reconcile_failures",
            "Looks at an object that failed and are repeated, by kind",
            metrics.failures.clone(),
        );
        registry.register("polls", "Answered requests of nodes", metrics.polls.clone());
        registry.register(
            "ca_expiry_timestamp_seconds",
            "When the CA of lbaasd expires",
            metrics.ca_expiry.clone(),
        );
        metrics
    }
}

/// Counts a look at an object that failed.
pub fn failed(kind: &'static str) {
    METRICS.failures.get_or_create(&OfKind { kind }).inc();
}

/// Counts an answer to a node.
pub fn polled() {
    METRICS.polls.inc();
}

/// Notes when the CA expires, in seconds since 1970.
pub fn ca_expires(at: u64) {
    METRICS.ca_expiry.set(i64::try_from(at).unwrap_or(i64::MAX));
}

/// Notes that nodes can be answered.
pub fn ready() {
    IS_READY.store(true, Ordering::Relaxed);
}

/// Returns the pages of this process.
pub fn pages() -> RegistryPages {
    RegistryPages {
        registry: &METRICS.registry,
        is_ready: &IS_READY,
        unready: "the API server's objects are not read yet",
    }
}
