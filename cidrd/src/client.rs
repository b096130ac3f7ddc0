//! The client of cidrd's API, and how long its user may use what it was given.

use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::CONTENT_TYPE;
use hyper::{Method, Request, StatusCode};
use hyper_rustls::{FixedServerNameResolver, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;
use thuban_api::ip_lease::LeaseState;
use tokio::time::{Instant, timeout};

use crate::TLS_NAME;
use crate::http::{Lease, Leases, Released, Wanted};
use crate::problem::Problem;
use crate::server::{TlsError, roots};

/// How long before the end of its lease a holder stops using an address at least.
const MARGIN: Duration = Duration::from_mins(1);
/// The part of a lease that its holder does not use: clocks of two machines may run at different rates. The kernel
/// changes its clock's rate by 1/2000 at most.
const DRIFT: u32 = 100;
/// How long cidrd may take to answer: more than it takes itself.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// How long a connection may take to begin. The node's address translation keeps the ways of packets that it has sent:
/// to a Service that it did not know yet only a new connection gets through.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a connection is kept for the next request: cidrd ends an idle one after 5 s.
const IDLE_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of the largest answer: 50,000 leases.
const LARGEST_ANSWER: usize = 16 << 20;

#[derive(Debug, Error)]
pub enum ClientError {
    /// cidrd has decided about this request. A lease is lost only if [`Client::renew`] is refused, or does not return
    /// it.
    #[error("cidrd refuses: {}", .0.detail)]
    Refused(Problem),
    /// Whether the request took effect is not known: repeat it.
    #[error("cidrd can't be reached: {0}")]
    Away(String),
}

/// An address that its holder may use until the deadline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub lease: Lease,
    /// By this process's monotonic clock. cidrd begins to count only after this process sent the request.
    pub deadline: Instant,
}

impl Grant {
    /// Returns what an answer grants. `sent`: when the request was sent.
    pub fn new(lease: Lease, sent: Instant) -> Self {
        let life = Duration::from_secs(lease.lease_seconds.into());
        Self {
            deadline: sent + life.saturating_sub(MARGIN.max(life / DRIFT)),
            lease,
        }
    }
}

/// A connection to cidrd.
#[derive(Clone)]
pub struct Client {
    http: HttpClient<HttpsConnector<HttpConnector>, Full<Bytes>>,
    address: String,
}

impl Client {
    /// Makes a client of the cidrd at `host:port`. `bundle`: the CAs that verify cidrd. `key`: a certificate that one
    /// of them signed for a client.
    pub fn new(address: &str, bundle: &str, key: Arc<CertifiedKey>) -> Result<Self, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
        let config = builder
            .with_root_certificates(roots(bundle)?)
            .with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(key)));
        let name = ServerName::try_from(TLS_NAME).map_err(|_| rustls::Error::UnsupportedNameType)?;
        let mut plain = HttpConnector::new();
        plain.enforce_http(false);
        plain.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_only()
            .with_server_name_resolver(FixedServerNameResolver::new(name))
            .enable_http1()
            .wrap_connector(plain);
        Ok(Self {
            http: HttpClient::builder(TokioExecutor::new())
                .pool_idle_timeout(IDLE_TIMEOUT)
                .build(connector),
            address: address.to_owned(),
        })
    }

    /// Returns all leases.
    pub async fn list(&self) -> Result<Vec<Lease>, ClientError> {
        let (answer, _) = self.ask::<Leases>(Method::GET, "", None).await?;
        Ok(answer.leases)
    }

    /// Gets a holder what it wants. A repeat gets the same.
    pub async fn put(&self, uid: &str, wanted: &Wanted) -> Result<Vec<Grant>, ClientError> {
        let answer = self
            .ask(Method::PUT, &format!("/{uid}"), Some(json(wanted)?))
            .await?;
        Ok(granted(answer))
    }

    /// Renews what a holder has. What isn't in the answer is lost.
    pub async fn renew(&self, uid: &str) -> Result<Vec<Grant>, ClientError> {
        let answer = self.ask(Method::POST, &format!("/{uid}/renew"), None).await?;
        Ok(granted(answer))
    }

    /// Gives back what a holder was given, and no longer uses.
    pub async fn release(&self, uid: &str, released: &Released) -> Result<(), ClientError> {
        let body = json(released)?;
        self.send(Method::DELETE, &format!("/{uid}"), Some(body))
            .await
            .map(drop)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(T, Instant), ClientError> {
        let (bytes, sent) = self.send(method, path, body).await?;
        let answer = serde_json::from_slice(&bytes).map_err(|error| ClientError::Away(error.to_string()))?;
        Ok((answer, sent))
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> Result<(Bytes, Instant), ClientError> {
        let away = |error: &dyn std::error::Error| ClientError::Away(error.to_string());
        let request = Request::builder()
            .method(method)
            .uri(format!("https://{}/v1/leases{path}", self.address))
            .header(CONTENT_TYPE, "application/json")
            .body(Full::from(body.unwrap_or_default()))
            .map_err(|error| away(&error))?;
        let sent = Instant::now();
        let exchange = async {
            let response = self.http.request(request).await.map_err(|error| away(&error))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let bytes = body.map_err(|error| away(error.as_ref()))?.to_bytes();
            judge(status, bytes)
        };
        let answered = timeout(REQUEST_TIMEOUT, exchange).await;
        let bytes = answered.unwrap_or_else(|_| Err(ClientError::Away("no answer in time".to_owned())))?;
        Ok((bytes, sent))
    }
}

fn json(body: &impl Serialize) -> Result<Vec<u8>, ClientError> {
    serde_json::to_vec(body).map_err(|error| ClientError::Away(error.to_string()))
}

fn granted((answer, sent): (Leases, Instant)) -> Vec<Grant> {
    let held = |lease: &Lease| lease.state == LeaseState::Held;
    let leases = answer.leases.into_iter().filter(held);
    leases.map(|lease| Grant::new(lease, sent)).collect()
}

/// Tells a refusal from a failure: only what cidrd itself says of the request, and will say again, is a refusal.
fn judge(status: StatusCode, body: Bytes) -> Result<Bytes, ClientError> {
    if status.is_success() {
        return Ok(body);
    }
    match serde_json::from_slice::<Problem>(&body) {
        Ok(problem) if status.is_client_error() => Err(ClientError::Refused(problem)),
        Ok(problem) => Err(ClientError::Away(problem.detail)),
        Err(_) => Err(ClientError::Away(format!("status {status}"))),
    }
}
