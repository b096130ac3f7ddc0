//! Dials thuban-observe again and again, and holds one stream at a time.
//!
//! Invariant: a report is sent once. If its stream ends before the acknowledgement, its flows are counted as lost.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use thiserror::Error;
use thuban_proto::OBSERVE_TLS_NAME;
use thuban_proto::observe::FlowMode;
use tokio::time::Instant;
use tracing::{info, warn};

use super::queue::Queue;
use super::session::{self, OnTheWay, SessionError};
use crate::dial::lease::Locator;
use crate::dial::{DialError, Pauses, Server};

/// Name of thuban-observe's Lease.
pub const LEASE: &str = "thuban-observe";
/// The pause is the time without a stream divided by this: the cluster may have no thuban-observe for a long time.
const RETRY_PART: u32 = 2;
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Who tells.
#[derive(Clone, Debug)]
pub struct Droplet {
    pub name: String,
    /// What its programs tell of.
    pub mode: FlowMode,
    /// It is read at each attempt.
    pub token_file: PathBuf,
}

/// How often things are done.
#[derive(Clone, Debug)]
pub struct Pace {
    /// The time between two looks whether there is something to report.
    pub report: Duration,
    /// The longest time without a report.
    pub quiet: Duration,
    /// How long thuban-observe may acknowledge nothing while reports are on the way.
    pub silence: Duration,
    /// How long a stream must last, so that the next pauses are short. Else a thuban-observe that breaks each stream
    /// soon would have all droplets ask the API server again and again.
    pub steady: Duration,
    /// The pauses between two attempts.
    pub retry: RangeInclusive<Duration>,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            report: Duration::from_secs(1),
            quiet: Duration::from_secs(10),
            silence: Duration::from_secs(30),
            steady: Duration::from_mins(1),
            retry: Duration::from_secs(1)..=Duration::from_mins(5),
        }
    }
}

#[derive(Debug, Error)]
enum RelayError {
    #[error(transparent)]
    Dial(#[from] DialError),
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// Runs until the daemon ends.
pub async fn run(locator: Locator, droplet: &Droplet, queue: &Queue, pace: &Pace) {
    let server = Server {
        locator,
        tls_name: OBSERVE_TLS_NAME,
        keepalive: KEEPALIVE,
    };
    let mut pauses = Pauses::new(pace.retry.clone(), RETRY_PART);
    loop {
        let mut on_the_way = OnTheWay::new();
        let begun = Instant::now();
        if let Err(error) = attempt(&server, droplet, queue, pace, &mut on_the_way).await {
            warn!(
                error = &error as &dyn std::error::Error,
                "no stream to thuban-observe: flows of this node are not shown"
            );
        } else {
            info!("thuban-observe closed the stream");
        }
        queue.metrics.connected.set(0);
        let (lost, told) = on_the_way.unheard();
        queue.lose(lost);
        queue.put_back(told);
        let was_steady = on_the_way.is_answered() && begun.elapsed() >= pace.steady;
        tokio::time::sleep(pauses.next(was_steady)).await;
    }
}

async fn attempt(
    server: &Server,
    droplet: &Droplet,
    queue: &Queue,
    pace: &Pace,
    on_the_way: &mut OnTheWay,
) -> Result<(), RelayError> {
    let connection = server.dial(&droplet.token_file).await?;
    info!(address = connection.address, "connected to thuban-observe");
    Ok(session::run(connection, droplet, queue, pace, on_the_way).await?)
}
