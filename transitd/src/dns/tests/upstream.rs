//! Plays the cluster's DNS: answers by a script, over real sockets.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, Metadata, ResponseCode};
use hickory_proto::rr::rdata::{A, CNAME, PTR, SOA, SRV, TXT};
use hickory_proto::rr::{Name, RData, Record};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinHandle;

use super::super::upstream::Transport;
use super::{name, send, take};

/// A query as it came.
pub(super) struct Asked<'a> {
    pub(super) message: &'a Message,
    pub(super) transport: Transport,
    pub(super) client: SocketAddr,
}

/// The messages to send in answer to a query.
pub(super) type Script = Arc<dyn Fn(&Asked<'_>) -> Vec<Vec<u8>> + Send + Sync>;

pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    asked: Arc<Mutex<Vec<(Message, SocketAddr)>>>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Upstream {
    pub(super) async fn start(script: Script) -> Self {
        let (tcp, udp) = loop {
            let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
            if let Ok(udp) = UdpSocket::bind(tcp.local_addr().unwrap()).await {
                break (tcp, udp);
            }
        };
        let asked = Arc::new(Mutex::new(Vec::new()));
        Self {
            address: tcp.local_addr().unwrap(),
            tasks: [
                tokio::spawn(by_udp(udp, Arc::clone(&script), Arc::clone(&asked))),
                tokio::spawn(by_tcp(tcp, script, Arc::clone(&asked))),
            ],
            asked,
        }
    }

    pub(super) fn stop(&self) {
        for task in &self.tasks {
            task.abort();
        }
    }

    /// Returns all queries so far, and where they came from.
    pub(super) fn asked(&self) -> Vec<(Message, SocketAddr)> {
        self.asked.lock().unwrap().clone()
    }
}

type Log = Arc<Mutex<Vec<(Message, SocketAddr)>>>;

fn answers(
    bytes: &[u8],
    transport: Transport,
    client: SocketAddr,
    script: &Script,
    log: &Log,
) -> Vec<Vec<u8>> {
    // Upstream gets proper queries, whatever a pod sent.
    let message = Message::from_vec(bytes).unwrap();
    log.lock().unwrap().push((message.clone(), client));
    script(&Asked {
        message: &message,
        transport,
        client,
    })
}

async fn by_udp(socket: UdpSocket, script: Script, log: Log) {
    let mut buffer = vec![0; 65536];
    loop {
        let (length, client) = socket.recv_from(&mut buffer).await.unwrap();
        for answer in answers(&buffer[..length], Transport::Udp, client, &script, &log) {
            let _ = socket.send_to(&answer, client).await;
        }
    }
}

async fn by_tcp(listener: TcpListener, script: Script, log: Log) {
    loop {
        let (stream, client) = listener.accept().await.unwrap();
        tokio::spawn(converse(stream, client, Arc::clone(&script), Arc::clone(&log)));
    }
}

async fn converse(mut stream: TcpStream, client: SocketAddr, script: Script, log: Log) {
    while let Some(bytes) = take(&mut stream).await {
        for answer in answers(&bytes, Transport::Tcp, client, &script, &log) {
            send(&mut stream, &answer).await;
        }
    }
}

/// Returns an answer to `query` with these records.
pub(super) fn reply(query: &Message, answers: Vec<Record>) -> Message {
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    message.metadata = Metadata::response_from_request(&query.metadata);
    message.metadata.authoritative = true;
    message.queries.clone_from(&query.queries);
    message.edns.clone_from(&query.edns);
    message.answers = answers;
    message
}

pub(super) fn record(owner: &str, data: RData) -> Record {
    Record::from_rdata(name(owner), 30, data)
}

pub(super) fn a(owner: &str, last: u8) -> Record {
    record(owner, RData::A(A(Ipv4Addr::new(10, 96, 0, last))))
}

pub(super) fn alias(owner: &str, target: &str) -> Record {
    record(owner, RData::CNAME(CNAME(name(target))))
}

pub(super) fn ptr(owner: &str, target: &str) -> Record {
    record(owner, RData::PTR(PTR(name(target))))
}

pub(super) fn srv(owner: &str, target: &str) -> Record {
    record(owner, RData::SRV(SRV::new(0, 50, 80, name(target))))
}

/// Returns NXDOMAIN or NODATA as CoreDNS makes it, with another serial number than ours.
pub(super) fn negative(query: &Message, code: ResponseCode) -> Message {
    let mut message = reply(query, Vec::new());
    message.metadata.response_code = code;
    let soa = SOA::new(
        name("ns.dns.cluster.local."),
        name("hostmaster.cluster.local."),
        1_750_000_000,
        7200,
        1800,
        86400,
        30,
    );
    message
        .authorities
        .push(Record::from_rdata(name("cluster.local."), 30, RData::SOA(soa)));
    message
}

/// Returns the script of a cluster: Services `red/web`, `red/big` with much text, `blue/shared`; names outside that
/// begin with `www`.
pub(super) fn cluster() -> Script {
    Arc::new(|asked: &Asked<'_>| {
        let query = asked.message;
        let owner = query.queries[0].name.to_ascii();
        let is = |what: &[&str]| {
            what.iter()
                .any(|part| owner.to_ascii_lowercase().starts_with(part))
        };
        let answer = if is(&["web.red.svc", "shared.blue.svc", "web.blue.svc", "www."]) {
            // The address doesn't depend on the text of a name, which may be any bytes.
            let data = RData::A(A(Ipv4Addr::new(10, 96, 0, 7)));
            reply(
                query,
                vec![Record::from_rdata(query.queries[0].name.clone(), 30, data)],
            )
        } else if is(&["big.red.svc"]) {
            big(query, &owner)
        } else {
            negative(query, ResponseCode::NXDomain)
        };
        vec![answer.to_vec().unwrap()]
    })
}

/// Returns an answer of 1500 bytes and more, whatever room there is.
fn big(query: &Message, owner: &str) -> Message {
    let text = |part: u8| RData::TXT(TXT::new(vec![format!("{part}").repeat(100)]));
    reply(query, (10..26).map(|part| record(owner, text(part))).collect())
}

/// Makes a script that is the same for all queries.
pub(super) fn always(make: impl Fn(&Message, &str) -> Message + Send + Sync + 'static) -> Script {
    Arc::new(move |asked: &Asked<'_>| {
        let owner: &Name = &asked.message.queries[0].name;
        vec![make(asked.message, &owner.to_ascii()).to_vec().unwrap()]
    })
}
