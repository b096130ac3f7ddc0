//! `transitd metrics`: prints the page of metrics that the daemon of this node serves. Reads only.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use clap::Args;
use thiserror::Error;

const TIMEOUT: Duration = Duration::from_secs(10);
/// HTTP/1.0, so that the page comes in one piece and ends with the connection.
const REQUEST: &[u8] = b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n";

/// Where the page is.
#[derive(Args, Clone, Copy, Debug)]
pub struct ScrapeSettings {
    /// Port of the page at the node's loopback address.
    #[arg(
        long = "metrics-port",
        env = "THUBAN_TRANSITD_METRICS_PORT",
        default_value_t = 6084
    )]
    port: u16,
}

#[derive(Debug, Error)]
pub enum ScrapeError {
    #[error("no page of metrics is served: THUBAN_TRANSITD_METRICS_PORT is 0")]
    Off,
    #[error(
        "the page of metrics at {address}: is it at the node's address (THUBAN_TRANSITD_METRICS_ADDRESS)?"
    )]
    Page { address: SocketAddr, source: io::Error },
    #[error("the page of metrics at {address} answers {status}")]
    Refused { address: SocketAddr, status: String },
}

/// Returns the page.
pub fn read(settings: ScrapeSettings) -> Result<String, ScrapeError> {
    if settings.port == 0 {
        return Err(ScrapeError::Off);
    }
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, settings.port));
    let answer = ask(address).map_err(|source| ScrapeError::Page { address, source })?;
    let (head, page) = answer.split_once("\r\n\r\n").unwrap_or((answer.as_str(), ""));
    let status = head.lines().next().unwrap_or_default();
    if status.split(' ').nth(1) == Some("200") {
        Ok(page.to_owned())
    } else {
        let status = status.to_owned();
        Err(ScrapeError::Refused { address, status })
    }
}

fn ask(address: SocketAddr) -> io::Result<String> {
    let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.write_all(REQUEST)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::thread;

    use super::{REQUEST, ScrapeError, ScrapeSettings, read};

    /// Reads the page of a server that answers this.
    fn read_of(answer: &'static str) -> Result<String, ScrapeError> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = vec![0; REQUEST.len()];
            stream.read_exact(&mut request).unwrap();
            assert_eq!(request, REQUEST);
            stream.write_all(answer.as_bytes()).unwrap();
        });
        let page = read(ScrapeSettings { port });
        server.join().unwrap();
        page
    }

    #[test]
    fn the_page_is_printed_without_its_header() {
        let page = read_of("HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nup 1\n");
        assert_eq!(page.unwrap(), "up 1\n");
    }

    #[test]
    fn a_page_that_is_not_there_says_why() {
        let refused = read_of("HTTP/1.0 503 Service Unavailable\r\n\r\nno\n").unwrap_err();
        assert!(
            refused
                .to_string()
                .ends_with("answers HTTP/1.0 503 Service Unavailable")
        );
        let off = read(ScrapeSettings { port: 0 }).unwrap_err();
        assert!(off.to_string().contains("THUBAN_TRANSITD_METRICS_PORT"));
    }
}
