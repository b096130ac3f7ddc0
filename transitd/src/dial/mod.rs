//! Dialling servers of the control plane: where a server is, TLS with its fixed name, the node's token, and pauses
//! between attempts.
//!
//! Invariant: every step of an attempt has a limit, so that a droplet never waits for a server that is gone.

pub mod lease;
mod pauses;

use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;
use tokio::time::timeout;
use tonic::metadata::errors::InvalidMetadataValue;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};

pub use pauses::Pauses;

use lease::{LeaseError, Locator};

/// The timeout of reading the Lease, and of connecting: while the Lease still names a dead node, nobody answers there.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug, Error)]
pub enum DialError {
    #[error(transparent)]
    Locate(#[from] LeaseError),
    #[error("cannot read the token {path}")]
    Token { path: PathBuf, source: std::io::Error },
    #[error("the token is not printable text")]
    TokenText(#[source] InvalidMetadataValue),
    #[error("cannot connect to {name} at {address}")]
    Connect {
        name: &'static str,
        address: String,
        source: tonic::transport::Error,
    },
    #[error("{name} does not answer within {} s at {address}", DIAL_TIMEOUT.as_secs())]
    Silent { name: &'static str, address: String },
}

/// A server that droplets dial.
#[derive(Clone, Debug)]
pub struct Server {
    pub locator: Locator,
    /// The fixed name in its certificate, whatever address it is dialled at.
    pub tls_name: &'static str,
    /// The time between questions whether the server lives. An answer may take twice as long: a server that has to tell
    /// thousands of droplets their rows at once is late, and lives.
    pub keepalive: Duration,
}

/// A connection to a server.
#[derive(Clone, Debug)]
pub struct Connection {
    /// host:port
    pub address: String,
    pub channel: Channel,
    /// The metadata "authorization" of calls.
    pub token: MetadataValue<Ascii>,
}

impl Server {
    /// Finds the server and connects to it. The Lease and the token are read at each call.
    pub async fn dial(&self, token_file: &Path) -> Result<Connection, DialError> {
        let name = self.tls_name;
        let location = self.locator.locate(DIAL_TIMEOUT).await?;
        let token = bearer(token_file)?;
        let address = location.address;
        let connect = |source| DialError::Connect {
            name,
            address: address.clone(),
            source,
        };
        let tls = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(&location.ca_bundle))
            .domain_name(name);
        let endpoint = Endpoint::from_shared(format!("https://{address}"))
            .and_then(|endpoint| endpoint.tls_config(tls))
            .map_err(connect)?
            .http2_keep_alive_interval(self.keepalive)
            .keep_alive_timeout(self.keepalive * 2)
            .keep_alive_while_idle(true);
        let channel = timeout(DIAL_TIMEOUT, endpoint.connect())
            .await
            .map_err(|_| DialError::Silent {
                name,
                address: address.clone(),
            })?
            .map_err(connect)?;
        Ok(Connection {
            address,
            channel,
            token,
        })
    }
}

/// Reads the token. It is read again at each connect, because kubelet renews the projected token.
fn bearer(path: &Path) -> Result<MetadataValue<Ascii>, DialError> {
    let token = std::fs::read_to_string(path).map_err(|source| DialError::Token {
        path: path.to_owned(),
        source,
    })?;
    let mut value: MetadataValue<Ascii> = format!("Bearer {}", token.trim())
        .parse()
        .map_err(DialError::TokenText)?;
    value.set_sensitive(true);
    Ok(value)
}
