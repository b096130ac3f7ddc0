//! Dials the operator again and again, and holds one stream at a time.

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use thuban_proto::transit::transit_client::TransitClient;
use thuban_proto::{OPERATOR_TLS_NAME, PROTOCOL_VERSION};
use tokio::time::Instant;
use tonic::Code;
use tracing::{info, warn};

use super::epoch::Epoch;
use super::peer::Peer;
use super::session::{self, SessionError};
use crate::dial::lease::Locator;
use crate::dial::{Connection, DialError, Pauses, Server};
use crate::metrics;

/// Name of the operator's Lease.
pub const LEASE: &str = "thuban-operator";
/// The most bytes of a message: a snapshot is one message, including the rows of large services.
const MAX_PROGRAM_BYTES: usize = 256 << 20;
const MIN_RETRY: Duration = Duration::from_millis(400);
const MAX_RETRY: Duration = Duration::from_secs(5);
/// The pause is the time without a stream divided by this. A new leader waits that long for droplets. Each attempt
/// reads the Lease: while a killed leader's Lease runs out, a droplet reads it some eighteen times.
const RETRY_PART: u32 = 8;
/// How long a stream must live to count as one.
const LASTING: Duration = Duration::from_secs(5);
const KEEPALIVE: Duration = Duration::from_secs(3);

#[derive(Debug, Error)]
pub enum ClientError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Runs until the daemon ends.
pub async fn run(peer: Arc<impl Peer>, locator: Locator, mut epoch: Epoch) {
    let server = Server {
        locator,
        tls_name: OPERATOR_TLS_NAME,
        keepalive: KEEPALIVE,
    };
    let mut pauses = Pauses::new(MIN_RETRY..=MAX_RETRY, RETRY_PART);
    loop {
        let started = Instant::now();
        metrics::dials();
        if let Err(error) = attempt(&peer, &server, &mut epoch).await {
            warn!(
                error = &error as &dyn std::error::Error,
                "no stream to the operator, the data plane goes on"
            );
        } else {
            info!("the operator closed the stream");
        }
        tokio::time::sleep(pauses.next(started.elapsed() > LASTING)).await;
    }
}

async fn attempt(peer: &Arc<impl Peer>, server: &Server, epoch: &mut Epoch) -> Result<(), ClientError> {
    let Connection {
        address,
        channel,
        token,
    } = server.dial(peer.token_file()).await?;
    info!(address, "connected to the operator");
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
