//! Serves an HTTP API by TLS.

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
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
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

/// Who is served.
#[derive(Clone, Debug)]
pub enum Clients {
    /// Clients whose certificate one of the CAs of this bundle signed.
    Signed(watch::Receiver<String>),
    /// Everybody: requests prove who sends them.
    All,
}

impl Clients {
    /// Whether [`Self::acceptor`] would make another acceptor than at its last call.
    fn have_changed(&self) -> bool {
        matches!(self, Self::Signed(bundle) if bundle.has_changed().unwrap_or(false))
    }

    fn acceptor(&mut self, certificate: Arc<ServerCertificate>) -> Result<TlsAcceptor, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider.clone());
        let builder = builder.with_safe_default_protocol_versions()?;
        let builder = match self {
            Self::Signed(bundle) => {
                let roots = Arc::new(roots(&bundle.borrow_and_update())?);
                let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider).build()?;
                builder.with_client_cert_verifier(verifier)
            }
            Self::All => builder.with_no_client_auth(),
        };
        Ok(TlsAcceptor::from(Arc::new(
            builder.with_cert_resolver(certificate),
        )))
    }
}

/// A server before it listens.
pub struct Server {
    pub certificate: Arc<ServerCertificate>,
    pub clients: Clients,
    /// The most connections of clients.
    pub connections: usize,
    pub router: Router,
}

impl Server {
    /// Serves until the process ends. `setting`: where the port is set.
    pub async fn serve(self, address: SocketAddr, setting: &str) {
        let listener = loop {
            match TcpListener::bind(address).await {
                Ok(listener) => break listener,
                Err(error) => warn!(%address, %error, "the port can't be had: free it, or set {setting}"),
            }
            sleep(PAUSE).await;
        };
        info!(%address, "serving the API");
        self.accept(listener).await;
    }

    /// Serves on a socket. A peer that takes its time to agree on TLS keeps nobody out: one more ends the oldest.
    pub async fn accept(mut self, listener: TcpListener) {
        let mut tls = None;
        let room = Arc::new(Semaphore::new(self.connections));
        let mut handshakes = JoinSet::new();
        let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        if tls.is_none() || self.clients.have_changed() {
                            match self.clients.acceptor(self.certificate.clone()) {
                                Ok(made) => tls = Some(made),
                                Err(error) => warn!(%error, "the CAs of clients can't be used"),
                            }
                        }
                        oldest.retain(|handshake| !handshake.is_finished());
                        if oldest.len() >= HANDSHAKES && let Some(handshake) = oldest.pop_front() {
                            handshake.abort();
                        }
                        if let Some(tls) = &tls {
                            oldest.push_back(handshakes.spawn(timeout(HANDSHAKE_TIMEOUT, tls.accept(stream))));
                        }
                    }
                    Err(error) => {
                        warn!(%error, "a connection could not be accepted");
                        sleep(PAUSE).await;
                    }
                },
                Some(agreed) = handshakes.join_next() => match (agreed, room.clone().try_acquire_owned()) {
                    (Ok(Ok(Ok(stream))), Ok(place)) => {
                        let router = self.router.clone();
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
}

async fn answer(stream: TlsStream<TcpStream>, router: Router) -> Result<(), hyper::Error> {
    http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HANDSHAKE_TIMEOUT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await
}
