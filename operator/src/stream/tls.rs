//! TLS on the connections of droplets. The certificate can be exchanged while streams are open: those stay, and later
//! connections get the new one.

use std::io;
use std::sync::Arc;

use futures::{Stream, StreamExt};
use rustls::ServerConfig;
use rustls::crypto::ring;
use thuban_authority::ServerCertificate;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tracing::debug;

/// The protocol within TLS.
const HTTP2: &[u8] = b"h2";

/// Yields the connections whose peer has agreed on TLS. Peers that take their time hold up no others; the door ends
/// them.
pub fn secured<C>(
    connections: impl Stream<Item = io::Result<C>> + Send,
    certificate: Arc<ServerCertificate>,
) -> Result<impl Stream<Item = io::Result<TlsStream<C>>>, rustls::Error>
where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let start = (Box::pin(connections), JoinSet::new(), acceptor(certificate)?);
    Ok(futures::stream::unfold(
        start,
        |(mut connections, mut handshakes, acceptor)| async move {
            loop {
                tokio::select! {
                    connection = connections.next() => match connection? {
                        Ok(connection) => {
                            handshakes.spawn(acceptor.accept(connection));
                        }
                        Err(error) => debug!(%error, "a connection ended at once"),
                    },
                    Some(done) = handshakes.join_next() => match done {
                        Ok(Ok(secured)) => return Some((Ok(secured), (connections, handshakes, acceptor))),
                        Ok(Err(error)) => debug!(%error, "a peer did not agree on TLS"),
                        Err(error) => debug!(%error, "a handshake ended"),
                    },
                }
            }
        },
    ))
}

fn acceptor(certificate: Arc<ServerCertificate>) -> Result<TlsAcceptor, rustls::Error> {
    let provider = Arc::new(ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let mut config = builder.with_no_client_auth().with_cert_resolver(certificate);
    config.alpn_protocols = vec![HTTP2.to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}
