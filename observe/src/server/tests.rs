//! Tests of the real server on loopback: droplets and readers at one port, with an API server that reviews tokens.

use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use kube::Client;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::{Value, json};
use thuban_authority::Ca;
use thuban_client::played;
use thuban_proto::observe::observe_client::ObserveClient;
use thuban_proto::observe::{Acknowledged, FlowMode, Report};
use thuban_proto::{OBSERVE_TLS_NAME, OBSERVE_TOKEN_AUDIENCE};
use thuban_telemetry::access::Access;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic::{Code, Status, Streaming};

use super::*;
use crate::api;
use crate::relay::Relay;
use crate::relay::tests::relay;
use crate::reports::Reports;
use crate::reports::validation::Mode;
use crate::reports::validation::tests::told;

/// How long a test waits at most, on any machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

fn token(node: &str, account: &str) -> String {
    let claims = json!({
        "aud": [OBSERVE_TOKEN_AUDIENCE],
        "sub": format!("system:serviceaccount:thuban-system:{account}"),
        "exp": 1_u64 << 40,
        "kubernetes.io": {"pod": {"uid": "u"}, "node": {"name": node}},
    });
    format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims.to_string()))
}

/// An API server that believes every token's claims, and lets the reader `red` read its namespace.
fn client() -> Client {
    played::client(|request| {
        let mut review: Value = serde_json::from_slice(&request.body).unwrap();
        review["status"] = if request.path.ends_with("/tokenreviews") {
            let token = review["spec"]["token"].as_str().unwrap();
            let user = match token.split('.').nth(1) {
                Some(claims) => {
                    let claims: Value =
                        serde_json::from_slice(&URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap();
                    json!({"username": claims["sub"], "extra": {
                        "authentication.kubernetes.io/node-name": [claims["kubernetes.io"]["node"]["name"]],
                        "authentication.kubernetes.io/pod-uid": ["u"],
                    }})
                }
                None => json!({"username": token}),
            };
            json!({"authenticated": true, "audiences": review["spec"]["audiences"], "user": user})
        } else {
            json!({"allowed": review["spec"]["user"] == "red"})
        };
        std::future::ready((200, review.to_string()))
    })
}

struct Rig {
    relay: Arc<Relay>,
    address: SocketAddr,
    /// The CA as PEM.
    ca: String,
}

impl Rig {
    async fn start() -> Self {
        // Another test of this process may have installed it first.
        let _ = ring::default_provider().install_default();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let ca = Ca::make("thuban-observe-ca", now.as_secs()).unwrap();
        let certificate = Arc::new(ServerCertificate::new(ca.sign(OBSERVE_TLS_NAME).unwrap()));
        let relay = relay();
        let access = Access::new(Some(client()), Some(OBSERVE_TOKEN_AUDIENCE));
        let router = Routes::from(api::router(relay.clone(), access))
            .add_service(Reports::service(relay.clone(), client()))
            .into_axum_router();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(Server::new(certificate, router).unwrap().accept(listener));
        Self {
            relay,
            address,
            ca: ca.certificate,
        }
    }

    /// Dials as a droplet does. Returns its acknowledgements, and what reports go to.
    async fn dial(
        &self,
        named: &str,
        token: &str,
    ) -> Result<(Streaming<Acknowledged>, mpsc::Sender<Report>), Status> {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.ca))
            .domain_name(OBSERVE_TLS_NAME);
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address)).unwrap();
        let channel = endpoint.tls_config(tls).unwrap().connect().await.unwrap();
        let (sender, receiver) = mpsc::channel(8);
        let first = Report {
            droplet: named.to_owned(),
            mode: FlowMode::All.into(),
            ..Report::default()
        };
        sender.send(first).await.unwrap();
        let mut request = tonic::Request::new(ReceiverStream::new(receiver));
        let bearer = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", bearer);
        let acknowledged = ObserveClient::new(channel).report(request).await?.into_inner();
        Ok((acknowledged, sender))
    }

    /// Asks as a reader does, by HTTP/1.1.
    async fn ask(&self, path: &str, token: &str) -> String {
        let mut roots = RootCertStore::empty();
        roots
            .add(CertificateDer::from_pem_slice(self.ca.as_bytes()).unwrap())
            .unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let stream = TcpStream::connect(self.address).await.unwrap();
        let name = ServerName::try_from(OBSERVE_TLS_NAME).unwrap();
        let mut stream = TlsConnector::from(Arc::new(config))
            .connect(name, stream)
            .await
            .unwrap();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let _ = timeout(WAIT_TIMEOUT, stream.read_to_end(&mut answer))
            .await
            .unwrap();
        String::from_utf8(answer).unwrap()
    }
}

async fn acknowledged(stream: &mut Streaming<Acknowledged>) -> Result<Option<u64>, Status> {
    let answer = timeout(WAIT_TIMEOUT, stream.message()).await.unwrap()?;
    Ok(answer.map(|answer| answer.reports))
}

#[tokio::test]
async fn droplets_and_readers_are_served_at_one_port() {
    let rig = Rig::start().await;
    let (mut stream, sender) = rig.dial("node-a", &token("node-a", "transitd")).await.unwrap();
    assert_eq!(acknowledged(&mut stream).await.unwrap(), Some(1));
    let report = Report {
        flows: vec![told()],
        mode: FlowMode::All.into(),
        ..Report::default()
    };
    sender.send(report).await.unwrap();
    assert_eq!(acknowledged(&mut stream).await.unwrap(), Some(2));
    assert_eq!(rig.relay.droplets.mode("node-a"), Some(Mode::All));
    let answer = rig.ask("/v1/flows?namespace=red", "red").await;
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    assert!(answer.contains("web-0") && !answer.contains("blue"), "{answer}");
    let refused = rig.ask("/v1/flows?namespace=red", "stranger").await;
    assert!(refused.starts_with("HTTP/1.1 403 "), "{refused}");
}

#[tokio::test]
async fn a_newer_stream_of_a_droplet_ends_the_former() {
    let rig = Rig::start().await;
    let token = token("node-a", "transitd");
    let (mut former, _former_sender) = rig.dial("node-a", &token).await.unwrap();
    assert_eq!(acknowledged(&mut former).await.unwrap(), Some(1));
    let (mut newer, _newer_sender) = rig.dial("node-a", &token).await.unwrap();
    assert_eq!(acknowledged(&mut newer).await.unwrap(), Some(1));
    let end = acknowledged(&mut former).await.unwrap_err();
    assert_eq!(end.code(), Code::Aborted);
    assert_eq!(rig.relay.droplets.count(), 1);
}

#[tokio::test]
async fn only_a_nodes_own_transitd_reports() {
    let rig = Rig::start().await;
    for (named, token, code) in [
        ("node-b", token("node-a", "transitd"), Code::PermissionDenied),
        ("node-a", token("node-a", "other"), Code::PermissionDenied),
        ("node-a", "nonsense".to_owned(), Code::Unauthenticated),
    ] {
        let refused = rig.dial(named, &token).await.map(|_| ()).unwrap_err();
        assert_eq!(refused.code(), code, "{named} {refused}");
    }
    assert_eq!(rig.relay.droplets.count(), 0);
}
