//! Asks a backend once whether it serves.
//!
//! Untrusted: all that the backend answers. Only its first bytes are read, and a redirect is not followed: the node
//! connects to no other address than that of the backend, and by no other interface than that to its pod. The node
//! itself may have the same address, and another pod may get it while a check is under way.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpSocket;
use tokio::time::timeout;

/// The most bytes that are read of an answer.
const MAX_ANSWER: u64 = 256;

/// Why a check failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The pod refuses the connection.
    Refused,
    Timeout,
    /// The node can't send to the pod, or the connection broke.
    Unreachable,
    /// The answer is not HTTP.
    NoHttp,
    /// The status of the answer is not 200 to 399.
    Status(u16),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            ErrorKind::ConnectionRefused => Self::Refused,
            ErrorKind::TimedOut => Self::Timeout,
            _ => Self::Unreachable,
        }
    }
}

/// Opens a connection by this interface, and with a path asks for it by HTTP. `limit`: how long both may take together.
pub async fn probe(
    backend: SocketAddr,
    interface: Option<&str>,
    path: &str,
    limit: Duration,
) -> Result<(), Failure> {
    let asked = timeout(limit, ask(backend, interface, path)).await;
    asked.unwrap_or(Err(Failure::Timeout))
}

async fn ask(backend: SocketAddr, interface: Option<&str>, path: &str) -> Result<(), Failure> {
    let socket = if backend.is_ipv4() {
        TcpSocket::new_v4()?
    } else {
        TcpSocket::new_v6()?
    };
    socket.bind_device(interface.map(str::as_bytes))?;
    let mut stream = socket.connect(backend).await?;
    // The connection is closed by a reset, as other load balancers do, so that the port and conntrack's entry are free
    // at once.
    stream.set_zero_linger()?;
    if path.is_empty() {
        return Ok(());
    }
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {backend}\r\nUser-Agent: thuban-health-check\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut line = Vec::new();
    let mut answer = BufReader::new(stream.take(MAX_ANSWER));
    answer.read_until(b'\n', &mut line).await?;
    match status(&line) {
        Some(200..=399) => Ok(()),
        Some(status) => Err(Failure::Status(status)),
        None => Err(Failure::NoHttp),
    }
}

/// Reads the status of an answer's first line (RFC 9112, section 4).
fn status(line: &[u8]) -> Option<u16> {
    let rest = line.strip_prefix(b"HTTP/1.")?;
    let [_, b' ', code @ ..] = rest else {
        return None;
    };
    let code = code.get(..3).filter(|code| code.iter().all(u8::is_ascii_digit))?;
    std::str::from_utf8(code).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    const SHORT: Duration = Duration::from_millis(300);
    const LONG: Duration = Duration::from_secs(20);

    /// Returns the address of a server that reads a request and answers a connection with these bytes, and what it was
    /// sent.
    async fn server(answer: Vec<u8>) -> (SocketAddr, tokio::task::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut asked = Vec::new();
            let mut buffer = [0; 1024];
            while !asked.ends_with(b"\r\n\r\n") {
                match stream.read(&mut buffer).await {
                    Ok(length) if length > 0 => asked.extend(&buffer[..length]),
                    _ => break,
                }
            }
            // The client may have enough before it has all.
            let _ = stream.write_all(&answer).await;
            String::from_utf8(asked).unwrap()
        });
        (address, served)
    }

    async fn asked(answer: &[u8]) -> Result<(), Failure> {
        let (address, _served) = server(answer.to_vec()).await;
        probe(address, None, "/healthz", LONG).await
    }

    #[tokio::test]
    async fn a_status_from_200_to_399_passes() {
        for good in ["200 OK", "204 ", "302 Found", "399 x"] {
            let answer = format!("HTTP/1.1 {good}\r\n\r\n");
            assert_eq!(asked(answer.as_bytes()).await, Ok(()), "{good}");
        }
        assert_eq!(asked(b"HTTP/1.0 200\n\n").await, Ok(()));
        for (bad, status) in [("503 no", 503), ("404 Not Found", 404), ("101 Switch", 101)] {
            let answer = format!("HTTP/1.1 {bad}\r\n\r\n");
            let expected = Err(Failure::Status(status));
            assert_eq!(asked(answer.as_bytes()).await, expected, "{bad}");
        }
    }

    #[tokio::test]
    async fn what_is_no_http_fails_however_long_it_is() {
        for answer in [
            &b"SSH-2.0-x\r\n"[..],
            b"",
            b"HTTP/1.1 2",
            b"HTTP/1.1 +20 OK\r\n",
            &vec![b'x'; 1 << 16],
        ] {
            assert_eq!(asked(answer).await, Err(Failure::NoHttp));
        }
    }

    #[tokio::test]
    async fn a_request_names_path_and_backend() {
        let (address, served) = server(b"HTTP/1.1 200 OK\r\n\r\n".to_vec()).await;
        probe(address, None, "/ready?full=1", LONG).await.unwrap();
        let request = served.await.unwrap();
        assert!(request.starts_with("GET /ready?full=1 HTTP/1.1\r\n"), "{request}");
        assert!(request.contains(&format!("\r\nHost: {address}\r\n")), "{request}");
    }

    #[tokio::test]
    async fn without_a_path_an_open_port_passes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(probe(address, None, "", LONG).await, Ok(()));
        // It takes connections, and answers nothing.
        assert_eq!(probe(address, None, "/", SHORT).await, Err(Failure::Timeout));
        drop(listener);
        assert_eq!(probe(address, None, "", LONG).await, Err(Failure::Refused));
    }

    #[tokio::test]
    async fn nobody_is_asked_by_another_interface() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        assert_eq!(probe(address, Some("lo"), "", LONG).await, Ok(()));
        let gone = probe(address, Some("thb-gone"), "", LONG).await;
        assert_eq!(gone, Err(Failure::Unreachable));
    }
}
