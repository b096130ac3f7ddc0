//! Metrics and probes of this process.

use std::sync::LazyLock;

use axum::http::{Method, StatusCode};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use thuban_telemetry::process::{OBJECTS_UNREAD, RegistryPages, register_ca_expiry};

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Request {
    method: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: &'static str,
}

struct Metrics {
    requests: Family<Request, Counter>,
    leases: Family<InState, Gauge>,
    expired: Counter,
    registry: Registry,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

impl Metrics {
    fn new() -> Self {
        let mut metrics = Self {
            requests: Family::default(),
            leases: Family::default(),
            expired: Counter::default(),
            registry: Registry::with_prefix("thuban_cidrd"),
        };
        let registry = &mut metrics.registry;
        registry.register(
            "requests",
            "Requests of lbaasd, by method and HTTP status",
            metrics.requests.clone(),
        );
        registry.register("leases", "Leases, by state", metrics.leases.clone());
        registry.register(
            "leases_expired",
            "Leases that their holders did not renew in time",
            metrics.expired.clone(),
        );
        register_ca_expiry(registry, "When the CA of cidrd and its clients expires");
        metrics
    }
}

/// Counts a request.
pub fn answered(method: &Method, status: StatusCode) {
    let method = match *method {
        Method::GET => "GET",
        Method::PUT => "PUT",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        _ => "other",
    };
    let status = status.as_u16();
    METRICS.requests.get_or_create(&Request { method, status }).inc();
}

/// Notes how many leases are in a state.
pub fn leases(state: &'static str, count: usize) {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    METRICS.leases.get_or_create(&InState { state }).set(count);
}

/// Counts a lease that is taken from its holder.
pub fn expired() {
    METRICS.expired.inc();
}

/// Returns the pages of this process.
pub fn pages() -> RegistryPages {
    RegistryPages {
        registry: &METRICS.registry,
        unready: OBJECTS_UNREAD,
    }
}
