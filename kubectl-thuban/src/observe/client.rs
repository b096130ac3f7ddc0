//! HTTPS with thuban-observe: one connection for each request, verified by the CA that the API server knows, with a
//! token of the viewer. What was lost on the way is opened again with the next request.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::{BodyExt, Empty};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::header::{ACCEPT, AUTHORIZATION, HOST, HeaderValue};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use kube::Client;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde::Deserialize;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::access::{self, Tokens};
use super::error::ObserveError;
use super::forward::Forward;
use super::{Asked, Target};
use crate::kubectl::Kubectl;

/// The name in thuban-observe's certificate, whatever address it is reached at.
pub const TLS_NAME: &str = "thuban-observe";
/// How long a connection and its handshake may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long thuban-observe may take until it answers: it asks the API server about tokens.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// How long an answer may pause. thuban-observe sends something each 15 s.
const SILENCE_TIMEOUT: Duration = Duration::from_mins(1);
/// The longest answer that is read at once, and the longest line.
const MAX_ANSWER: usize = 16 * 1024 * 1024;
const MAX_LINE: usize = 64 * 1024;

/// thuban-observe, as the viewer of a namespace asks it.
pub struct Relay {
    client: Client,
    kubectl: Kubectl,
    /// thuban-observe's namespace.
    namespace: String,
    pub asked: Asked,
    tokens: Tokens,
    way: Mutex<Option<Arc<Way>>>,
}

/// How thuban-observe is reached and verified.
struct Way {
    forward: Forward,
    tls: TlsConnector,
}

/// What thuban-observe says instead of an answer.
#[derive(Deserialize)]
struct Refusal {
    error: String,
}

impl Relay {
    /// Finds thuban-observe, unless its namespace is named. Nothing is connected yet.
    pub async fn find(
        client: Client,
        kubectl: Kubectl,
        asked: Asked,
        named: Option<&str>,
    ) -> Result<Self, ObserveError> {
        let namespace = match named {
            Some(named) => named.to_owned(),
            None => access::find(&client).await?,
        };
        let of_viewer = match &asked {
            Asked::Namespace(asked) => asked,
            Asked::All => &namespace,
        };
        Ok(Self {
            tokens: Tokens::new(client.clone(), of_viewer),
            client,
            kubectl,
            namespace,
            asked,
            way: Mutex::new(None),
        })
    }

    /// Returns the body of an answer, or why there is none.
    pub async fn ask(&self, target: &Target) -> Result<Incoming, ObserveError> {
        let response = Box::pin(self.get(&target.0, None)).await?;
        let status = response.status();
        let body = response.into_body();
        match status {
            StatusCode::OK => Ok(body),
            StatusCode::FORBIDDEN => Err(ObserveError::MayNotSee {
                account: self.tokens.namespace().to_owned(),
                asked: self.asked.clone(),
            }),
            status => {
                let bytes = read(body).await?;
                let refusal = serde_json::from_slice::<Refusal>(&bytes);
                let said = refusal.map_or_else(
                    |_| String::from_utf8_lossy(&bytes).trim().to_owned(),
                    |Refusal { error }| error,
                );
                Err(ObserveError::Refused { status, said })
            }
        }
    }

    /// Sends a request, and returns the answer, whatever it is.
    pub async fn get(
        &self,
        target: &str,
        accept: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, ObserveError> {
        let response = self.send(target, accept).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        // The token may have expired while this machine slept.
        self.tokens.forget().await;
        self.send(target, accept).await
    }

    async fn send(
        &self,
        target: &str,
        accept: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, ObserveError> {
        let mut authorization = HeaderValue::try_from(format!("Bearer {}", self.tokens.token().await?))?;
        authorization.set_sensitive(true);
        let mut request = Request::new(Empty::<Bytes>::new());
        *request.uri_mut() = target.parse()?;
        let headers = request.headers_mut();
        headers.insert(HOST, HeaderValue::from_static(TLS_NAME));
        headers.insert(AUTHORIZATION, authorization);
        if let Some(accept) = accept {
            headers.insert(ACCEPT, accept.clone());
        }
        let stream = Box::pin(self.connect()).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        // It ends with the answer, or when nobody reads the answer any more.
        tokio::spawn(connection);
        let answered = timeout(ANSWER_TIMEOUT, sender.send_request(request)).await;
        Ok(answered.map_err(|_| ObserveError::Late(ANSWER_TIMEOUT.as_secs()))??)
    }

    /// Opens a connection. If that fails, a new way is tried once: the way may lead to a pod that is gone, or the CA
    /// may be another one by now.
    async fn connect(&self) -> Result<TlsStream<TcpStream>, ObserveError> {
        let (way, is_new) = self.way().await?;
        match way.connect().await {
            Err(_) if !is_new => {}
            connected => return connected,
        }
        self.leave(&way).await;
        self.way().await?.0.connect().await
    }

    /// Returns the way to thuban-observe, and whether it is a new one.
    async fn way(&self) -> Result<(Arc<Way>, bool), ObserveError> {
        // Requests that come together wait for one kubectl.
        let mut held = self.way.lock().await;
        if let Some(way) = held.as_ref().filter(|way| way.forward.is_alive()) {
            return Ok((Arc::clone(way), false));
        }
        let ca = access::ca(&self.client, &self.namespace).await?;
        let way = Arc::new(Way {
            tls: connector(&ca)?,
            forward: Forward::open(&self.kubectl, &self.namespace).await?,
        });
        *held = Some(Arc::clone(&way));
        Ok((way, true))
    }

    /// Leaves a way, unless another request has done so.
    async fn leave(&self, way: &Arc<Way>) {
        let mut held = self.way.lock().await;
        if held.as_ref().is_some_and(|held| Arc::ptr_eq(held, way)) {
            *held = None;
        }
    }
}

impl Way {
    async fn connect(&self) -> Result<TlsStream<TcpStream>, ObserveError> {
        let name = ServerName::try_from(TLS_NAME)?;
        let connecting = async {
            let stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.forward.port)).await?;
            self.tls.connect(name, stream).await
        };
        let connected = timeout(CONNECT_TIMEOUT, connecting).await;
        let connected = connected.map_err(|_| ObserveError::Late(CONNECT_TIMEOUT.as_secs()))?;
        connected.map_err(ObserveError::Connect)
    }
}

/// Returns what verifies servers by these certificates alone.
fn connector(ca: &str) -> Result<TlsConnector, ObserveError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(ca.as_bytes()) {
        roots.add(certificate?)?;
    }
    if roots.is_empty() {
        return Err(ObserveError::NoCa);
    }
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Reads a body to its end.
pub async fn read(mut body: Incoming) -> Result<Vec<u8>, ObserveError> {
    let mut bytes = Vec::new();
    while let Some(part) = next_part(&mut body).await? {
        bytes.extend_from_slice(&part);
        if bytes.len() > MAX_ANSWER {
            return Err(ObserveError::TooLong(MAX_ANSWER));
        }
    }
    Ok(bytes)
}

/// Returns the next bytes of a body; none at its end.
async fn next_part(body: &mut Incoming) -> Result<Option<Bytes>, ObserveError> {
    loop {
        let frame = timeout(SILENCE_TIMEOUT, body.frame()).await;
        let frame = frame.map_err(|_| ObserveError::Silent(SILENCE_TIMEOUT.as_secs()))?;
        let Some(frame) = frame else {
            return Ok(None);
        };
        // Trailers say nothing here.
        if let Ok(bytes) = frame?.into_data() {
            return Ok(Some(bytes));
        }
    }
}

/// The lines of a body, each as soon as it is there.
pub struct Lines {
    body: Incoming,
    read: Vec<u8>,
}

impl Lines {
    pub fn new(body: Incoming) -> Self {
        Self {
            body,
            read: Vec::new(),
        }
    }

    /// Returns the next line that is not empty; none at the end.
    pub async fn next(&mut self) -> Result<Option<String>, ObserveError> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let line = String::from_utf8_lossy(&line);
                let line = line.trim();
                // An empty one says that thuban-observe is there.
                if !line.is_empty() {
                    return Ok(Some(line.to_owned()));
                }
                continue;
            }
            if self.read.len() > MAX_LINE {
                return Err(ObserveError::TooLong(MAX_LINE));
            }
            match next_part(&mut self.body).await? {
                Some(part) => self.read.extend_from_slice(&part),
                // What has no end of a line is no whole line.
                None => return Ok(None),
            }
        }
    }
}
