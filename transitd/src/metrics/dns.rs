//! Metrics of the DNS of tenants' pods.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::Because;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Resulted {
    result: &'static str,
}

/// The result of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DnsResult {
    /// Answered as the cluster's DNS answered.
    Forwarded,
    /// Answered without what the VPC must not see.
    Filtered,
    /// A name that the VPC must not see: NXDOMAIN.
    Refused,
    /// A name without records of its own.
    NoData,
    /// The cluster's DNS gave no answer: SERVFAIL.
    Failed,
    /// The message was no query.
    Malformed,
    /// An operation or a class that is not served, or a transfer of a zone.
    Unsupported,
    /// The query came from an address that no attachment has: dropped.
    UnknownSource,
    /// No VPC and no pod holds more at once than the asking pod: dropped.
    Limited,
    /// Another pod, which holds less at once, took its place: SERVFAIL.
    Displaced,
}

impl DnsResult {
    fn name(self) -> &'static str {
        match self {
            Self::Forwarded => "forwarded",
            Self::Filtered => "filtered",
            Self::Refused => "refused",
            Self::NoData => "no_data",
            Self::Failed => "failed",
            Self::Malformed => "malformed",
            Self::Unsupported => "unsupported",
            Self::UnknownSource => "unknown_source",
            Self::Limited => "limited",
            Self::Displaced => "displaced",
        }
    }
}

/// The metrics. Clones count together.
#[derive(Clone, Debug, Default)]
pub struct DnsMetrics {
    queries: Family<Resulted, Counter>,
    pub in_flight: Gauge,
    pub connections: Gauge,
    hung_up: Family<Because, Counter>,
}

impl DnsMetrics {
    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register(
            "dns_queries",
            "DNS queries of tenants' pods, by what became of them",
            self.queries.clone(),
        );
        registry.register(
            "dns_in_flight",
            "DNS queries that are worked on",
            self.in_flight.clone(),
        );
        registry.register(
            "dns_connections",
            "TCP connections for DNS",
            self.connections.clone(),
        );
        registry.register(
            "dns_connections_refused",
            "TCP connections for DNS that found no place, or lost it",
            self.hung_up.clone(),
        );
    }

    /// Counts a query that came to its end.
    pub fn answered(&self, result: DnsResult) {
        let of = Resulted {
            result: result.name(),
        };
        self.queries.get_or_create(&of).inc();
    }

    /// Returns how many queries came to this end.
    pub fn count(&self, result: DnsResult) -> u64 {
        let of = Resulted {
            result: result.name(),
        };
        self.queries.get_or_create(&of).get()
    }

    /// Counts a connection that found no place, or lost it.
    pub fn hung_up(&self, why: DnsResult) {
        let of = Because { reason: why.name() };
        self.hung_up.get_or_create(&of).inc();
    }

    /// Returns how many connections were hung up on for this reason.
    pub fn hung_up_on(&self, why: DnsResult) -> u64 {
        let of = Because { reason: why.name() };
        self.hung_up.get_or_create(&of).get()
    }
}
