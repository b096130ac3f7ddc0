//! Tests of the real server on loopback, with an API server that only reviews tokens: which callers it admits, and what
//! the others cost it.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http_body_util::BodyExt;
use ipnet::IpNet;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use thuban_authority::{Ca, ServerCertificate};
use thuban_proto::transit::transit_client::TransitClient;
use thuban_proto::transit::{DropletMessage, Hello, OperatorMessage, droplet_message};
use thuban_proto::{OPERATOR_TLS_NAME, OPERATOR_TOKEN_AUDIENCE, PROTOCOL_VERSION};
use tokio::io::AsyncReadExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{sleep, timeout};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};
use tonic::{Code, Request, Status, Streaming};

use super::door::{Door, Limits};
use super::server::{TransitService, serve_at};
use crate::hub::{Hub, Triggers};

const NODE: [u8; 4] = [127, 0, 0, 1];
const STRANGER: [u8; 4] = [127, 0, 0, 2];
/// How long a test waits at most, on any machine.
const WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// An API server that answers slowly, and knows forged tokens by their signature.
#[derive(Default)]
struct Reviews {
    all: AtomicUsize,
    under_way: AtomicUsize,
    most: AtomicUsize,
}

fn claims(token: &str) -> Value {
    let claims = URL_SAFE_NO_PAD.decode(token.split('.').nth(1).unwrap()).unwrap();
    serde_json::from_slice(&claims).unwrap()
}

async fn review(reviews: Arc<Reviews>, request: http::Request<Body>) -> http::Response<Body> {
    let bytes = request.into_body().collect().await.unwrap().to_bytes();
    let mut review: Value = serde_json::from_slice(&bytes).unwrap();
    let token = review["spec"]["token"].as_str().unwrap().to_owned();
    reviews.all.fetch_add(1, Relaxed);
    let under_way = reviews.under_way.fetch_add(1, Relaxed) + 1;
    reviews.most.fetch_max(under_way, Relaxed);
    sleep(Duration::from_millis(20)).await;
    reviews.under_way.fetch_sub(1, Relaxed);
    let claims = claims(&token);
    review["status"] = json!({
        "authenticated": !token.ends_with(".forged"),
        "audiences": claims["aud"],
        "user": {"username": claims["sub"], "extra": {
            "authentication.kubernetes.io/node-name": [claims["kubernetes.io"]["node"]["name"]],
            "authentication.kubernetes.io/pod-uid": ["u"],
        }},
    });
    http::Response::new(Body::from(review.to_string().into_bytes()))
}

fn token(node: &str, user: &str, signature: &str) -> String {
    let claims = json!({
        "aud": [OPERATOR_TOKEN_AUDIENCE],
        "sub": format!("system:serviceaccount:thuban-system:{user}"),
        "exp": 1_u64 << 40,
        "kubernetes.io": {"pod": {"uid": "u"}, "node": {"name": node}},
    });
    format!("e30.{}.{signature}", URL_SAFE_NO_PAD.encode(claims.to_string()))
}

/// Makes a CA that is valid now.
fn ca() -> Ca {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Ca::make("thuban-operator-ca", now.as_secs()).unwrap()
}

fn hub() -> Hub {
    let hub = Hub::new(3, Triggers::default());
    hub.set_node_addresses(BTreeSet::from([NODE.into()]));
    hub
}

struct Operator {
    address: SocketAddr,
    /// The bundle that droplets have.
    ca: String,
    certificate: Arc<ServerCertificate>,
    door: Arc<Door>,
    reviews: Arc<Reviews>,
    hub: watch::Sender<Option<Arc<Hub>>>,
    _outranked: mpsc::Receiver<u64>,
}

impl Operator {
    async fn start(hub: Option<Hub>, sources: &[&str], limits: Limits) -> Self {
        // Another test of this process may have installed it first.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let reviews = Arc::new(Reviews::default());
        let counted = reviews.clone();
        let api = tower::service_fn(move |request: http::Request<Body>| {
            let counted = counted.clone();
            async move { Ok::<_, std::convert::Infallible>(review(counted, request).await) }
        });
        let (started, hub) = watch::channel(hub.map(Arc::new));
        let (outranked, higher) = mpsc::channel(1);
        let sources: Vec<IpNet> = sources.iter().map(|range| range.parse().unwrap()).collect();
        let door = Door::new(hub.clone(), sources, limits);
        let service = TransitService {
            door: door.clone(),
            hub,
            client: Client::new(api, "default"),
            outranked,
            witnesses: std::sync::Mutex::default(),
        };
        // The listener takes all of loopback.
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let address = SocketAddr::from((NODE, listener.local_addr().unwrap().port()));
        let ca = ca();
        let certificate = Arc::new(ServerCertificate::new(ca.sign(OPERATOR_TLS_NAME).unwrap()));
        tokio::spawn(serve_at(listener, address, certificate.clone(), service));
        Self {
            address,
            ca: ca.certificate,
            certificate,
            door,
            reviews,
            hub: started,
            _outranked: higher,
        }
    }

    /// Dials as a droplet does, and returns its stream with the channel that keeps it open.
    async fn dial(
        &self,
        node: &str,
        token: &str,
    ) -> Result<(Streaming<OperatorMessage>, mpsc::Sender<DropletMessage>), Status> {
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&self.ca))
            .domain_name(OPERATOR_TLS_NAME);
        let endpoint = Endpoint::from_shared(format!("https://{}", self.address)).unwrap();
        let channel = endpoint.tls_config(tls).unwrap().connect().await;
        let channel = channel.map_err(|error| Status::unavailable(error.to_string()))?;
        let hello = Hello {
            protocol_version: PROTOCOL_VERSION,
            droplet: node.to_owned(),
            ..Hello::default()
        };
        let (sender, receiver) = mpsc::channel(1);
        let message = Some(droplet_message::Message::Hello(hello));
        sender.send(DropletMessage { message }).await.unwrap();
        let mut request = Request::new(tokio_stream::wrappers::ReceiverStream::new(receiver));
        let bearer = format!("Bearer {token}").parse().unwrap();
        request.metadata_mut().insert("authorization", bearer);
        let stream = TransitClient::new(channel).connect(request).await?.into_inner();
        Ok((stream, sender))
    }

    /// Dials until the droplet gets its program, however often that takes.
    async fn droplet(&self, node: &str) -> (Streaming<OperatorMessage>, mpsc::Sender<DropletMessage>) {
        let dial = async {
            loop {
                if let Ok((mut stream, sender)) = self.dial(node, &token(node, "transitd", "right")).await
                    && let Ok(Some(_)) = stream.message().await
                {
                    return (stream, sender);
                }
                sleep(Duration::from_millis(50)).await;
            }
        };
        timeout(WAIT_TIMEOUT, dial)
            .await
            .expect("the droplet gets no program")
    }

    /// Opens a connection from this address, with a port of pods' or any other.
    async fn connect(&self, from: [u8; 4], port: u16) -> std::io::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        socket.bind(SocketAddr::from((from, port)))?;
        socket.connect(self.address).await
    }

    async fn until(&self, what: &str, is_so: impl Fn((usize, usize)) -> bool) {
        let look = async {
            while !is_so(self.door.counts()) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        let found = timeout(WAIT_TIMEOUT, look).await;
        assert!(found.is_ok(), "{what}: {:?} are held", self.door.counts());
    }
}

/// Waits until the server ends a connection that says nothing.
async fn is_ended(connection: &mut TcpStream) {
    let read = timeout(WAIT_TIMEOUT, connection.read(&mut [0; 16])).await;
    assert!(matches!(read.expect("it is left open"), Ok(0) | Err(_)));
}

fn patient(milliseconds: u64) -> Limits {
    Limits {
        patience: Duration::from_millis(milliseconds),
        ..Limits::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_thousand_silent_connections_keep_no_droplet_out() {
    let limits = Limits::default();
    let operator = Operator::start(Some(hub()), &[], limits).await;
    let mut silent = Vec::new();
    for number in 0..1000 {
        // Pods of the node and its own processes dial.
        for port in [10_000 + number, 0] {
            if let Ok(connection) = operator.connect(NODE, port).await {
                silent.push(connection);
            }
        }
    }
    assert!(silent.len() > 1800, "{} connections", silent.len());
    let (held, waiting) = operator.door.counts();
    assert!(held <= limits.of_place * 2 && waiting == held, "{held} are held");
    let (_stream, _sender) = operator.droplet("node-a").await;
    operator
        .until("it is one among few", |(held, waiting)| {
            held <= limits.of_place * 2 + 1 && waiting == held - 1
        })
        .await;
    // Later callers from the droplet's own place don't take its connection.
    for _ in 0..limits.of_place * 2 {
        silent.push(operator.connect(NODE, 0).await.unwrap());
    }
    operator
        .until("it is served on", |(held, waiting)| waiting == held - 1)
        .await;
}

#[tokio::test]
async fn only_nodes_and_listed_sources_may_dial() {
    // Nobody is ended for being late.
    let operator = Operator::start(Some(hub()), &[], patient(600_000)).await;
    is_ended(&mut operator.connect(STRANGER, 0).await.unwrap()).await;
    assert_eq!(operator.door.counts(), (0, 0));
    let _node = operator.connect(NODE, 0).await.unwrap();
    operator
        .until("the node is let in", |counts| counts == (1, 1))
        .await;
    let operator = Operator::start(Some(hub()), &["127.0.0.2/32"], Limits::default()).await;
    let _listed = operator.connect(STRANGER, 0).await.unwrap();
    operator
        .until("the source is let in", |counts| counts == (1, 1))
        .await;
}

#[tokio::test]
async fn before_nodes_are_known_the_bounds_hold_for_all() {
    let limits = Limits {
        of_place: 4,
        total: 6,
        ..Limits::default()
    };
    let operator = Operator::start(None, &[], limits).await;
    let mut silent = Vec::new();
    for from in [NODE, STRANGER, [127, 0, 0, 3]] {
        for _ in 0..10 {
            silent.push(operator.connect(from, 0).await.unwrap());
        }
    }
    let mut last = operator.connect([127, 0, 0, 4], 0).await.unwrap();
    operator
        .until("no more than the bound are held", |counts| counts == (6, 6))
        .await;
    // The newest connection is among them.
    let read = timeout(Duration::from_millis(200), last.read(&mut [0; 16])).await;
    assert!(read.is_err(), "{read:?}");
}

#[tokio::test]
async fn who_proves_nothing_is_ended_and_a_droplet_is_not() {
    let operator = Operator::start(Some(hub()), &[], patient(1000)).await;
    let (_stream, _sender) = operator.droplet("node-a").await;
    let mut silent = operator.connect(NODE, 0).await.unwrap();
    is_ended(&mut silent).await;
    operator
        .until("the droplet alone is left", |counts| counts == (1, 0))
        .await;
}

#[tokio::test]
async fn a_proven_droplet_is_answered_before_rows_are_known() {
    let operator = Operator::start(None, &[], patient(500)).await;
    let right = token("node-a", "transitd", "right");
    let dialled = timeout(WAIT_TIMEOUT, operator.dial("node-a", &right)).await;
    let (mut stream, _sender) = dialled.expect("no answer").unwrap();
    let read = timeout(Duration::from_secs(2), stream.message()).await;
    assert!(read.is_err(), "it waits, and is not late: {read:?}");
    let left = operator
        .dial("node-b", &token("node-b", "transitd", "right"))
        .await;
    drop(left.unwrap());
    operator
        .until("who went away is not held", |counts| counts == (1, 0))
        .await;
    operator.hub.send_replace(Some(Arc::new(hub())));
    let program = timeout(WAIT_TIMEOUT, stream.message()).await.expect("no program");
    assert!(program.unwrap().is_some());
}

#[tokio::test]
async fn a_droplet_has_one_connection() {
    let operator = Operator::start(Some(hub()), &[], patient(1000)).await;
    let (mut former, _first) = operator.droplet("node-a").await;
    let (_stream, _second) = operator.droplet("node-a").await;
    let end = async { while let Ok(Some(_)) = former.message().await {} };
    timeout(WAIT_TIMEOUT, end)
        .await
        .expect("the former stream goes on");
    operator
        .until("its former connection is ended", |counts| counts == (1, 0))
        .await;
    let (_other, _third) = operator.droplet("node-b").await;
    operator
        .until("another droplet has its own", |counts| counts == (2, 0))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_are_reviewed_one_at_a_time_of_a_place_and_few_of_all() {
    for (sources, most) in [(&[][..], 1), (&["127.0.0.0/8"][..], 4)] {
        let limits = Limits {
            reviews: 4,
            of_place: 64,
            ..Limits::default()
        };
        let operator = Operator::start(Some(hub()), sources, limits).await;
        let forged = token("node-a", "transitd", "forged");
        let dials = (0..12).map(|_| operator.dial("node-a", &forged));
        for answer in futures::future::join_all(dials).await {
            let refused = answer.expect_err("a forged token is let in");
            assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
        }
        assert_eq!(operator.reviews.all.load(Relaxed), 12);
        let at_a_time = operator.reviews.most.load(Relaxed);
        assert!(at_a_time <= most, "{at_a_time} at a time");
    }
}

#[tokio::test]
async fn a_token_of_another_costs_no_review() {
    let operator = Operator::start(Some(hub()), &[], Limits::default()).await;
    let anothers = token("node-a", "default", "right");
    let refused = operator
        .dial("node-a", &anothers)
        .await
        .expect_err("it is let in");
    assert_eq!(refused.code(), Code::PermissionDenied, "{refused}");
    let refused = operator
        .dial("node-a", "not.a.token")
        .await
        .expect_err("it is let in");
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert_eq!(operator.reviews.all.load(Relaxed), 0);
}

/// Dials with each bundle, and returns whether the droplet believes the operator.
async fn believes(operator: &mut Operator, bundles: &[&[&Ca]]) -> Vec<bool> {
    let mut believed = Vec::new();
    for bundle in bundles {
        operator.ca = bundle.iter().map(|ca| ca.certificate.as_str()).collect();
        let dialled = operator
            .dial("node-b", &token("node-b", "transitd", "right"))
            .await;
        believed.push(dialled.is_ok());
    }
    believed
}

#[tokio::test]
async fn droplets_follow_the_ca_and_open_streams_go_on() {
    let mut operator = Operator::start(Some(hub()), &[], Limits::default()).await;
    let [old, new] = [ca(), ca()];
    operator
        .certificate
        .exchange(old.sign(OPERATOR_TLS_NAME).unwrap());
    let bundles: [&[&Ca]; 4] = [&[&old], &[&old, &new], &[&new, &old], &[&new]];
    let before = believes(&mut operator, &bundles).await;
    assert_eq!(before, [true, true, true, false], "the old CA signs");
    operator.ca.clone_from(&old.certificate);
    let (mut stream, _sender) = operator.droplet("node-a").await;
    operator
        .certificate
        .exchange(new.sign(OPERATOR_TLS_NAME).unwrap());
    let after = believes(&mut operator, &bundles).await;
    assert_eq!(after, [false, true, true, true], "the new CA signs");
    let read = timeout(Duration::from_millis(500), stream.message()).await;
    assert!(read.is_err(), "the open stream ends: {read:?}");
}
