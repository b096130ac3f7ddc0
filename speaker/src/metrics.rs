//! Metrics and probes of this process.

use std::sync::LazyLock;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use thuban_telemetry::process::RegistryPages;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: &'static str,
}

struct Metrics {
    announced: Gauge,
    lengthened: Gauge,
    peers: Family<InState, Gauge>,
    l2_addresses: Gauge,
    since_answer: Gauge,
    registry: Registry,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

impl Metrics {
    fn new() -> Self {
        let mut metrics = Self {
            announced: Gauge::default(),
            lengthened: Gauge::default(),
            peers: Family::default(),
            l2_addresses: Gauge::default(),
            since_answer: Gauge::default(),
            registry: Registry::with_prefix("thuban_speaker"),
        };
        let registry = &mut metrics.registry;
        registry.register(
            "routes_announced",
            "Routes that gobgpd has or may have",
            metrics.announced.clone(),
        );
        registry.register(
            "routes_lengthened",
            "Routes with a longer AS path, because transitd is silent",
            metrics.lengthened.clone(),
        );
        registry.register(
            "peers",
            "BGP peers, by state of the session",
            metrics.peers.clone(),
        );
        registry.register(
            "l2_addresses",
            "Addresses that this node answers for by ARP and neighbour discovery",
            metrics.l2_addresses.clone(),
        );
        registry.register_with_unit(
            "since_answer",
            "Time since the last answer of lbaasd, or since the start",
            Unit::Seconds,
            metrics.since_answer.clone(),
        );
        metrics
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Notes how many routes gobgpd may have, and how many of them are lengthened.
pub fn routes(announced: usize, lengthened: usize) {
    METRICS.announced.set(gauge(announced));
    METRICS.lengthened.set(gauge(lengthened));
}

/// Notes how many peers have an established session, and how many don't.
pub fn peers(established: usize, others: usize) {
    for (state, count) in [("established", established), ("down", others)] {
        METRICS.peers.get_or_create(&InState { state }).set(gauge(count));
    }
}

/// Notes for how many addresses this node answers.
pub fn l2_addresses(count: usize) {
    METRICS.l2_addresses.set(gauge(count));
}

/// Notes how long ago lbaasd answered.
pub fn since_answer(time: Duration) {
    METRICS
        .since_answer
        .set(i64::try_from(time.as_secs()).unwrap_or(i64::MAX));
}

/// Returns the pages of this process.
pub fn pages() -> RegistryPages {
    RegistryPages {
        registry: &METRICS.registry,
        unready: "gobgpd or lbaasd has not answered yet",
    }
}
