//! Dials the operator again and again: TLS with the fixed name, the node's token, jittered back-off.

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use thuban_proto::OPERATOR_TLS_NAME;
use thuban_proto::transit::transit_client::TransitClient;
use tonic::metadata::errors::InvalidMetadataValue;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tracing::{info, warn};

use super::epoch::Epoch;
use super::lease::{LeaseError, Locator};
use super::session::{self, SessionError};
use crate::node::Node;

const LEAST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
const KEEPALIVE: Duration = Duration::from_secs(3);
const CONNECT: Duration = Duration::from_secs(5);

#[derive(Debug, Error)]
pub enum ClientError {
    #[error(transparent)]
    Locate(#[from] LeaseError),
    #[error("cannot read the token {path}")]
    Token { path: PathBuf, source: std::io::Error },
    #[error("the token is not printable text")]
    TokenText(#[source] InvalidMetadataValue),
    #[error("cannot connect to the operator at {address}")]
    Connect {
        address: String,
        source: tonic::transport::Error,
    },
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>, locator: Locator, mut epoch: Epoch) {
    let mut pause = LEAST_PAUSE;
    loop {
        let started = tokio::time::Instant::now();
        if let Err(error) = attempt(&node, &locator, &mut epoch).await {
            warn!(
                error = &error as &dyn std::error::Error,
                "no stream to the operator, the data plane goes on"
            );
        } else {
            info!("the operator closed the stream");
        }
        pause = if started.elapsed() > LONGEST_PAUSE {
            LEAST_PAUSE
        } else {
            (pause * 2).min(LONGEST_PAUSE)
        };
        tokio::time::sleep(jittered(pause)).await;
    }
}

async fn attempt(node: &Arc<Node>, locator: &Locator, epoch: &mut Epoch) -> Result<(), ClientError> {
    let location = locator.locate().await?;
    let token = bearer(&node.settings.token_file)?;
    let connect = |source| ClientError::Connect {
        address: location.address.clone(),
        source,
    };
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&location.ca_bundle))
        .domain_name(OPERATOR_TLS_NAME);
    let channel: Channel = Endpoint::from_shared(format!("https://{}", location.address))
        .and_then(|endpoint| endpoint.tls_config(tls))
        .map_err(connect)?
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true)
        .connect()
        .await
        .map_err(connect)?;
    info!(address = location.address, "connected to the operator");
    Ok(session::run(node, TransitClient::new(channel), token, epoch).await?)
}

/// Read again at each connect: kubelet renews the projected token.
fn bearer(path: &std::path::Path) -> Result<MetadataValue<Ascii>, ClientError> {
    let token = std::fs::read_to_string(path).map_err(|source| ClientError::Token {
        path: path.to_owned(),
        source,
    })?;
    let mut value: MetadataValue<Ascii> = format!("Bearer {}", token.trim())
        .parse()
        .map_err(ClientError::TokenText)?;
    value.set_sensitive(true);
    Ok(value)
}

/// Half to one and a half of the pause, so that droplets do not come back all at once.
fn jittered(pause: Duration) -> Duration {
    let random = u32::try_from(RandomState::new().hash_one(std::process::id()) % 1000).unwrap_or_default();
    pause / 2 + pause.mul_f64(f64::from(random) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_are_jittered_within_their_bounds() {
        let pauses: Vec<_> = (0..100).map(|_| jittered(Duration::from_secs(4))).collect();
        assert!(
            pauses
                .iter()
                .all(|p| (Duration::from_secs(2)..=Duration::from_secs(6)).contains(p))
        );
        assert!(pauses.iter().any(|p| *p != pauses[0]));
    }
}
