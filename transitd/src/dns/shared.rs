//! The state that all queries share, and its bounds.
//!
//! Invariant: a VPC, and all together, never hold more at once than `Limits` say, no matter what pods send. Nobody
//! waits for a place: a pod that holds little takes a place of the largest holder. Each pod that is refused or loses a
//! place is counted.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use super::answer::{self, Upstream};
use super::shares::{Place, Shares};
use super::upstream::Transport;
use super::view::View;
use crate::metrics::{DnsMetrics, DnsResult};

/// The client of a query.
#[derive(Clone, Debug)]
pub struct Asker {
    /// The VPC's VNI, by which the shares are counted.
    pub vpc: u32,
    pub view: Arc<View>,
}

/// Maps a source address to the client.
pub trait Views: Send + Sync + 'static {
    /// Returns the client, or `None` for an address that no attachment of this node has. Called for each query, so it
    /// must be quick.
    fn of(&self, source: IpAddr) -> Option<Asker>;
}

impl<F: Fn(IpAddr) -> Option<Asker> + Send + Sync + 'static> Views for F {
    fn of(&self, source: IpAddr) -> Option<Asker> {
        self(source)
    }
}

/// The limits of the listener. A query in flight has a file descriptor, and so has a connection.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The most queries at once.
    pub in_flight: usize,
    pub in_flight_of_vpc: usize,
    /// The most TCP connections at once.
    pub connections: usize,
    pub connections_of_vpc: usize,
    /// How long a query waits for upstream's answer, and how long a client may take to receive the answer.
    pub patience: Duration,
    /// How long a connection stays open on which nothing is asked and nothing waits.
    pub idle: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            in_flight: 512,
            in_flight_of_vpc: 128,
            connections: 256,
            connections_of_vpc: 64,
            // libc's resolvers wait 5 s.
            patience: Duration::from_secs(4),
            idle: Duration::from_secs(10),
        }
    }
}

/// The state that all queries share.
#[derive(Debug)]
pub(super) struct Shared<V> {
    views: V,
    upstream: Upstream,
    pub(super) limits: Limits,
    in_flight: Arc<Shares>,
    connections: Arc<Shares>,
    pub(super) metrics: DnsMetrics,
}

/// A query that is worked on.
#[derive(Debug)]
pub(super) struct Admitted {
    asker: Asker,
    place: Place,
}

impl<V: Views> Shared<V> {
    pub(super) fn new(views: V, upstream: SocketAddr, limits: Limits, metrics: DnsMetrics) -> Self {
        Self {
            views,
            upstream: Upstream {
                address: upstream,
                patience: limits.patience,
            },
            limits,
            in_flight: Shares::new(
                limits.in_flight,
                limits.in_flight_of_vpc,
                metrics.in_flight.clone(),
            ),
            connections: Shares::new(
                limits.connections,
                limits.connections_of_vpc,
                metrics.connections.clone(),
            ),
            metrics,
        }
    }

    pub(super) fn asker(&self, source: IpAddr) -> Option<Asker> {
        self.views.of(source.to_canonical())
    }

    /// Admits a query. A query that isn't admitted is counted.
    pub(super) fn admit(&self, source: IpAddr) -> Option<Admitted> {
        let Some(asker) = self.asker(source) else {
            self.metrics.answered(DnsResult::UnknownSource);
            return None;
        };
        let Some(place) = self.in_flight.take(asker.vpc, source.to_canonical()) else {
            self.metrics.answered(DnsResult::Limited);
            return None;
        };
        Some(Admitted { asker, place })
    }

    /// Admits a connection. A connection that isn't admitted is counted.
    pub(super) fn admit_connection(&self, source: IpAddr) -> Option<Place> {
        let Some(asker) = self.asker(source) else {
            self.metrics.hung_up(DnsResult::UnknownSource);
            return None;
        };
        let place = self.connections.take(asker.vpc, source.to_canonical());
        if place.is_none() {
            self.metrics.hung_up(DnsResult::Limited);
        }
        place
    }

    pub(super) async fn answer(
        &self,
        admitted: Admitted,
        transport: Transport,
        query: &[u8],
    ) -> Option<Vec<u8>> {
        let Admitted { asker, place } = admitted;
        let (answer, result) =
            answer::answer(self.upstream, &asker.view, transport, query, place.lost()).await;
        self.metrics.answered(result);
        answer
    }
}
