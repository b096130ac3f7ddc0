//! The listener and its bounds.
//!
//! Invariant: a VPC, and all together, never hold more at once than `Limits` say, no matter what pods send. Nobody
//! waits for a place: a pod that holds little takes a place of the largest holder. Each pod that is refused or loses a
//! place is counted.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::net::{TcpListener, UdpSocket};

use super::answer::{self, Upstream};
use super::shares::{Place, Shares};
use super::upstream::Transport;
use super::view::View;
use super::{tcp, udp};
use crate::metrics::{self, DnsMetrics, DnsResult};

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

#[derive(Clone, Debug)]
pub struct Settings {
    /// An address of this node, not the unspecified one: answers must come from where queries went.
    pub address: SocketAddr,
    /// The cluster's DNS.
    pub upstream: SocketAddr,
    pub limits: Limits,
    pub metrics: DnsMetrics,
}

impl Settings {
    /// Returns settings with the usual limits, counted among the metrics of this process.
    pub fn new(address: SocketAddr, upstream: SocketAddr) -> Self {
        Self {
            address,
            upstream,
            limits: Limits::default(),
            metrics: metrics::dns(),
        }
    }
}

/// The reason why there is no listener.
#[derive(Debug, Error)]
pub enum BindError {
    #[error("cannot listen for DNS at TCP {address}")]
    Tcp {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error("cannot listen for DNS at UDP {address}")]
    Udp {
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
}

/// Listens by UDP and TCP.
#[derive(Debug)]
pub struct Server<V> {
    shared: Arc<Shared<V>>,
    address: SocketAddr,
    udp: UdpSocket,
    tcp: TcpListener,
}

impl<V: Views> Server<V> {
    /// Binds the sockets. Queries wait in them from here on. Port 0 is any that is free for TCP.
    pub async fn bind(settings: Settings, views: V) -> Result<Self, BindError> {
        let Settings {
            address,
            upstream,
            limits,
            metrics,
        } = settings;
        let of_tcp = |source| BindError::Tcp { address, source };
        let tcp = TcpListener::bind(address).await.map_err(of_tcp)?;
        let address = tcp.local_addr().map_err(of_tcp)?;
        let udp = UdpSocket::bind(address)
            .await
            .map_err(|source| BindError::Udp { address, source })?;
        let shared = Shared {
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
        };
        Ok(Self {
            shared: Arc::new(shared),
            address,
            udp,
            tcp,
        })
    }

    pub fn local_address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`; queries in flight then get no answer.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        tokio::select! {
            () = udp::serve(&self.shared, Arc::new(self.udp)) => {}
            () = tcp::serve(&self.shared, self.tcp) => {}
            () = stop => {}
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
