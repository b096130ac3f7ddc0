//! The listener.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use thiserror::Error;
use tokio::net::{TcpListener, UdpSocket};

use super::shared::{Limits, Shared, Views};
use super::{tcp, udp};
use crate::metrics::{self, DnsMetrics};

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
        let shared = Shared::new(views, upstream, limits, metrics);
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
