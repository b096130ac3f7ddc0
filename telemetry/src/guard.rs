//! The guard of pages that are served beyond loopback: it lets in who proves by a bearer token the right to get
//! `/metrics`.
//!
//! Invariant: a page is shown only within TLS, so that no token crosses the network in clear. Probes are open, with and
//! without TLS: kubelet has no token.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use hyper::HeaderMap;
use hyper::header::AUTHORIZATION;
use kube::Client;
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::server::ResolvesServerCert;
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::access::{Access, Refusal, Right};
use crate::peers::PeerLimits;

/// The pages without a guard, which say no more than whether the process works.
const PROBES: [&str; 2] = ["/healthz", "/readyz"];
/// The first byte of a connection by TLS: the type of a record of its handshake (RFC 8446, section 5.1).
const HANDSHAKE: u8 = 22;
/// How many handshakes of TLS a peer may begin at once after a rest, and then a second. The server signs in each.
const HANDSHAKES_AT_ONCE: u32 = 40;
const HANDSHAKES_A_SECOND: u32 = 20;

/// Decides who may read the pages of a server.
pub struct Guard {
    tls: TlsAcceptor,
    handshakes: PeerLimits,
    access: Arc<Access>,
}

impl Guard {
    /// While the resolver has no certificate, only probes are served. Without a client of the API server, too.
    pub fn new(
        certificate: Arc<dyn ResolvesServerCert>,
        client: Option<Client>,
    ) -> Result<Self, rustls::Error> {
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let config = builder.with_no_client_auth().with_cert_resolver(certificate);
        Ok(Self {
            tls: TlsAcceptor::from(Arc::new(config)),
            handshakes: PeerLimits::new(HANDSHAKES_A_SECOND, HANDSHAKES_AT_ONCE),
            access: Access::new(client, None),
        })
    }

    /// Whether the peer may begin TLS now.
    pub(crate) fn may_begin(&self, peer: IpAddr) -> bool {
        self.handshakes.take(peer)
    }

    pub(crate) async fn secure(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        self.tls.accept(stream).await
    }

    /// Judges a request for a path. Paths that there are not have the same guard as the others.
    pub(crate) async fn admit(
        &self,
        peer: IpAddr,
        path: &str,
        headers: &HeaderMap,
        is_secured: bool,
    ) -> Result<(), Refusal> {
        if PROBES.contains(&path) {
            return Ok(());
        }
        if !is_secured {
            return Err(Refusal::Plain);
        }
        let token = bearer(headers).ok_or(Refusal::NoToken)?;
        self.access.judge(peer, token, &Right::METRICS).await
    }
}

/// Whether the peer begins with TLS. Waits for its first byte.
pub(crate) async fn begins_with_tls(stream: &TcpStream) -> io::Result<bool> {
    let mut first = [0];
    let read = stream.peek(&mut first).await?;
    Ok(read == 1 && first[0] == HANDSHAKE)
}

/// Returns the bearer token of a request.
pub fn bearer(headers: &HeaderMap) -> Option<&str> {
    let value = headers.get(AUTHORIZATION)?.to_str().ok()?;
    let (scheme, token) = value.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::net::SocketAddr;
    use std::time::{SystemTime, UNIX_EPOCH};

    use rustls::pki_types::pem::PemObject as _;
    use rustls::pki_types::{CertificateDer, ServerName};
    use rustls::server::ClientHello;
    use rustls::sign::CertifiedKey;
    use rustls::{ClientConfig, RootCertStore};
    use thuban_authority::{Ca, ServerCertificate};
    use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
    use tokio::net::TcpListener;
    use tokio::task::JoinHandle;
    use tokio_rustls::TlsConnector;

    use super::*;
    use crate::access::tests::{Mode, Server};
    use crate::{Answer, Pages, accept};

    const NAME: &str = "thuban-test";

    struct Secret;

    impl Pages for Secret {
        async fn answer(&self, path: &str) -> Answer {
            match path {
                "/metrics" => Answer::Metrics("# HELP a Some.\n# TYPE a gauge\na 1\n# EOF\n".into()),
                "/healthz" | "/readyz" => Answer::Text("ok\n".into()),
                _ => Answer::Unknown("there is /metrics"),
            }
        }
    }

    /// The resolver of a process that waits for its certificate.
    #[derive(Debug)]
    struct NoneYet;

    impl ResolvesServerCert for NoneYet {
        fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            None
        }
    }

    /// A guarded server, and the CA that verifies it.
    struct Guarded {
        address: SocketAddr,
        ca: Ca,
        task: JoinHandle<()>,
    }

    impl Drop for Guarded {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    impl Guarded {
        async fn start(certificate: Option<Arc<dyn ResolvesServerCert>>, client: Option<Client>) -> Self {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
            let ca = Ca::make("test", now).unwrap();
            let own = Arc::new(ServerCertificate::new(ca.sign(NAME).unwrap()));
            let guard = Guard::new(certificate.unwrap_or(own), client).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let task = tokio::spawn(accept(listener, Secret, Some(guard)));
            Self { address, ca, task }
        }

        async fn plain(&self, path: &str, token: Option<&str>) -> String {
            let stream = TcpStream::connect(self.address).await.unwrap();
            ask(stream, path, token).await
        }

        /// Verifies the server, as a scraper with the CA does.
        async fn tls(&self, path: &str, authorization: Option<&str>) -> io::Result<String> {
            let mut roots = RootCertStore::empty();
            let root = CertificateDer::from_pem_slice(self.ca.certificate.as_bytes()).unwrap();
            roots.add(root).unwrap();
            let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
                .with_safe_default_protocol_versions()
                .unwrap()
                .with_root_certificates(roots)
                .with_no_client_auth();
            let stream = TcpStream::connect(self.address).await.unwrap();
            let name = ServerName::try_from(NAME).unwrap();
            let connector = TlsConnector::from(Arc::new(config));
            let stream = connector.connect(name, stream).await?;
            Ok(ask(stream, path, authorization).await)
        }
    }

    async fn ask(
        mut stream: impl AsyncRead + AsyncWrite + Unpin,
        path: &str,
        authorization: Option<&str>,
    ) -> String {
        let header = authorization.map(|value| format!("Authorization: {value}\r\n"));
        let header = header.unwrap_or_default();
        let request = format!("GET {path} HTTP/1.1\r\nHost: node\r\n{header}\r\n");
        let _ = stream.write_all(request.as_bytes()).await;
        let _ = stream.flush().await;
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    /// Whether an answer has this status, and nothing of the page.
    fn is_refused(answer: &str, status: u16) -> bool {
        answer.starts_with(&format!("HTTP/1.1 {status} ")) && !answer.contains("\na 1\n")
    }

    #[tokio::test]
    async fn metrics_are_shown_to_who_has_the_right() {
        let server = Server::new();
        let guarded = Guarded::start(None, Some(server.client())).await;
        for authorization in ["Bearer reader", "bearer  reader"] {
            let answer = guarded.tls("/metrics", Some(authorization)).await.unwrap();
            assert!(
                answer.starts_with("HTTP/1.1 200 ") && answer.contains("\na 1\n"),
                "{answer}"
            );
        }
        for (authorization, status) in [
            (None, 401),
            (Some("Bearer "), 401),
            (Some("Basic reader"), 401),
            (Some("reader"), 401),
            (Some("Bearer stranger"), 401),
            (Some("Bearer other"), 403),
        ] {
            for path in ["/metrics", "/metrics?a=b", "/", "/healthz/../metrics"] {
                let answer = guarded.tls(path, authorization).await.unwrap();
                assert!(is_refused(&answer, status), "{path} {authorization:?}: {answer}");
                let asks = answer.contains("www-authenticate: Bearer\r\n");
                assert_eq!(asks, status == 401, "{answer}");
            }
        }
        let unknown = guarded.tls("/", Some("Bearer reader")).await.unwrap();
        assert!(is_refused(&unknown, 404), "{unknown}");
    }

    #[tokio::test]
    async fn who_tries_many_tokens_is_told_to_wait() {
        let server = Server::new();
        let guarded = Guarded::start(None, Some(server.client())).await;
        let mut limited = 0;
        for number in 0..20 {
            let authorization = format!("Bearer stranger-{number}");
            let answer = guarded.tls("/metrics", Some(&authorization)).await.unwrap();
            assert!(is_refused(&answer, 401) || is_refused(&answer, 429), "{answer}");
            limited += usize::from(is_refused(&answer, 429));
        }
        assert!(limited > 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_begins_tls_only_so_often() {
        let guard = Guard::new(Arc::new(NoneYet), None).unwrap();
        let begun = |peer: [u8; 4]| (0..1000).filter(|_| guard.may_begin(peer.into())).count();
        assert_eq!(begun([192, 0, 2, 1]), HANDSHAKES_AT_ONCE as usize);
        assert_eq!(begun([192, 0, 2, 2]), HANDSHAKES_AT_ONCE as usize, "of its own");
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        assert_eq!(begun([192, 0, 2, 1]), HANDSHAKES_A_SECOND as usize);
    }

    #[tokio::test]
    async fn metrics_are_not_shown_in_clear() {
        let server = Server::new();
        let guarded = Guarded::start(None, Some(server.client())).await;
        for token in [None, Some("Bearer reader")] {
            let answer = guarded.plain("/metrics", token).await;
            assert!(
                is_refused(&answer, 403) && answer.contains("by https"),
                "{answer}"
            );
        }
    }

    #[tokio::test]
    async fn without_the_api_server_nothing_is_shown() {
        let server = Server::new();
        server.set(Mode::Refuses);
        for client in [Some(server.client()), None] {
            let guarded = Guarded::start(None, client).await;
            let answer = guarded.tls("/metrics", Some("Bearer reader")).await.unwrap();
            assert!(is_refused(&answer, 503), "{answer}");
            let (_, body) = answer.split_once("\r\n\r\n").unwrap();
            assert_eq!(body, format!("{}\n", Refusal::Unasked), "nothing else is told");
        }
    }

    #[tokio::test]
    async fn probes_are_answered_without_a_token() {
        let server = Server::new();
        server.set(Mode::Hangs);
        let guarded = Guarded::start(None, Some(server.client())).await;
        for path in PROBES {
            let answer = guarded.plain(path, None).await;
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
            let answer = guarded.tls(path, None).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        }
        let waiting = Guarded::start(Some(Arc::new(NoneYet)), Some(server.client())).await;
        assert!(waiting.tls("/metrics", Some("Bearer reader")).await.is_err());
        let answer = waiting.plain("/readyz", None).await;
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    }
}
