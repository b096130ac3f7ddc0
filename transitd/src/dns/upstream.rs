//! Asks the cluster's DNS.
//!
//! Untrusted: datagrams that somebody else may have sent. Each query has a socket of its own, with a port that the
//! kernel picks at random, and a random id. It accepts datagrams from the asked address alone, and believes none with
//! another id or question. The caller bounds the time.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use thiserror::Error;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use super::query::Outgoing;

/// More bytes than are asked for, so that a message that is too long is noticed.
const MAX_DATAGRAM_BYTES: usize = 4096;

/// The transport by which a query came, and by which it is asked upstream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    Udp,
    Tcp,
}

#[derive(Debug, Error)]
pub(super) enum UpstreamError {
    #[error("cannot open a socket")]
    Open(#[source] io::Error),
    #[error("cannot send the query")]
    Send(#[source] io::Error),
    #[error("no answer")]
    Receive(#[source] io::Error),
    #[error("the query is too long")]
    TooLong,
    #[error("what came by TCP is no answer to the query")]
    Another,
}

pub(super) async fn ask(
    upstream: SocketAddr,
    transport: Transport,
    query: &Outgoing,
) -> Result<Vec<u8>, UpstreamError> {
    match transport {
        Transport::Udp => by_udp(upstream, query).await,
        Transport::Tcp => by_tcp(upstream, query).await,
    }
}

async fn by_udp(upstream: SocketAddr, query: &Outgoing) -> Result<Vec<u8>, UpstreamError> {
    let any: IpAddr = match upstream {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0)).await.map_err(UpstreamError::Open)?;
    socket.connect(upstream).await.map_err(UpstreamError::Open)?;
    socket.send(&query.bytes).await.map_err(UpstreamError::Send)?;
    let mut buffer = vec![0; MAX_DATAGRAM_BYTES];
    loop {
        let length = socket.recv(&mut buffer).await.map_err(UpstreamError::Receive)?;
        let answer = buffer.get(..length).unwrap_or_default();
        if query.is_answered_by(answer) {
            return Ok(answer.to_vec());
        }
    }
}

async fn by_tcp(upstream: SocketAddr, query: &Outgoing) -> Result<Vec<u8>, UpstreamError> {
    let length = u16::try_from(query.bytes.len()).map_err(|_| UpstreamError::TooLong)?;
    let mut framed = length.to_be_bytes().to_vec();
    framed.extend(&query.bytes);
    let mut stream = TcpStream::connect(upstream).await.map_err(UpstreamError::Open)?;
    // The connection is closed by a reset, so that the port and conntrack's entry are free at once, no matter how much
    // a pod asks.
    stream.set_zero_linger().map_err(UpstreamError::Open)?;
    stream.write_all(&framed).await.map_err(UpstreamError::Send)?;
    let length = stream.read_u16().await.map_err(UpstreamError::Receive)?;
    let mut answer = vec![0; usize::from(length)];
    stream
        .read_exact(&mut answer)
        .await
        .map_err(UpstreamError::Receive)?;
    if !query.is_answered_by(&answer) {
        return Err(UpstreamError::Another);
    }
    Ok(answer)
}
