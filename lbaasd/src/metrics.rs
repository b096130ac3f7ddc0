//! Metrics and probes of this process.

use std::sync::LazyLock;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use thuban_telemetry::process::{OBJECTS_UNREAD, RegistryPages, register_ca_expiry};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

struct Metrics {
    failures: Family<OfKind, Counter>,
    polls: Counter,
    registry: Registry,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

impl Metrics {
    fn new() -> Self {
        let mut metrics = Self {
            failures: Family::default(),
            polls: Counter::default(),
            registry: Registry::with_prefix("thuban_lbaasd"),
        };
        let registry = &mut metrics.registry;
        registry.register(
            "reconcile_failures",
            "Looks at an object that failed and are repeated, by kind",
            metrics.failures.clone(),
        );
        registry.register("polls", "Answered requests of nodes", metrics.polls.clone());
        register_ca_expiry(registry, "When the CA of lbaasd expires");
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

/// Returns the pages of this process.
pub fn pages() -> RegistryPages {
    RegistryPages {
        registry: &METRICS.registry,
        unready: OBJECTS_UNREAD,
    }
}
