//! Tests the server on loopback sockets, between clients and the test's upstream, with real messages on both sides.

mod bounds;
mod hostile;
mod serving;
mod upstream;
mod visibility;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::{Message, Query};
use hickory_proto::rr::{Name, RData, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream, UdpSocket};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use thuban_rows::{ServiceName, Visible};

use super::{Asker, Domain, Limits, Server, Settings, View};
use crate::metrics::{DnsMetrics, DnsResult};
use upstream::{Script, Upstream};

/// The timeout for what must come. Tests depend on nothing but that it comes.
const AGES: Duration = Duration::from_secs(20);

/// A pod of VPC 1, which sees namespace `red` without `red/moved`, and `blue/shared`.
const RED: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));
/// A pod of VPC 2, which sees namespace `blue`.
const BLUE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3));
/// Another pod of VPC 1.
const RED_TOO: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 4));
/// Returns a pod of another VPC, which sees the same names as red.
fn neighbour(vpc: u8, pod: u8) -> IpAddr {
    Ipv4Addr::new(127, 1, vpc, 1 + pod).into()
}

/// The address of no pod.
const STRANGER: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 9));

fn red() -> View {
    let visible = Visible {
        namespaces: ["red".into()].into(),
        services: [ServiceName::new("blue", "shared")].into(),
        hidden: [ServiceName::new("red", "moved")].into(),
    };
    View::new(Domain::parse("cluster.local").unwrap(), visible)
}

fn blue() -> View {
    let visible = Visible {
        namespaces: ["blue".into()].into(),
        ..Visible::default()
    };
    View::new(Domain::parse("cluster.local").unwrap(), visible)
}

struct Rig {
    address: SocketAddr,
    upstream: Upstream,
    metrics: DnsMetrics,
    server: JoinHandle<()>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Rig {
    async fn new(script: Script) -> Self {
        Self::with_limits(script, Limits::default()).await
    }

    async fn with_limits(script: Script, limits: Limits) -> Self {
        let upstream = Upstream::start(script).await;
        let address = upstream.address;
        Self::before(upstream, address, limits)
    }

    /// Starts a server before `upstream` that asks `address`, wherever that is.
    fn before(upstream: Upstream, address: SocketAddr, limits: Limits) -> Self {
        let (red, blue) = (Arc::new(red()), Arc::new(blue()));
        let views = move |source: IpAddr| {
            let (vpc, view) = match source {
                RED | RED_TOO => (1, &red),
                BLUE => (2, &blue),
                IpAddr::V4(address) if address.octets()[..2] == [127, 1] => {
                    (10 + u32::from(address.octets()[2]), &red)
                }
                _ => return None,
            };
            let view = Arc::clone(view);
            Some(Asker { vpc, view })
        };
        let metrics = DnsMetrics::default();
        let server = loop {
            let settings = Settings {
                limits,
                metrics: metrics.clone(),
                ..Settings::new(vec!["127.0.0.1:0".parse().unwrap()], address)
            };
            // A port free for TCP may be taken for UDP.
            if let Ok(server) = Server::bind(settings, views.clone()) {
                break server;
            }
        };
        let address = server.local_addresses().next().unwrap();
        Self {
            address,
            upstream,
            metrics,
            server: tokio::spawn(server.serve(std::future::pending())),
        }
    }

    async fn udp(&self, source: IpAddr) -> UdpSocket {
        let socket = UdpSocket::bind((source, 0)).await.unwrap();
        socket.connect(self.address).await.unwrap();
        socket
    }

    async fn tcp(&self, source: IpAddr) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((source, 0).into()).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    /// Sends `bytes` by UDP and returns the answer.
    async fn raw(&self, source: IpAddr, bytes: &[u8]) -> Vec<u8> {
        let socket = self.udp(source).await;
        socket.send(bytes).await.unwrap();
        receive(&socket).await
    }

    async fn ask(&self, source: IpAddr, query: &Message) -> Message {
        Message::from_vec(&self.raw(source, &query.to_vec().unwrap()).await).unwrap()
    }

    async fn ask_by_tcp(&self, source: IpAddr, query: &Message) -> Message {
        let mut stream = self.tcp(source).await;
        send(&mut stream, &query.to_vec().unwrap()).await;
        Message::from_vec(&take(&mut stream).await.unwrap()).unwrap()
    }

    /// Waits until so many queries ended with this result.
    async fn counts(&self, result: DnsResult, expected: u64) {
        eventually(
            || self.metrics.count(result) == expected,
            || format!("{result:?}: {} of {expected}", self.metrics.count(result)),
        )
        .await;
    }

    async fn assert_serves(&self, source: IpAddr, asked: &str) {
        let answer = self.ask(source, &query(asked, RecordType::A)).await;
        assert_eq!(answer.answers.len(), 1, "{answer}");
    }
}

async fn eventually(is_so: impl Fn() -> bool, otherwise: impl Fn() -> String) {
    let wait = async {
        while !is_so() {
            sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(timeout(AGES, wait).await.is_ok(), "{}", otherwise());
}

async fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = vec![0; 65536];
    let length = timeout(AGES, socket.recv(&mut buffer))
        .await
        .expect("an answer")
        .unwrap();
    buffer.truncate(length);
    buffer
}

async fn send(stream: &mut TcpStream, message: &[u8]) {
    let mut bytes = u16::try_from(message.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend(message);
    stream.write_all(&bytes).await.unwrap();
}

/// Returns a message, or `None` when the server hung up.
async fn take(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let read = async {
        let length = stream.read_u16().await.ok()?;
        let mut bytes = vec![0; usize::from(length)];
        stream.read_exact(&mut bytes).await.ok()?;
        Some(bytes)
    };
    timeout(AGES, read).await.expect("an answer or an end")
}

fn name(text: &str) -> Name {
    Name::from_ascii(text).unwrap()
}

/// Makes a query as a pod's resolver does.
fn query(asked: &str, record_type: RecordType) -> Message {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.queries.push(Query::query(name(asked), record_type));
    message
}

fn in_cluster(asked: &str) -> String {
    format!("{asked}.cluster.local.")
}

/// Returns the data of answers, in their order, as text.
fn data(message: &Message) -> Vec<String> {
    message
        .answers
        .iter()
        .map(|record| record.data.to_string())
        .collect()
}

fn has_soa(message: &Message) -> bool {
    matches!(
        &message.authorities[..],
        [record] if matches!(&record.data, RData::SOA(soa) if soa.minimum == 5 && record.ttl == 5)
    )
}
