//! Serves short texts by HTTP: metrics for Prometheus, probes for kubelet and load balancers. Ends a process that
//! panics. Takes commands of root at a Unix socket ([`control`]). Sends traces of pods ([`traces`]).
//!
//! Requests are untrusted: anybody who reaches the address may send one. A request is read within a limit of bytes and
//! time, and few are served at once; a peer with many connections loses its own first. Of the request line only the
//! path counts, not even the method, and no request changes anything. A server beyond loopback may have a [`Guard`],
//! which shows pages to who has the right ([`access`]).

pub mod access;
pub mod control;
mod format;
mod guard;
mod json;
mod levels;
mod own;
mod panics;
pub mod peers;
pub mod process;
pub mod rate_limit;
mod right;
pub mod traces;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
pub use hyper::StatusCode;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, CONTENT_TYPE, HeaderValue, WWW_AUTHENTICATE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use access::Refusal;
use format::text_format;
use guard::begins_with_tls;
pub use guard::{Guard, bearer};
use own::with_own;
pub use panics::abort_on_panic;
use peers::Connections;

/// The most connections. One more ends the oldest of the peer that has the most, so that connections without a request
/// keep out nobody, and many connections of one peer end none of another.
const AT_ONCE: usize = 32;
/// The most answers that are made at once.
const MADE_AT_ONCE: usize = 8;
const LONGEST_REQUEST: usize = 8192;
/// How long one request and its answer may take.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the server waits until it tries the port again, and after an accept that failed.
const PAUSE: Duration = Duration::from_secs(5);
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Prometheus' own format, of metrics and of what is no metric.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
const JSON: &str = "application/json";

/// The answer to a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// 200; in OpenMetrics here, and for who does not ask for that in Prometheus' text format
    Metrics(String),
    /// 200
    Text(String),
    /// The status, with JSON
    Json(StatusCode, String),
    /// 404; the text says which paths there are.
    Unknown(&'static str),
    /// 500
    Failed(String),
    /// 503
    Unready(String),
}

/// The pages that are served.
pub trait Pages: Send + Sync + 'static {
    /// Answers a path, which begins with a slash and has no query.
    fn answer(&self, path: &str) -> impl Future<Output = Answer> + Send;
}

/// Serves until the process ends, to everybody who reaches the address. Without its port the process works on;
/// `setting` is the setting that the log names then.
pub async fn serve(address: SocketAddr, setting: &'static str, pages: impl Pages) {
    accept(listen(address, setting).await, pages, None).await;
}

/// Does what [`serve`] does, for those whom the guard lets in.
pub async fn serve_guarded(address: SocketAddr, setting: &'static str, pages: impl Pages, guard: Guard) {
    accept(listen(address, setting).await, pages, Some(guard)).await;
}

async fn listen(address: SocketAddr, setting: &'static str) -> TcpListener {
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                warn!(%address, %error, setting, "nothing is served here: set a port that is free");
            }
        }
        sleep(PAUSE).await;
    };
    info!(%address, setting, "serving HTTP");
    listener
}

/// What all connections share.
struct Server<P> {
    pages: P,
    places: Semaphore,
    guard: Option<Guard>,
}

/// The reason why a connection ends without an answer.
#[derive(Debug, Error)]
enum ConnectionError {
    #[error("no TLS: {0}")]
    Tls(#[from] io::Error),
    #[error("the peer begins TLS too often")]
    TooMany,
    #[error(transparent)]
    Http(#[from] hyper::Error),
}

async fn accept(listener: TcpListener, pages: impl Pages, guard: Option<Guard>) {
    let mut served = Connections::default();
    let server = Arc::new(Server {
        pages,
        places: Semaphore::new(MADE_AT_ONCE),
        guard,
    });
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let address = peer.ip().to_canonical();
        served.make_room(address, AT_ONCE);
        let server = Arc::clone(&server);
        let connection = tokio::spawn(async move {
            match timeout(REQUEST_TIMEOUT, one_connection(stream, address, server)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => debug!(%peer, %error, "a request that can't be read"),
                Err(_) => debug!(%peer, "a request took too long"),
            }
        });
        served.add(address, connection);
    }
}

async fn one_connection<P: Pages>(
    stream: TcpStream,
    peer: IpAddr,
    server: Arc<Server<P>>,
) -> Result<(), ConnectionError> {
    if let Some(guard) = &server.guard
        && begins_with_tls(&stream).await?
    {
        if !guard.may_begin(peer) {
            return Err(ConnectionError::TooMany);
        }
        let stream = guard.secure(stream).await?;
        return Ok(one_request(stream, peer, true, Arc::clone(&server)).await?);
    }
    Ok(one_request(stream, peer, false, server).await?)
}

async fn one_request<P: Pages>(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    peer: IpAddr,
    is_secured: bool,
    server: Arc<Server<P>>,
) -> hyper::Result<()> {
    let service = service_fn(move |request: Request<Incoming>| {
        let server = Arc::clone(&server);
        async move {
            let (head, _body) = request.into_parts();
            let path = head.uri.path();
            // Before there is a place: who waits for a review keeps out no probe.
            if let Some(guard) = &server.guard
                && let Err(refusal) = guard.admit(peer, path, &head.headers, is_secured).await
            {
                return Ok(refuse(refusal));
            }
            let _place = server.places.acquire().await;
            let accepted = head.headers.get(ACCEPT);
            let accepted = accepted.and_then(|formats| formats.to_str().ok());
            let takes_openmetrics =
                accepted.is_some_and(|formats| formats.contains("application/openmetrics-text"));
            Ok::<_, Infallible>(answer(path, takes_openmetrics, &server.pages).await)
        }
    });
    http1::Builder::new()
        .keep_alive(false)
        .half_close(true)
        .max_buf_size(LONGEST_REQUEST)
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

async fn answer(path: &str, takes_openmetrics: bool, pages: &impl Pages) -> Response<Full<Bytes>> {
    match pages.answer(path).await {
        Answer::Metrics(text) if takes_openmetrics => respond(StatusCode::OK, OPENMETRICS, with_own(&text)),
        Answer::Metrics(text) => respond(StatusCode::OK, TEXT, text_format(&with_own(&text))),
        Answer::Text(text) => respond(StatusCode::OK, TEXT, text),
        Answer::Json(status, text) => respond(status, JSON, text),
        Answer::Unknown(text) => respond(StatusCode::NOT_FOUND, TEXT, format!("{text}\n")),
        Answer::Failed(text) => respond(StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{text}\n")),
        Answer::Unready(text) => respond(StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{text}\n")),
    }
}

fn refuse(refusal: Refusal) -> Response<Full<Bytes>> {
    let mut response = respond(refusal.status(), TEXT, format!("{refusal}\n"));
    if response.status() == StatusCode::UNAUTHORIZED {
        let scheme = HeaderValue::from_static("Bearer");
        response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
    }
    response
}

fn respond(status: StatusCode, format: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    let format = HeaderValue::from_static(format);
    response.headers_mut().insert(CONTENT_TYPE, format);
    response
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpSocket;
    use tokio::task::JoinHandle;

    use super::*;

    struct Few;

    impl Pages for Few {
        async fn answer(&self, path: &str) -> Answer {
            match path {
                "/metrics" => Answer::Metrics("# HELP a Some.\n# TYPE a counter\na_total 1\n# EOF\n".into()),
                "/healthz" => Answer::Json(StatusCode::SERVICE_UNAVAILABLE, "{}".into()),
                "/readyz" => Answer::Unready("not yet".into()),
                _ => Answer::Unknown("there is /metrics"),
            }
        }
    }

    async fn serve_few() -> (SocketAddr, JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (address, tokio::spawn(accept(listener, Few, None)))
    }

    async fn ask_at(address: SocketAddr, request: &str) -> String {
        ask_by(TcpStream::connect(address).await.unwrap(), request).await
    }

    async fn ask_by(mut stream: TcpStream, request: &str) -> String {
        let _ = stream.write_all(request.as_bytes()).await;
        // Some clients close their sending side.
        let _ = stream.shutdown().await;
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        answer
    }

    async fn ask(request: &str) -> String {
        let (address, server) = serve_few().await;
        let answer = ask_at(address, request).await;
        server.abort();
        answer
    }

    #[tokio::test]
    async fn a_request_is_answered_by_its_path() {
        let answer = ask("GET /metrics?a=b HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(
            answer.starts_with("HTTP/1.1 200 OK")
                && answer.contains("\r\n\r\n# HELP a_total Some.\n# TYPE a_total counter\na_total 1\n")
                && answer.contains("\n# TYPE process_cpu_seconds_total counter\n"),
            "{answer}"
        );
        assert!(answer.contains("text/plain; version=0.0.4"), "{answer}");
        let accept = "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5";
        let answer = ask(&format!("GET /metrics HTTP/1.1\r\n{accept}\r\n\r\n")).await;
        assert!(
            answer.contains("application/openmetrics-text") && answer.ends_with("# EOF\n"),
            "{answer}"
        );
        let health = ask("GET /healthz HTTP/1.1\r\n\r\n").await;
        assert!(
            health.contains(" 503 ") && health.contains("application/json"),
            "{health}"
        );
        assert!(ask("GET /readyz HTTP/1.1\r\n\r\n").await.contains(" 503 "));
        assert!(ask("GET /../etc HTTP/1.1\r\n\r\n").await.contains(" 404 "));
        let options = ask("OPTIONS /healthz HTTP/1.1\r\n\r\n").await;
        assert!(options.contains(" 503 "), "{options}");
        assert!(!ask("GET metrics HTTP/1.1\r\n\r\n").await.contains(" 200 "));
        let endless = ask(&format!("GET /{}", "x".repeat(LONGEST_REQUEST + 5000))).await;
        assert!(
            !endless.contains(" 200 ") && !endless.contains(" 404 "),
            "{endless}"
        );
    }

    #[tokio::test]
    async fn connections_that_ask_nothing_keep_out_nobody() {
        let (address, server) = serve_few().await;
        let mut idle = Vec::new();
        for _ in 0..AT_ONCE + 5 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let answer = timeout(
            REQUEST_TIMEOUT / 2,
            ask_at(address, "GET /metrics HTTP/1.1\r\n\r\n"),
        )
        .await;
        assert!(answer.unwrap().contains(" 200 "));
        let mut byte = [0];
        let ended = timeout(REQUEST_TIMEOUT / 2, idle[0].read(&mut byte))
            .await
            .unwrap();
        assert!(ended.is_err() || ended.unwrap() == 0, "the oldest is hung up on");
        server.abort();
    }

    #[tokio::test]
    async fn many_connections_of_a_peer_end_none_of_another() {
        let (address, server) = serve_few().await;
        let other = TcpSocket::new_v4().unwrap();
        other.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let other = other.connect(address).await.unwrap();
        let mut idle = Vec::new();
        for _ in 0..AT_ONCE + 5 {
            idle.push(TcpStream::connect(address).await.unwrap());
        }
        let request = "GET /metrics HTTP/1.1\r\n\r\n";
        // Connections are taken in turn: when this one has its answer, all before it were taken.
        assert!(ask_at(address, request).await.contains(" 200 "));
        assert!(ask_by(other, request).await.contains(" 200 "));
        server.abort();
    }
}
