//! The collector of traces: where it is, and one request to it.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use thiserror::Error;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

/// The port of collectors for OTLP over HTTP.
const PORT: u16 = 4318;
/// Where collectors take spans.
const PATH: &str = "/v1/traces";
/// How long one request may take.
const POST_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Error)]
#[error("the collector's endpoint is not http://ADDRESS:PORT; names and https are not supported")]
pub struct InvalidEndpoint;

#[derive(Debug, Error)]
pub enum PostError {
    #[error("the collector of traces can't be reached")]
    Connect(#[source] io::Error),
    #[error("the collector of traces does not answer as HTTP has it")]
    Http(#[source] hyper::Error),
    #[error("the collector of traces answered {0}")]
    Refused(StatusCode),
    #[error("the collector of traces takes too long")]
    Timeout,
}

#[derive(Debug)]
pub struct Collector {
    address: SocketAddr,
    host: HeaderValue,
    path: Uri,
}

impl Collector {
    /// Reads an endpoint as OTLP's exporters have it: the URL before `/v1/traces`.
    pub fn parse(endpoint: &str) -> Result<Self, InvalidEndpoint> {
        let uri: Uri = endpoint.parse().map_err(|_| InvalidEndpoint)?;
        let host = uri.host().filter(|_| uri.scheme_str() == Some("http"));
        let address = host.ok_or(InvalidEndpoint)?.trim_matches(['[', ']']);
        let address: IpAddr = address.parse().map_err(|_| InvalidEndpoint)?;
        let address = SocketAddr::new(address, uri.port_u16().unwrap_or(PORT));
        let path = format!("{}{PATH}", uri.path().trim_end_matches('/'));
        Ok(Self {
            address,
            host: HeaderValue::from_str(&address.to_string()).map_err(|_| InvalidEndpoint)?,
            path: path.parse().map_err(|_| InvalidEndpoint)?,
        })
    }

    /// Sends spans, as JSON.
    pub async fn post(&self, spans: String) -> Result<(), PostError> {
        let status = timeout(POST_TIMEOUT, self.ask(spans)).await;
        match status.map_err(|_| PostError::Timeout)?? {
            status if status.is_success() => Ok(()),
            status => Err(PostError::Refused(status)),
        }
    }

    async fn ask(&self, spans: String) -> Result<StatusCode, PostError> {
        let stream = TcpStream::connect(self.address)
            .await
            .map_err(PostError::Connect)?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(PostError::Http)?;
        // The connection ends with this function.
        let mut connections = JoinSet::new();
        connections.spawn(connection);
        let mut request = Request::new(Full::<Bytes>::from(spans));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = self.path.clone();
        request.headers_mut().insert(HOST, self.host.clone());
        let json = HeaderValue::from_static("application/json");
        request.headers_mut().insert(CONTENT_TYPE, json);
        let answer = sender.send_request(request).await.map_err(PostError::Http)?;
        Ok(answer.status())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_endpoint_is_an_address_by_http() {
        for (endpoint, address, path) in [
            ("http://192.0.2.20:4318", "192.0.2.20:4318", "/v1/traces"),
            ("http://192.0.2.20/", "192.0.2.20:4318", "/v1/traces"),
            (
                "http://[2001:db8::1]:80/otlp",
                "[2001:db8::1]:80",
                "/otlp/v1/traces",
            ),
        ] {
            let collector = Collector::parse(endpoint).unwrap();
            assert_eq!(collector.address, address.parse().unwrap(), "{endpoint}");
            assert_eq!(collector.host, address);
            assert_eq!(collector.path, path);
        }
        for wrong in [
            "",
            "192.0.2.20:4318",
            "https://192.0.2.20:4318",
            "http://collector:4318",
            "grpc://192.0.2.20:4317",
        ] {
            assert!(Collector::parse(wrong).is_err(), "{wrong}");
        }
    }
}
