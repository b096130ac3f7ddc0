//! Dials the operator again and again: TLS with the fixed name, the node's token, and jittered pauses that grow with
//! the time without a stream.
//!
//! Invariant: every step of an attempt has a limit, so that a droplet never waits for an operator that is gone.

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use thuban_proto::transit::transit_client::TransitClient;
use thuban_proto::{OPERATOR_TLS_NAME, PROTOCOL_VERSION};
use tokio::time::{Instant, timeout};
use tonic::Code;
use tonic::metadata::errors::InvalidMetadataValue;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tracing::{info, warn};

use super::epoch::Epoch;
use super::lease::{LeaseError, Locator};
use super::peer::Peer;
use super::session::{self, SessionError};
use crate::metrics;

/// The most bytes of a message: a snapshot is one message, including the rows of large services.
const MAX_PROGRAM_BYTES: usize = 256 << 20;
const MIN_RETRY: Duration = Duration::from_millis(200);
const MAX_RETRY: Duration = Duration::from_secs(5);
/// The pause is the time without a stream divided by this. So droplets reach a new leader soon, and no crowd comes
/// after a long absence.
const RETRY_JITTER_PART: u32 = 8;
/// How long a stream must live to count as one.
const LASTING: Duration = Duration::from_secs(5);
const KEEPALIVE: Duration = Duration::from_secs(3);
/// The timeout of reading the Lease, and of connecting: while the Lease still names a dead node, nobody answers there.
const DIAL_TIMEOUT: Duration = Duration::from_secs(2);

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
    #[error("the operator does not answer within {} s at {address}", DIAL_TIMEOUT.as_secs())]
    Silent { address: String },
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Runs until the daemon ends.
pub async fn run(peer: Arc<impl Peer>, locator: Locator, mut epoch: Epoch) {
    let mut lost = Instant::now();
    loop {
        let started = Instant::now();
        metrics::dials();
        if let Err(error) = attempt(&peer, &locator, &mut epoch).await {
            warn!(
                error = &error as &dyn std::error::Error,
                "no stream to the operator, the data plane goes on"
            );
        } else {
            info!("the operator closed the stream");
        }
        if started.elapsed() > LASTING {
            lost = Instant::now();
        }
        tokio::time::sleep(jittered(pause(lost.elapsed()))).await;
    }
}

fn pause(without_stream: Duration) -> Duration {
    (without_stream / RETRY_JITTER_PART).clamp(MIN_RETRY, MAX_RETRY)
}

async fn attempt(peer: &Arc<impl Peer>, locator: &Locator, epoch: &mut Epoch) -> Result<(), ClientError> {
    let location = locator.locate(DIAL_TIMEOUT).await?;
    let token = bearer(peer.token_file())?;
    let connect = |source| ClientError::Connect {
        address: location.address.clone(),
        source,
    };
    let tls = ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&location.ca_bundle))
        .domain_name(OPERATOR_TLS_NAME);
    let endpoint = Endpoint::from_shared(format!("https://{}", location.address))
        .and_then(|endpoint| endpoint.tls_config(tls))
        .map_err(connect)?
        .http2_keep_alive_interval(KEEPALIVE)
        .keep_alive_timeout(KEEPALIVE)
        .keep_alive_while_idle(true);
    let channel: Channel = timeout(DIAL_TIMEOUT, endpoint.connect())
        .await
        .map_err(|_| ClientError::Silent {
            address: location.address.clone(),
        })?
        .map_err(connect)?;
    info!(address = location.address, "connected to the operator");
    let client = TransitClient::new(channel).max_decoding_message_size(MAX_PROGRAM_BYTES);
    match session::run(peer, client.clone(), token.clone(), epoch, PROTOCOL_VERSION).await {
        // During a rolling update the operator may be one version behind.
        Err(SessionError::Stream(status)) if status.code() == Code::FailedPrecondition => {
            let older = PROTOCOL_VERSION - 1;
            info!(
                message = status.message(),
                version = older,
                "speaking an older version"
            );
            Ok(session::run(peer, client, token, epoch, older).await?)
        }
        result => Ok(result?),
    }
}

/// Reads the token. It is read again at each connect, because kubelet renews the projected token.
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

/// Returns half to one and a half of the pause, so that droplets do not come back all at once.
pub fn jittered(pause: Duration) -> Duration {
    let random = u32::try_from(RandomState::new().hash_one(std::process::id()) % 1000).unwrap_or_default();
    pause / 2 + pause.mul_f64(f64::from(random) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_absence_is_followed_closely_and_a_long_one_from_afar() {
        let seconds = Duration::from_secs;
        assert_eq!(pause(Duration::ZERO), MIN_RETRY);
        assert_eq!(pause(seconds(2)), Duration::from_millis(250));
        assert_eq!(pause(seconds(12)), Duration::from_millis(1500));
        assert_eq!(pause(seconds(3600)), MAX_RETRY);
    }

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
