//! Short texts by HTTP: metrics for Prometheus, probes for kubelet.
//!
//! Untrusted: whoever reaches the address reaches it. A request is read within a limit of bytes and time, few are served at
//! once, nothing in it but its path counts, and nothing can be changed by it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

const AT_ONCE: usize = 8;
const LONGEST_REQUEST: usize = 8192;
/// Of one request and its answer.
pub const PATIENCE: Duration = Duration::from_secs(5);
/// Until the port is tried again, and after an accept that failed.
const PAUSE: Duration = Duration::from_secs(5);

/// What a path is answered with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// 200
    Text(String),
    /// 404; `0` says what there is.
    Unknown(&'static str),
    /// 500
    Failed(String),
    /// 503
    Unready(String),
}

/// What is served.
pub trait Pages: Send + Sync + 'static {
    /// `path` begins with a slash and has no query.
    fn answer(&self, path: &str) -> impl Future<Output = Answer> + Send;
}

/// Serves until the process ends. Without its port the process works on; `setting` is named in the log then.
pub async fn serve(address: SocketAddr, setting: &'static str, pages: impl Pages) {
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
    accept(listener, Arc::new(pages)).await;
}

async fn accept(listener: TcpListener, pages: Arc<impl Pages>) {
    let places = Arc::new(Semaphore::new(AT_ONCE));
    loop {
        let Ok((stream, peer)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        // Whoever finds no place is hung up on.
        let Ok(place) = places.clone().try_acquire_owned() else {
            continue;
        };
        let pages = Arc::clone(&pages);
        tokio::spawn(async move {
            if timeout(PATIENCE, answer(stream, &*pages)).await.is_err() {
                debug!(%peer, "a request took too long");
            }
            drop(place);
        });
    }
}

async fn answer(mut stream: TcpStream, pages: &impl Pages) {
    let Some(path) = request(&mut stream).await else {
        return;
    };
    let (status, body) = match pages.answer(&path).await {
        Answer::Text(text) => ("200 OK", text),
        Answer::Unknown(text) => ("404 Not Found", format!("{text}\n")),
        Answer::Failed(text) => ("500 Internal Server Error", format!("{text}\n")),
        Answer::Unready(text) => ("503 Service Unavailable", format!("{text}\n")),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let _ = stream.write_all(head.as_bytes()).await;
    let _ = stream.write_all(body.as_bytes()).await;
    let _ = stream.shutdown().await;
}

/// The path of a GET; none for anything else.
async fn request(stream: &mut TcpStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() > LONGEST_REQUEST || stream.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let head = String::from_utf8(head).ok()?;
    let mut words = head.lines().next()?.split(' ');
    let (method, target) = (words.next()?, words.next()?);
    let path = target.split('?').next()?;
    (method == "GET" && path.starts_with('/')).then(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    struct Few;

    impl Pages for Few {
        async fn answer(&self, path: &str) -> Answer {
            match path {
                "/metrics" => Answer::Text("a 1\n".into()),
                "/readyz" => Answer::Unready("not yet".into()),
                _ => Answer::Unknown("there is /metrics"),
            }
        }
    }

    async fn ask(request: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(accept(listener, Arc::new(Few)));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        server.abort();
        answer
    }

    #[tokio::test]
    async fn a_get_is_answered_and_nothing_else() {
        let answer = ask("GET /metrics?a=b HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(
            answer.starts_with("HTTP/1.1 200 OK") && answer.ends_with("\r\n\r\na 1\n"),
            "{answer}"
        );
        assert!(ask("GET /readyz HTTP/1.1\r\n\r\n").await.contains("503"));
        assert!(ask("GET /../etc HTTP/1.1\r\n\r\n").await.contains("404"));
        assert_eq!(ask("POST /metrics HTTP/1.1\r\n\r\n").await, "");
        assert_eq!(ask("GET metrics HTTP/1.1\r\n\r\n").await, "");
        assert_eq!(ask(&"x".repeat(LONGEST_REQUEST + 5000)).await, "");
    }
}
