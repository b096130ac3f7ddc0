//! Serves droplets and readers at one port by TLS: gRPC over HTTP/2, and HTTP/1.1 or HTTP/2.
//!
//! Invariant: anybody may connect, and nobody is believed here: each request proves who sends it. The number of
//! connections is bounded, and a peer with many connections loses its own first. A connection that asks nothing ends.
//!
//! Memory: hyper and rustls hold some 20 to 40 KiB for a connection, by estimate. What a droplet has sent and nobody
//! has read is at most a stream's window: 16 KiB, and so 80 MiB if 5,000 droplets flood a process that stands still.
//! A report that waits for its turn has at most 512 KiB. Only droplets beyond their rate wait.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use rustls::crypto::ring;
use thuban_authority::ServerCertificate;
use thuban_telemetry::peers::{Connections, PeerLimits};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tower::ServiceExt;
use tracing::{debug, info, warn};

/// The most connections: those of 5,000 droplets, and readers.
const MAX_CONNECTIONS: usize = 6_000;
/// How long a peer may take to agree on TLS, and to send the head of a request.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a connection may be without a request at first.
const FIRST_REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// How many handshakes of TLS a peer may begin a second, and at once. All who port-forward are one peer.
const HANDSHAKES_A_SECOND: u32 = 20;
const HANDSHAKES_AT_ONCE: u32 = 100;
/// How long a peer may be silent before it is asked, and how long it then has to answer.
const KEEPALIVE: Duration = Duration::from_secs(10);
/// The most requests of a connection at once. A droplet has one, and a browser some.
const MAX_STREAMS: u32 = 32;
/// Bytes of a stream and of a connection that may wait here unread. The second can't be less.
const STREAM_WINDOW: u32 = 16 << 10;
const CONNECTION_WINDOW: u32 = 65_535;
/// Bytes of the head of a request.
const LARGEST_HEAD: u32 = 32 << 10;
/// The pause after a port that could not be bound, or a connection that could not be accepted.
const PAUSE: Duration = Duration::from_secs(1);
/// The protocols within TLS.
const HTTP2: &[u8] = b"h2";
const HTTP1: &[u8] = b"http/1.1";

/// The address that a request came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub IpAddr);

/// A server before it listens.
pub struct Server {
    tls: TlsAcceptor,
    router: Router,
}

impl Server {
    pub fn new(certificate: Arc<ServerCertificate>, router: Router) -> Result<Self, rustls::Error> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let mut config = builder.with_no_client_auth().with_cert_resolver(certificate);
        config.alpn_protocols = vec![HTTP2.to_vec(), HTTP1.to_vec()];
        Ok(Self {
            tls: TlsAcceptor::from(Arc::new(config)),
            router,
        })
    }

    /// Serves until the process ends. `setting`: where the port is set.
    pub async fn serve(self, address: SocketAddr, setting: &str) {
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(error) => warn!(%address, %error, "the port can't be had: free it, or set {setting}"),
            }
            sleep(PAUSE).await;
        };
        info!(%address, "serving droplets and readers");
        self.accept(listener).await;
    }

    async fn accept(self, listener: TcpListener) {
        let server = Arc::new(self);
        let mut connections = Connections::default();
        let handshakes = PeerLimits::new(HANDSHAKES_A_SECOND, HANDSHAKES_AT_ONCE);
        loop {
            let (stream, from) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    warn!(%error, "a connection could not be accepted");
                    sleep(PAUSE).await;
                    continue;
                }
            };
            let peer = from.ip().to_canonical();
            if !handshakes.take(peer) {
                debug!(%peer, "the peer connects too often");
                continue;
            }
            connections.make_room(peer, MAX_CONNECTIONS);
            let server = server.clone();
            let connection = tokio::spawn(async move { server.one_connection(stream, peer).await });
            connections.add(peer, connection);
        }
    }

    async fn one_connection(&self, stream: TcpStream, peer: IpAddr) {
        if let Err(error) = stream.set_nodelay(true) {
            debug!(%peer, %error, "a connection ended at once");
            return;
        }
        match timeout(HANDSHAKE_TIMEOUT, self.tls.accept(stream)).await {
            Ok(Ok(stream)) => answer(stream, peer, self.router.clone()).await,
            Ok(Err(error)) => debug!(%peer, %error, "a peer did not agree on TLS"),
            Err(_) => debug!(%peer, "a peer took too long to agree on TLS"),
        }
    }
}

async fn answer(stream: TlsStream<TcpStream>, peer: IpAddr, router: Router) {
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(HTTP2);
    let has_asked = Arc::new(AtomicBool::new(false));
    let asks = has_asked.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        asks.store(true, Ordering::Relaxed);
        request.extensions_mut().insert(Peer(peer));
        router.clone().oneshot(request)
    });
    let builder = builder(is_http2);
    let served = builder.serve_connection(TokioIo::new(stream), service);
    let silence = async {
        sleep(FIRST_REQUEST_TIMEOUT).await;
        if has_asked.load(Ordering::Relaxed) {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        result = served => if let Err(error) = result {
            debug!(%peer, %error, "a connection ended");
        },
        () = silence => debug!(%peer, "a connection without a request ends"),
    }
}

fn builder(is_http2: bool) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HANDSHAKE_TIMEOUT)
        .max_buf_size(LARGEST_HEAD as usize);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(LARGEST_HEAD);
    // What the peers have agreed on is spoken, and no time is spent on a guess.
    if is_http2 {
        builder.http2_only()
    } else {
        builder.http1_only()
    }
}

#[cfg(test)]
mod tests;
