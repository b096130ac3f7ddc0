//! Serves the HTTP API by TLS to clients whose certificate the CA signed.

use std::io;
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
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tracing::{debug, info, warn};

/// How long a client may take to agree on TLS, and to send the head of a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// The most connections.
const CONNECTIONS: usize = 64;
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

fn config(certificate: Arc<ServerCertificate>, bundle: &str) -> Result<ServerConfig, TlsError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots(bundle)?), provider.clone()).build()?;
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    Ok(builder
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificate))
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

/// Serves on a socket.
pub async fn accept(
    listener: TcpListener,
    certificate: Arc<ServerCertificate>,
    bundle: watch::Receiver<String>,
    router: Router,
) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    loop {
        let Ok(place) = room.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                sleep(PAUSE).await;
                continue;
            }
        };
        let config = config(certificate.clone(), &bundle.borrow());
        let router = router.clone();
        match config {
            Ok(config) => {
                tokio::spawn(async move {
                    if let Err(error) = answer(stream, config, router).await {
                        debug!(%error, "a connection ended");
                    }
                    drop(place);
                });
            }
            Err(error) => warn!(%error, "no connection can be served"),
        }
    }
}

async fn answer(stream: TcpStream, config: ServerConfig, router: Router) -> io::Result<()> {
    let silent = |_| io::Error::from(io::ErrorKind::TimedOut);
    let handshake = TlsAcceptor::from(Arc::new(config)).accept(stream);
    let stream = timeout(PATIENCE, handshake).await.map_err(silent)??;
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(PATIENCE)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await
        .map_err(io::Error::other)
}
