//! `/metrics` for Prometheus, `/healthz` and `/readyz` for kubelet, by HTTP on the node's address.
//!
//! Untrusted: whoever reaches the node reaches it. A request is read within a limit of bytes and time, few are served at
//! once, nothing in it but its path counts, and nothing can be changed by it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use super::{leadership, text};

const AT_ONCE: usize = 8;
const LONGEST_REQUEST: usize = 8192;
/// Of one request and its answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Until the port is tried again, and after an accept that failed.
const PAUSE: Duration = Duration::from_secs(5);

static IS_READY: AtomicBool = AtomicBool::new(false);

/// A standby is ready when it could lead, a leader when it serves.
pub fn ready(is_ready: bool) {
    IS_READY.store(is_ready, Ordering::Relaxed);
}

/// Serves until the process ends. Without its port the operator works on.
pub async fn serve(address: SocketAddr) {
    let listener = loop {
        match TcpListener::bind(address).await {
            Ok(listener) => break listener,
            Err(error) => {
                warn!(%address, %error, "no metrics: set THUBAN_METRICS_PORT to a port that is free");
            }
        }
        sleep(PAUSE).await;
    };
    info!(%address, "serving metrics");
    accept(listener).await;
}

async fn accept(listener: TcpListener) {
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
        tokio::spawn(async move {
            if timeout(PATIENCE, answer(stream)).await.is_err() {
                debug!(%peer, "a request took too long");
            }
            drop(place);
        });
    }
}

async fn answer(mut stream: TcpStream) {
    let Some(path) = request(&mut stream).await else {
        return;
    };
    let (status, body) = match path.as_str() {
        "/metrics" => text().map_or_else(
            |error| ("500 Internal Server Error", error.to_string()),
            |text| ("200 OK", text),
        ),
        "/healthz" if is_alive().await => ("200 OK", "ok\n".to_owned()),
        "/healthz" => ("503 Service Unavailable", "the hub does not answer\n".to_owned()),
        "/readyz" if IS_READY.load(Ordering::Relaxed) => ("200 OK", "ok\n".to_owned()),
        "/readyz" => ("503 Service Unavailable", "not ready yet\n".to_owned()),
        _ => (
            "404 Not Found",
            "there are /metrics, /healthz and /readyz\n".to_owned(),
        ),
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
    (method == "GET").then(|| path.to_owned())
}

/// A leader whose hub is stuck is of no use.
async fn is_alive() -> bool {
    let Some(context) = leadership() else {
        return true;
    };
    let look = tokio::task::spawn_blocking(move || context.hub.is_connected(""));
    timeout(PATIENCE / 2, look).await.is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn ask(request: &str) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(accept(listener));
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer).await;
        server.abort();
        answer
    }

    #[tokio::test]
    async fn metrics_and_health_are_served_and_nothing_else() {
        let metrics = ask("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").await;
        assert!(metrics.starts_with("HTTP/1.1 200 OK"), "{metrics}");
        assert!(metrics.contains("thuban_operator_leader"), "{metrics}");
        assert!(metrics.ends_with("# EOF\n"), "{metrics}");
        assert!(ask("GET /healthz HTTP/1.1\r\n\r\n").await.contains("200 OK"));
        ready(false);
        assert!(ask("GET /readyz HTTP/1.1\r\n\r\n").await.contains("503"));
        ready(true);
        assert!(ask("GET /readyz HTTP/1.1\r\n\r\n").await.contains("200 OK"));
        assert!(ask("GET /../etc HTTP/1.1\r\n\r\n").await.contains("404"));
        assert_eq!(ask("POST /metrics HTTP/1.1\r\n\r\n").await, "");
        assert_eq!(ask(&"x".repeat(LONGEST_REQUEST + 5000)).await, "");
    }
}
