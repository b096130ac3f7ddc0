//! Transitd's metrics, as text for Prometheus.
//!
//! Invariant: no label holds the name of a pod, a VPC or a tenant, so that the number of series is bounded and a
//! scrape reveals nothing of tenants. Hooks are one call each and count since the process began. The caller that asks
//! for the text gives the node's state and its programs' counters.

mod dns;
mod flows;
mod gauges;
mod pod_traffic;

use std::sync::LazyLock;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use thuban_proto::transit::{Nack, Program};

use crate::attachments::store::StoreError;

pub use dns::{DnsMetrics, DnsResult};
pub use flows::FlowMetrics;
pub use gauges::{Observed, Rows};
pub use pod_traffic::PodTraffic;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfVerb {
    verb: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    verb: &'static str,
    code: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfKind {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InTable {
    table: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Because {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfInterface {
    interface: &'static str,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Changed {
    change: &'static str,
}

/// Something that was found without an owner and removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reclaimed {
    /// An attachment whose pod is gone, by transitd's own look.
    Attachment,
    /// An attachment that the runtime's GC does not list.
    Collected,
    /// An attachment of another boot.
    Rebooted,
    /// A veth without an attachment.
    Veth,
    /// Rows that led to interfaces that are gone.
    Rows,
    /// A pin of a veth that is gone.
    Pin,
    /// A DEL that had waited in the spool.
    SpooledDel,
}

impl Reclaimed {
    fn name(self) -> &'static str {
        match self {
            Self::Attachment => "attachment",
            Self::Collected => "collected",
            Self::Rebooted => "rebooted",
            Self::Veth => "veth",
            Self::Rows => "rows",
            Self::Pin => "pin",
            Self::SpooledDel => "spooled_del",
        }
    }
}

type Histograms = Family<OfVerb, Histogram, fn() -> Histogram>;

struct Metrics {
    registry: Registry,
    verbs: Family<Answered, Counter>,
    seconds: Histograms,
    attempts: Counter,
    snapshots: Counter,
    received: Family<Changed, Counter>,
    nacks: Family<Because, Counter>,
    adopted: Gauge,
    refused: Family<Because, Counter>,
    reclaimed: Family<OfKind, Counter>,
    compiled: Histogram,
    dns: DnsMetrics,
    flows: FlowMetrics,
    gauges: gauges::Gauges,
}

static METRICS: LazyLock<Metrics> = LazyLock::new(Metrics::new);

fn seconds() -> Histogram {
    Histogram::new(exponential_buckets(0.0005, 2.0, 17))
}

impl Metrics {
    fn new() -> Self {
        let mut registry = Registry::with_prefix("thuban_transitd");
        let gauges = gauges::Gauges::new(&mut registry);
        let mut metrics = Self {
            registry,
            verbs: Family::default(),
            seconds: Family::new_with_constructor(seconds as fn() -> Histogram),
            attempts: Counter::default(),
            snapshots: Counter::default(),
            received: Family::default(),
            nacks: Family::default(),
            adopted: Gauge::default(),
            refused: Family::default(),
            reclaimed: Family::default(),
            compiled: seconds(),
            dns: DnsMetrics::default(),
            flows: FlowMetrics::default(),
            gauges,
        };
        let registry = &mut metrics.registry;
        registry.register("cni", "CNI verbs answered, by code", metrics.verbs.clone());
        registry.register(
            "cni_duration_seconds",
            "How long they took",
            metrics.seconds.clone(),
        );
        registry.register(
            "stream_attempts",
            "Times that the operator was dialled",
            metrics.attempts.clone(),
        );
        registry.register(
            "snapshots",
            "Whole programs of this node received",
            metrics.snapshots.clone(),
        );
        registry.register(
            "rows_received",
            "Rows received, by change",
            metrics.received.clone(),
        );
        registry.register("nacks", "Rows refused", metrics.nacks.clone());
        registry.register(
            "attachments_adopted",
            "Attachments that this process found at its start",
            metrics.adopted.clone(),
        );
        registry.register(
            "attachment_files_refused",
            "Attachment files put aside at the start",
            metrics.refused.clone(),
        );
        registry.register(
            "reclaimed",
            "What had no owner any more and was removed",
            metrics.reclaimed.clone(),
        );
        registry.register(
            "policy_compile_duration_seconds",
            "How long it took to bring classes and sets of network policy into the tables",
            metrics.compiled.clone(),
        );
        metrics.dns.register(registry);
        metrics.flows.register(registry);
        metrics
    }
}

/// Counts an answered CNI verb; code 0 is success.
pub fn answered(verb: &'static str, code: u32, took: Duration) {
    METRICS.verbs.get_or_create(&Answered { verb, code }).inc();
    METRICS
        .seconds
        .get_or_create(&OfVerb { verb })
        .observe(took.as_secs_f64());
}

/// Notes how long it took to bring classes and sets of network policy into the tables.
pub fn policies_compiled(took: Duration) {
    METRICS.compiled.observe(took.as_secs_f64());
}

/// Counts a dial of the operator.
pub fn dials() {
    METRICS.attempts.inc();
}

/// Counts rows that came.
pub fn receives(program: &Program) {
    if program.snapshot {
        METRICS.snapshots.inc();
    }
    let rows = [
        ("upsert", program.upserts.len()),
        ("delete", program.deletes.len()),
    ];
    for (change, count) in rows {
        METRICS
            .received
            .get_or_create(&Changed { change })
            .inc_by(count as u64);
    }
}

/// Counts rows that were refused.
pub fn refuses(nacks: &[Nack]) {
    for nack in nacks {
        let reason = nack.reason().as_str_name();
        METRICS.nacks.get_or_create(&Because { reason }).inc();
    }
}

/// Records the number of attachments that an earlier transitd left.
pub fn adopts(attachments: usize) {
    METRICS
        .adopted
        .set(i64::try_from(attachments).unwrap_or(i64::MAX));
}

/// Counts an attachment file that is not believed.
pub fn disbelieves(error: &StoreError) {
    let reason = error.reason();
    METRICS.refused.get_or_create(&Because { reason }).inc();
}

/// Counts things of one kind that were reclaimed.
pub fn reclaims(what: Reclaimed, count: usize) {
    if count > 0 {
        METRICS
            .reclaimed
            .get_or_create(&OfKind { kind: what.name() })
            .inc_by(count as u64);
    }
}

/// Returns all metrics, with what the node has now.
pub fn text(observed: &Observed) -> Result<String, std::fmt::Error> {
    METRICS.gauges.set(observed);
    let mut text = String::new();
    encode(&mut text, &METRICS.registry)?;
    Ok(text)
}

/// Returns the metrics of the DNS of tenants' pods.
pub fn dns() -> DnsMetrics {
    METRICS.dns.clone()
}

/// Returns the metrics of flows.
pub fn flows() -> FlowMetrics {
    METRICS.flows.clone()
}

#[cfg(test)]
mod tests {
    use thuban_proto::observe::Lost;

    use super::*;

    #[test]
    fn what_is_counted_is_in_the_text_under_its_name() {
        answered("ADD", 11, Duration::from_millis(3));
        reclaims(Reclaimed::Veth, 2);
        reclaims(Reclaimed::Pin, 0);
        policies_compiled(Duration::from_millis(2));
        dns().answered(DnsResult::UnknownSource);
        dns().hung_up(DnsResult::Limited);
        flows().loses(Lost {
            budget: 3,
            ..Lost::default()
        });
        let mut text = String::new();
        encode(&mut text, &METRICS.registry).unwrap();
        for line in [
            r#"thuban_transitd_cni_total{verb="ADD",code="11"} 1"#,
            r#"thuban_transitd_reclaimed_total{kind="veth"} 2"#,
            r#"thuban_transitd_dns_queries_total{result="unknown_source"} 1"#,
            r#"thuban_transitd_dns_connections_refused_total{reason="limited"} 1"#,
            r#"thuban_transitd_cni_duration_seconds_count{verb="ADD"} 1"#,
            r#"thuban_transitd_flow_events_lost_total{cause="budget"} 3"#,
            "thuban_transitd_flow_events_total 0",
            "thuban_transitd_observe_connected 0",
        ] {
            assert!(text.contains(line), "{line}: {text}");
        }
        assert!(!text.contains("pin"), "{text}");
        // Other tests bring policies into tables, too.
        let none = "thuban_transitd_policy_compile_duration_seconds_count 0\n";
        assert!(
            text.contains(none.trim_end_matches("0\n")) && !text.contains(none),
            "{text}"
        );
    }
}
