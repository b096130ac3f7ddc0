//! Tests with servers on loopback.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::Request;
use kube::{Client, Config};
use rustls::ServerConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use thuban_authority::{Ca, ServerCertificate};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::client_of;

/// What a server does with a request that it has read.
#[derive(Clone, Copy, Debug)]
enum Answer {
    Yes,
    /// It closes the connection.
    Nothing,
    /// It leaves the connection open.
    Never,
    /// An error of its own.
    Error,
    /// It has no room for the request for a minute, in the API server's words.
    Busy,
}

/// What each request has.
const BODY: &[u8] = b"body";

/// A server on loopback.
struct Server {
    address: SocketAddr,
    /// How many requests it has read.
    requests: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Server {
    async fn start(address: SocketAddr, answer: Answer) -> Self {
        Self::listen(TcpListener::bind(address).await.unwrap(), answer, None)
    }

    /// Starts a server that shows a certificate of this CA, for a host of this name.
    async fn tls(ca: &Ca, host: &str) -> Self {
        let certificate = ServerCertificate::new(ca.sign(host).unwrap());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(certificate));
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind(any_port()).await.unwrap();
        Self::listen(listener, Answer::Yes, Some(acceptor))
    }

    fn listen(listener: TcpListener, answer: Answer, tls: Option<TlsAcceptor>) -> Self {
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(AtomicUsize::new(0));
        let count = requests.clone();
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(connection(stream, answer, tls.clone(), count.clone()));
            }
        });
        Self {
            address,
            requests,
            task,
        }
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    /// Returns when nobody listens any more.
    async fn stop(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

async fn connection(stream: TcpStream, answer: Answer, tls: Option<TlsAcceptor>, requests: Arc<AtomicUsize>) {
    match tls {
        None => serve(stream, answer, &requests).await,
        Some(acceptor) => {
            if let Ok(stream) = acceptor.accept(stream).await {
                serve(stream, answer, &requests).await;
            }
        }
    }
}

/// Serves one request of a connection, and closes that, so that no client keeps it for the next request.
async fn serve(mut stream: impl AsyncRead + AsyncWrite + Unpin, answer: Answer, requests: &AtomicUsize) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match stream.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let mut body = [0; BODY.len()];
    if stream.read_exact(&mut body).await.is_err() {
        return;
    }
    requests.fetch_add(1, Ordering::Relaxed);
    match answer {
        Answer::Yes => {
            let text = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}";
            let _ = stream.write_all(text).await;
            let _ = stream.shutdown().await;
        }
        Answer::Error => {
            let text =
                b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}";
            let _ = stream.write_all(text).await;
            let _ = stream.shutdown().await;
        }
        Answer::Busy => {
            let text = b"HTTP/1.1 429 Too Many Requests\r\nConnection: close\r\nContent-Type: text/plain\r\n\
                Retry-After: 60\r\nContent-Length: 18\r\n\r\nToo many requests\n";
            let _ = stream.write_all(text).await;
            let _ = stream.shutdown().await;
        }
        Answer::Nothing => {}
        Answer::Never => std::future::pending().await,
    }
}

fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Returns an address of which nobody answers.
async fn nobody() -> SocketAddr {
    let listener = TcpListener::bind(any_port()).await.unwrap();
    listener.local_addr().unwrap()
}

/// Makes a client that trusts these CAs.
fn client(scheme: &str, servers: &[SocketAddr], trusted: &[&Ca]) -> Client {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let root = |ca: &&Ca| {
        let root = CertificateDer::from_pem_slice(ca.certificate.as_bytes());
        root.unwrap().to_vec()
    };
    let config = |server: &SocketAddr| {
        let mut config = Config::new(format!("{scheme}://{server}").parse().unwrap());
        config.root_cert = Some(trusted.iter().map(root).collect());
        config
    };
    client_of(servers.iter().map(config).collect()).unwrap()
}

async fn ask(client: &Client) -> Result<String, kube::Error> {
    let request = Request::post("/version").body(BODY.to_vec()).unwrap();
    client.request_text(request).await
}

fn ca() -> Ca {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    Ca::make("kubernetes", now.as_secs()).unwrap()
}

#[tokio::test]
async fn servers_that_refuse_are_passed_over_until_they_return() {
    let (first, second) = (nobody().await, nobody().await);
    let third = Server::start(any_port(), Answer::Yes).await;
    let client = client("http", &[first, second, third.address], &[]);
    for requests in 1..4 {
        assert_eq!(ask(&client).await.unwrap(), "{}");
        assert_eq!(third.requests(), requests);
    }
    let address = third.address;
    third.stop().await;
    let first = Server::start(first, Answer::Yes).await;
    assert_eq!(ask(&client).await.unwrap(), "{}");
    let third = Server::start(address, Answer::Yes).await;
    assert_eq!(ask(&client).await.unwrap(), "{}");
    // The last server that worked is the one that is asked.
    assert_eq!((first.requests(), third.requests()), (2, 0));
    first.stop().await;
    third.stop().await;
    assert!(ask(&client).await.is_err(), "nobody is there");
}

#[tokio::test]
async fn servers_are_asked_only_with_a_certificate_for_their_host() {
    let (own, other) = (ca(), ca());
    let foreign = Server::tls(&other, "127.0.0.1").await;
    let misnamed = Server::tls(&own, "127.0.0.2").await;
    let silent = TcpListener::bind(any_port()).await.unwrap();
    let unfit = [foreign.address, misnamed.address, silent.local_addr().unwrap()];
    assert!(ask(&client("https", &unfit, &[&own])).await.is_err());
    let fit = Server::tls(&own, "127.0.0.1").await;
    let all = [&unfit[..], &[fit.address]].concat();
    assert_eq!(ask(&client("https", &all, &[&own])).await.unwrap(), "{}");
    assert_eq!(
        (foreign.requests(), misnamed.requests(), fit.requests()),
        (0, 0, 1)
    );
}

#[tokio::test]
async fn a_request_that_may_have_arrived_is_sent_once() {
    let first = Server::start(any_port(), Answer::Nothing).await;
    let second = Server::start(any_port(), Answer::Yes).await;
    let client = client("http", &[first.address, second.address], &[]);
    assert!(ask(&client).await.is_err());
    assert_eq!((first.requests(), second.requests()), (1, 0));
    assert_eq!(ask(&client).await.unwrap(), "{}");
    assert_eq!((first.requests(), second.requests()), (1, 1));
}

#[tokio::test]
async fn a_server_of_which_a_caller_has_had_enough_is_left() {
    let first = Server::start(any_port(), Answer::Never).await;
    let second = Server::start(any_port(), Answer::Yes).await;
    let client = client("http", &[first.address, second.address], &[]);
    assert!(
        timeout(Duration::from_millis(500), ask(&client)).await.is_err(),
        "no answer"
    );
    assert_eq!(ask(&client).await.unwrap(), "{}");
    assert_eq!((first.requests(), second.requests()), (1, 1));
}

#[tokio::test]
async fn a_caller_that_soon_hangs_up_says_nothing_of_a_server() {
    let first = Server::start(any_port(), Answer::Never).await;
    let second = Server::start(any_port(), Answer::Yes).await;
    let client = client("http", &[first.address, second.address], &[]);
    for _ in 0..2 {
        let hung_up = timeout(Duration::from_millis(100), ask(&client)).await;
        assert!(hung_up.is_err(), "no answer");
    }
    assert_eq!((first.requests(), second.requests()), (2, 0));
}

#[tokio::test]
async fn a_server_that_answers_only_errors_is_left() {
    let first = Server::start(any_port(), Answer::Error).await;
    let second = Server::start(any_port(), Answer::Yes).await;
    let client = client("http", &[first.address, second.address], &[]);
    for _ in 0..10 {
        assert!(ask(&client).await.is_err(), "they come at once");
    }
    tokio::time::sleep(Duration::from_millis(2100)).await;
    assert!(ask(&client).await.is_err(), "the last one");
    assert_eq!(ask(&client).await.unwrap(), "{}");
    assert_eq!((first.requests(), second.requests()), (11, 1));
}

#[tokio::test]
async fn a_caller_hears_how_long_a_busy_server_wants_to_be_left() {
    for several in [false, true] {
        let server = Server::start(any_port(), Answer::Busy).await;
        let other = Server::start(any_port(), Answer::Yes).await;
        let servers = [server.address, other.address];
        let client = client("http", &servers[..=usize::from(several)], &[]);
        let Err(kube::Error::Api(status)) = ask(&client).await else {
            panic!("no error");
        };
        assert_eq!((status.code, &*status.message), (429, "Too many requests"));
        let details = status.details.as_ref();
        assert_eq!(details.map(|details| details.retry_after_seconds), Some(60));
        assert_eq!((server.requests(), other.requests()), (1, 0));
    }
}

/// Returns the kernel's timer of the connection to this address, and how long it still runs.
fn timer(server: SocketAddr) -> Option<(String, Duration)> {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let remote = format!("0100007F:{:04X}", server.port());
    let mut lines = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let fields = lines.find(|fields| fields.get(2) == Some(&remote.as_str()))?;
    let (kind, left) = fields[5].split_once(':').unwrap();
    let hundredths = u64::from_str_radix(left, 16).unwrap();
    Some((kind.to_owned(), Duration::from_millis(10 * hundredths)))
}

#[tokio::test]
async fn the_kernel_asks_whether_a_silent_server_is_there() {
    for several in [false, true] {
        let server = Server::start(any_port(), Answer::Never).await;
        let other = Server::start(any_port(), Answer::Yes).await;
        let servers = [server.address, other.address];
        let client = client("http", &servers[..=usize::from(several)], &[]);
        let asking = tokio::spawn(async move { ask(&client).await });
        // The kernel sends the request first.
        let is_asked = || {
            let timer = timer(server.address);
            timer.is_some_and(|(kind, left)| kind == "02" && left <= Duration::from_secs(30))
        };
        let asked = async {
            while !is_asked() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let asked = timeout(Duration::from_secs(10), asked).await;
        assert!(asked.is_ok(), "{:?}", timer(server.address));
        asking.abort();
    }
}
