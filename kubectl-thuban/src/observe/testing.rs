//! A played thuban-observe for unit tests: its server by TLS on loopback, the API server that knows of it, and the
//! kubectl that forwards to it.

use std::future;
use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use kube::Client;
use rustls::ServerConfig;
use rustls::crypto::ring;
use serde_json::{Value, json};
use thuban_authority::{Ca, ServerCertificate};
use thuban_client::played::{self, Request};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio_rustls::TlsAcceptor;

use super::Asked;
use super::client::{Relay, TLS_NAME};
use crate::kubectl::Kubectl;
use crate::testing;

/// A thuban-observe that gives each request the same answer, and its reader of the namespace `red`.
pub struct Played {
    pub relay: Arc<Relay>,
    /// Lets the next part of an answer go.
    pub gate: Arc<Notify>,
    heads: Arc<Mutex<Vec<String>>>,
    server: JoinHandle<()>,
}

impl Drop for Played {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Played {
    /// Starts a server whose answers have this status and these parts. Each part but the first waits for the gate.
    pub async fn start(status: u16, parts: &[&str]) -> Self {
        let ca = new_ca();
        Self::with_ca(&ca, &ca, status, parts).await
    }

    /// Starts a server whose certificate is signed by another CA than the API server has.
    pub async fn of_another_ca() -> Self {
        Self::with_ca(&new_ca(), &new_ca(), 200, &[]).await
    }

    /// Returns the heads of the requests.
    pub fn asked(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }

    async fn with_ca(own: &Ca, published: &Ca, status: u16, parts: &[&str]) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let heads: Arc<Mutex<Vec<String>>> = Arc::default();
        let gate = Arc::new(Notify::new());
        let answer = Answer {
            status,
            parts: parts.iter().map(|part| (*part).to_owned()).collect(),
            gate: Arc::clone(&gate),
            heads: Arc::clone(&heads),
        };
        let acceptor = acceptor(own);
        let server = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, answer) = (acceptor.clone(), answer.clone());
                tokio::spawn(async move {
                    if let Ok(stream) = acceptor.accept(stream).await {
                        answer.give(stream).await;
                    }
                });
            }
        });
        let script = format!("echo 'Forwarding from 127.0.0.1:{port} -> 6091'; exec sleep 600");
        let asked = Asked::Namespace("red".to_owned());
        let client = api_server(&published.certificate);
        let relay = Relay::find(client, Kubectl::played(&script), asked, None)
            .await
            .unwrap();
        Self {
            relay: Arc::new(relay),
            gate,
            heads,
            server,
        }
    }
}

/// What a server answers.
#[derive(Clone)]
struct Answer {
    status: u16,
    parts: Vec<String>,
    gate: Arc<Notify>,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Answer {
    /// Answers one request, and closes the connection.
    async fn give(&self, mut stream: impl AsyncReadExt + AsyncWriteExt + Unpin) {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            match stream.read_u8().await {
                Ok(byte) => head.push(byte),
                Err(_) => return,
            }
        }
        let head = String::from_utf8(head).unwrap();
        self.heads.lock().unwrap().push(head);
        let head = format!(
            "HTTP/1.1 {} played\r\ncontent-type: text/event-stream\r\nset-cookie: a=b\r\nconnection: close\r\n\r\n",
            self.status
        );
        let _ = stream.write_all(head.as_bytes()).await;
        for (number, part) in self.parts.iter().enumerate() {
            if number > 0 {
                self.gate.notified().await;
            }
            let _ = stream.write_all(part.as_bytes()).await;
            let _ = stream.flush().await;
        }
        let _ = stream.shutdown().await;
    }
}

fn new_ca() -> Ca {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    Ca::make("thuban-observe-ca", now).unwrap()
}

fn acceptor(ca: &Ca) -> TlsAcceptor {
    let certificate = ServerCertificate::new(ca.sign(TLS_NAME).unwrap());
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(certificate));
    TlsAcceptor::from(Arc::new(config))
}

/// Returns the client of an API server that knows thuban-observe in the namespace `net`, and makes the tokens
/// `secret-1`, `secret-2` and so on.
fn api_server(ca: &str) -> Client {
    let ca = ca.to_owned();
    let tokens = Arc::new(AtomicUsize::new(0));
    played::client(move |Request { path, body, .. }| {
        let answered = match path.as_str() {
            "/api/v1/services" => {
                testing::list_of(&json!([{"metadata": {"name": "thuban-observe", "namespace": "net"}}]))
            }
            "/api/v1/namespaces/net/configmaps/thuban-observe-ca" => {
                let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "thuban-observe-ca"},
                    "data": {"ca.crt": ca}});
                (200, map.to_string())
            }
            "/api/v1/namespaces/red/serviceaccounts/thuban-viewer/token" => {
                let mut made: Value = serde_json::from_slice(&body).unwrap();
                let number = tokens.fetch_add(1, Ordering::Relaxed) + 1;
                made["status"] =
                    json!({"token": format!("secret-{number}"), "expirationTimestamp": testing::now()});
                (201, made.to_string())
            }
            _ => testing::refusal(404, "the played API server has nothing there"),
        };
        future::ready(answered)
    })
}
