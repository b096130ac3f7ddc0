//! Serves the HTTP API by TLS to clients whose certificate the CA signed.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::{self, PemObject};
use rustls::server::{VerifierBuilderError, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use thiserror::Error;
use thuban_authority::ServerCertificate;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::{debug, info, warn};

/// How long a client may take to agree on TLS, and to send the head of a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most connections of clients.
const CONNECTIONS: usize = 64;
/// The most peers that have not agreed on TLS yet.
const HANDSHAKES: usize = 64;
/// The pause after a port that could not be bound, or a connection that could not be accepted.
const PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug, Error)]
pub enum TlsError {
    #[error("the CA bundle is no PEM text of certificates: {0}")]
    Bundle(#[from] pem::Error),
    #[error("TLS: {0}")]
    Config(#[from] rustls::Error),
    #[error("verifying clients: {0}")]
    Verifier(#[from] VerifierBuilderError),
}

/// Reads the CAs of a bundle.
pub fn roots(bundle: &str) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(bundle.as_bytes()) {
        roots.add(certificate?)?;
    }
    Ok(roots)
}

fn acceptor(certificate: Arc<ServerCertificate>, bundle: &str) -> Result<TlsAcceptor, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots(bundle)?), provider.clone()).build()?;
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let config = builder
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificate);
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Serves until the process ends. `bundle`: the CAs whose clients are served.
pub async fn serve(
    address: SocketAddr,
    certificate: Arc<ServerCertificate>,
    bundle: watch::Receiver<String>,
    router: Router,
) {
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => warn!(%address, %error, "the port can't be had: free it, or set THUBAN_CIDRD_PORT"),
        }
        sleep(PAUSE).await;
    };
    info!(%address, "serving leases");
    accept(listener, certificate, bundle, router).await;
}

/// Serves on a socket. A peer that takes its time to agree on TLS keeps nobody out: one more ends the oldest.
pub async fn accept(
    listener: TcpListener,
    certificate: Arc<ServerCertificate>,
    mut bundle: watch::Receiver<String>,
    router: Router,
) {
    let mut tls = None;
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut handshakes = JoinSet::new();
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    if tls.is_none() || bundle.has_changed().unwrap_or(false) {
                        match acceptor(certificate.clone(), &bundle.borrow_and_update()) {
                            Ok(made) => tls = Some(made),
                            Err(error) => warn!(%error, "the CAs of clients can't be used"),
                        }
                    }
                    oldest.retain(|handshake| !handshake.is_finished());
                    if oldest.len() >= HANDSHAKES && let Some(handshake) = oldest.pop_front() {
                        handshake.abort();
                    }
                    if let Some(tls) = &tls {
                        oldest.push_back(handshakes.spawn(timeout(PATIENCE, tls.accept(stream))));
                    }
                }
                Err(error) => {
                    warn!(%error, "a connection could not be accepted");
                    sleep(PAUSE).await;
                }
            },
            Some(agreed) = handshakes.join_next() => match (agreed, room.clone().try_acquire_owned()) {
                (Ok(Ok(Ok(stream))), Ok(place)) => {
                    let router = router.clone();
                    tokio::spawn(async move {
                        if let Err(error) = answer(stream, router).await {
                            debug!(%error, "a connection ended");
                        }
                        drop(place);
                    });
                }
                (Ok(Ok(Ok(_))), Err(_)) => warn!("too many connections of clients"),
                _ => debug!("a peer did not agree on TLS"),
            },
        }
    }
}

async fn answer(stream: TlsStream<TcpStream>, router: Router) -> Result<(), hyper::Error> {
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await
}
