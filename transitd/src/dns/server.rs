//! The listener.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use futures::future::join_all;
use socket2::{Domain, Socket, Type};
use thiserror::Error;
use tokio::net::{TcpListener, UdpSocket};
use tracing::warn;

use super::shared::{Limits, Shared, Views};
use super::{tcp, udp};
use crate::metrics::{self, DnsMetrics};

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 1024;

#[derive(Clone, Debug)]
pub struct Settings {
    /// Addresses of this node, no two of one family. Answers must come from where queries went: an unspecified address
    /// serves only where routes choose the right one.
    pub addresses: Vec<SocketAddr>,
    /// The cluster's DNS.
    pub upstream: SocketAddr,
    pub limits: Limits,
    pub metrics: DnsMetrics,
}

impl Settings {
    /// Returns settings with the usual limits, counted among the metrics of this process.
    pub fn new(addresses: Vec<SocketAddr>, upstream: SocketAddr) -> Self {
        Self {
            addresses,
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

impl BindError {
    /// Whether the node does not have the address's family.
    fn is_of_family(&self) -> bool {
        let (Self::Tcp { source, .. } | Self::Udp { source, .. }) = self;
        source.raw_os_error() == Some(libc::EAFNOSUPPORT)
    }
}

/// Listens by UDP and TCP.
#[derive(Debug)]
pub struct Server<V> {
    shared: Arc<Shared<V>>,
    listeners: Vec<Listener>,
}

/// The sockets of one address.
#[derive(Debug)]
struct Listener {
    address: SocketAddr,
    udp: UdpSocket,
    tcp: TcpListener,
}

impl Listener {
    fn bind(address: SocketAddr) -> Result<Self, BindError> {
        let of_tcp = |source| BindError::Tcp { address, source };
        let tcp = socket(address, Type::STREAM).map_err(of_tcp)?;
        tcp.set_reuse_address(true).map_err(of_tcp)?;
        tcp.bind(&address.into()).map_err(of_tcp)?;
        tcp.listen(BACKLOG).map_err(of_tcp)?;
        let tcp = TcpListener::from_std(tcp.into()).map_err(of_tcp)?;
        let address = tcp.local_addr().map_err(of_tcp)?;
        let of_udp = |source| BindError::Udp { address, source };
        let udp = socket(address, Type::DGRAM).map_err(of_udp)?;
        udp.bind(&address.into()).map_err(of_udp)?;
        let udp = UdpSocket::from_std(udp.into()).map_err(of_udp)?;
        Ok(Self { address, udp, tcp })
    }
}

/// Returns a socket of the address's family alone.
fn socket(address: SocketAddr, kind: Type) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), kind, None)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_nonblocking(true)?;
    Ok(socket)
}

impl<V: Views> Server<V> {
    /// Binds the sockets. Queries wait in them from here on. Port 0 is any that is free for TCP.
    pub fn bind(settings: Settings, views: V) -> Result<Self, BindError> {
        let Settings {
            addresses,
            upstream,
            limits,
            metrics,
        } = settings;
        let mut listeners = Vec::new();
        let mut without = None;
        for address in addresses {
            match Listener::bind(address) {
                Ok(listener) => listeners.push(listener),
                Err(error) if error.is_of_family() => without = Some(error),
                Err(error) => return Err(error),
            }
        }
        if let Some(error) = without {
            if listeners.is_empty() {
                return Err(error);
            }
            warn!(
                error = &error as &dyn std::error::Error,
                "this node has only the other family"
            );
        }
        let shared = Shared::new(views, upstream, limits, metrics);
        Ok(Self {
            shared: Arc::new(shared),
            listeners,
        })
    }

    /// Returns the addresses that it listens at.
    pub fn local_addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.listeners.iter().map(|listener| listener.address)
    }

    /// Serves until `stop`; queries in flight then get no answer.
    pub async fn serve(self, stop: impl Future<Output = ()>) {
        let shared = &self.shared;
        let listeners = self.listeners.into_iter().map(|listener| async move {
            tokio::join!(
                udp::serve(shared, Arc::new(listener.udp)),
                tcp::serve(shared, listener.tcp)
            )
        });
        tokio::select! {
            _ = join_all(listeners) => {}
            () = stop => {}
        }
    }
}
