//! The streams of droplets: who may report, how much, and what becomes of a report.
//!
//! Invariant: a stream is of a node that has proven itself. The newest stream of a droplet is read, no other. A droplet
//! that reports too much waits for its acknowledgements, loses events of its own, and takes nothing from others.

pub mod droplets;
pub mod validation;

use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::Stream;
use kube::Client;
use thuban_authority::identity::{self, Account, Identity, IdentityError};
use thuban_proto::OBSERVE_TOKEN_AUDIENCE;
use thuban_proto::observe::observe_server::{Observe, ObserveServer};
use thuban_proto::observe::{Acknowledged, Lost as ToldLost, Report};
use thuban_telemetry::peers::PeerLimits;
use thuban_telemetry::rate_limit::RateLimit;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::{debug, info, warn};

use crate::flow::Lost;
use crate::metrics;
use crate::names::Name;
use crate::relay::Relay;
use crate::server::Peer;
use validation::{Mode, ValidatedFlow};

/// Who may report.
const TRANSITD: Account = Account {
    name: "transitd",
    audience: OBSERVE_TOKEN_AUDIENCE,
};
/// The most flows of one report.
const MAX_FLOWS: usize = 512;
/// The largest report in bytes: one of so many flows has at most 300 KiB, with the longest names of policies.
const LARGEST_REPORT: usize = 512 << 10;
/// How long a stream may take to say whose it is, and how long it may be silent then. Droplets report each 10 s.
const FIRST_TIMEOUT: Duration = Duration::from_secs(10);
const SILENCE_TIMEOUT: Duration = Duration::from_mins(1);
/// How long a droplet may take to make room for an acknowledgement.
const ACK_TIMEOUT: Duration = Duration::from_secs(30);
/// How many flows a second are taken: of one droplet, and of all. Each may have ten seconds' at once after a rest.
const OF_DROPLET_A_SECOND: u32 = 2_000;
const OF_DROPLET_AT_ONCE: u32 = 20_000;
const OF_ALL_A_SECOND: u32 = 50_000;
const OF_ALL_AT_ONCE: u32 = 100_000;
/// The pause until a report is tried again that is beyond the rate.
const RATE_RETRY: Duration = Duration::from_millis(50);
/// The most tokens that the API server is asked about at once, and how many of one peer a second and at once.
const REVIEWS: usize = 16;
const REVIEWS_A_SECOND: u32 = 2;
const REVIEWS_AT_ONCE: u32 = 10;
/// How long a review may take, with the wait for its turn.
const REVIEW_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves droplets.
pub struct Reports {
    relay: Arc<Relay>,
    client: Client,
    reviews: Semaphore,
    of_peers: PeerLimits,
    of_all: Arc<RateLimit>,
}

impl Reports {
    /// Makes the service of gRPC.
    pub fn service(relay: Arc<Relay>, client: Client) -> ObserveServer<Self> {
        let reports = Self {
            relay,
            client,
            reviews: Semaphore::new(REVIEWS),
            of_peers: PeerLimits::new(REVIEWS_A_SECOND, REVIEWS_AT_ONCE),
            of_all: Arc::new(RateLimit::new(OF_ALL_A_SECOND, OF_ALL_AT_ONCE)),
        };
        ObserveServer::new(reports).max_decoding_message_size(LARGEST_REPORT)
    }

    async fn identify<T>(&self, request: &Request<T>, peer: IpAddr) -> Result<Identity, IdentityError> {
        let token = request
            .metadata()
            .get("authorization")
            .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "))
            .ok_or(IdentityError::NoToken)?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map(|time| time.as_secs())
            .unwrap_or_default();
        // Any caller may send any number of these.
        identity::check_claims(TRANSITD, token, now)?;
        if !self.of_peers.take(peer) {
            return Err(IdentityError::Busy);
        }
        let reviewed = async {
            let _turn = self.reviews.acquire().await.map_err(|_| IdentityError::Busy)?;
            identity::review(self.client.clone(), TRANSITD, token, now).await
        };
        timeout(REVIEW_TIMEOUT, reviewed)
            .await
            .unwrap_or(Err(IdentityError::Busy))
    }
}

type Acks = Pin<Box<dyn Stream<Item = Result<Acknowledged, Status>> + Send>>;

#[tonic::async_trait]
impl Observe for Reports {
    type ReportStream = Acks;

    async fn report(&self, request: Request<Streaming<Report>>) -> Result<Response<Acks>, Status> {
        let peer = request
            .extensions()
            .get::<Peer>()
            .map(|peer| peer.0)
            .ok_or_else(|| Status::internal("the connection has no peer"))?;
        let identity = self.identify(&request, peer).await.map_err(|error| {
            metrics::stream_refused("identity");
            debug!(%error, %peer, "a stream was refused");
            status(&error)
        })?;
        let mut incoming = request.into_inner();
        let first = first(&mut incoming, &identity)
            .await
            .inspect_err(|_| metrics::stream_refused("first_report"))?;
        let mode = Mode::from(first.mode);
        let (id, replaced) = self.relay.droplets.open(&identity.node, mode);
        metrics::droplets(self.relay.droplets.count());
        info!(droplet = identity.node, mode = mode.name(), "stream opened");
        let (outgoing, receiver) = mpsc::channel(16);
        let stream = DropletStream {
            relay: self.relay.clone(),
            droplet: identity.node.as_str().into(),
            id,
            read: 0,
            of_droplet: RateLimit::new(OF_DROPLET_A_SECOND, OF_DROPLET_AT_ONCE),
            of_all: self.of_all.clone(),
            has_warned: false,
        };
        tokio::spawn(stream.run(first, incoming, outgoing, replaced, identity.valid_for));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }
}

/// Reads the first report, which says whose stream it is.
async fn first(incoming: &mut Streaming<Report>, identity: &Identity) -> Result<Report, Status> {
    let first = timeout(FIRST_TIMEOUT, incoming.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no report within 10 s"))??
        .ok_or_else(|| Status::invalid_argument("the stream ended before its first report"))?;
    if first.droplet != identity.node {
        let message = format!(
            "the token is of node {}, Report.droplet is {:?}",
            identity.node, first.droplet
        );
        return Err(Status::permission_denied(message));
    }
    Ok(first)
}

fn status(error: &IdentityError) -> Status {
    match error {
        IdentityError::Review(_) | IdentityError::Busy => Status::unavailable(error.to_string()),
        IdentityError::NoToken | IdentityError::NotAuthenticated(_) | IdentityError::Expired => {
            Status::unauthenticated(error.to_string())
        }
        IdentityError::WrongUser(..) | IdentityError::NotBound => {
            Status::permission_denied(error.to_string())
        }
    }
}

/// The stream of a proven droplet.
struct DropletStream {
    relay: Arc<Relay>,
    droplet: Name,
    id: u64,
    /// How many reports were read.
    read: u64,
    of_droplet: RateLimit,
    of_all: Arc<RateLimit>,
    /// Whether the log has said that a flow makes no sense.
    has_warned: bool,
}

impl DropletStream {
    async fn run(
        mut self,
        first: Report,
        mut incoming: Streaming<Report>,
        outgoing: mpsc::Sender<Result<Acknowledged, Status>>,
        replaced: oneshot::Receiver<()>,
        valid_for: Duration,
    ) {
        let (end, status) = tokio::select! {
            end = self.read(first, &mut incoming, &outgoing) => end,
            _ = replaced => ("replaced", Some(Status::aborted("replaced by a newer stream"))),
            () = sleep(valid_for) => {
                ("the token has expired", Some(Status::unauthenticated("the token has expired; dial again")))
            }
        };
        if let Some(status) = status {
            let _ = outgoing.try_send(Err(status));
        }
        self.relay.droplets.close(&self.droplet, self.id);
        metrics::droplets(self.relay.droplets.count());
        info!(droplet = &*self.droplet, end, "stream closed");
    }

    /// Reads reports until the stream ends. Returns why, for the log and for the droplet.
    async fn read(
        &mut self,
        first: Report,
        incoming: &mut Streaming<Report>,
        outgoing: &mpsc::Sender<Result<Acknowledged, Status>>,
    ) -> (&'static str, Option<Status>) {
        let mut report = first;
        loop {
            if let Err(status) = self.receive(report).await {
                return ("a report could not be read", Some(status));
            }
            self.read += 1;
            let acknowledged = Acknowledged { reports: self.read };
            match timeout(ACK_TIMEOUT, outgoing.send(Ok(acknowledged))).await {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return ("the droplet went away", None),
                Err(_) => return ("the droplet takes nothing", None),
            }
            report = match timeout(SILENCE_TIMEOUT, incoming.message()).await {
                Ok(Ok(Some(report))) => report,
                Ok(Ok(None) | Err(_)) => return ("the droplet went away", None),
                Err(_) => {
                    let silent = Status::deadline_exceeded("no report for a minute; dial again");
                    return ("the droplet is silent", Some(silent));
                }
            };
        }
    }

    async fn receive(&mut self, report: Report) -> Result<(), Status> {
        if report.flows.len() > MAX_FLOWS {
            return Err(Status::invalid_argument(format!(
                "Report.flows has {} flows, expected at most {MAX_FLOWS}",
                report.flows.len()
            )));
        }
        self.wait_for_turn(report.flows.len()).await;
        self.relay
            .droplets
            .set_mode(&self.droplet, self.id, report.mode.into());
        let mut flows = Vec::with_capacity(report.flows.len());
        for flow in report.flows {
            match ValidatedFlow::try_from(flow) {
                Ok(flow) => flows.push(flow),
                // A newer droplet may tell what this program does not know. The other flows count.
                Err(error) => {
                    metrics::flow_refused(error.field);
                    if !std::mem::replace(&mut self.has_warned, true) {
                        warn!(droplet = &*self.droplet, %error, "a flow of a report makes no sense");
                    }
                }
            }
        }
        self.relay.take(&self.droplet, flows, lost(report.lost));
        Ok(())
    }

    /// Waits until so many flows are within the rates. What the droplet has meanwhile, it counts as lost by itself.
    async fn wait_for_turn(&self, flows: usize) {
        // A report has at most 512.
        let wanted = flows as u32;
        for limit in [&self.of_droplet, &*self.of_all] {
            let mut taken = limit.take_up_to(wanted);
            while taken < wanted {
                sleep(RATE_RETRY).await;
                taken += limit.take_up_to(wanted - taken);
            }
        }
    }
}

fn lost(told: Option<ToldLost>) -> Lost {
    let told = told.unwrap_or_default();
    Lost {
        budget: told.budget,
        table: told.table,
        ring: told.ring,
        stream: told.stream,
        reader: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::validation::tests::told;
    use super::*;
    use crate::relay::tests::relay;
    use crate::view::{Filter, Query, Scope};

    fn stream(relay: &Arc<Relay>) -> DropletStream {
        DropletStream {
            relay: relay.clone(),
            droplet: "node-a".into(),
            id: 1,
            read: 0,
            of_droplet: RateLimit::new(OF_DROPLET_A_SECOND, OF_DROPLET_AT_ONCE),
            of_all: Arc::new(RateLimit::new(OF_ALL_A_SECOND, OF_ALL_AT_ONCE)),
            has_warned: false,
        }
    }

    fn query() -> Query {
        Query {
            scope: Scope::All,
            filter: Filter::default(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flow_that_makes_no_sense_spoils_no_other() {
        let relay = relay();
        let mut bad = told();
        bad.vni = 0;
        let report = Report {
            flows: vec![told(), bad, told()],
            ..Report::default()
        };
        stream(&relay).receive(report).await.unwrap();
        assert_eq!(relay.store.last(&query(), 0, 10).len(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_report_that_is_too_large_is_refused() {
        let relay = relay();
        let report = |count| Report {
            flows: vec![told(); count],
            ..Report::default()
        };
        stream(&relay).receive(report(MAX_FLOWS)).await.unwrap();
        let refused = stream(&relay).receive(report(MAX_FLOWS + 1)).await.unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        assert_eq!(relay.store.count(), MAX_FLOWS, "nothing of it is kept");
    }

    #[tokio::test(start_paused = true)]
    async fn a_droplet_that_reports_too_much_waits() {
        let stream = stream(&relay());
        let begin = tokio::time::Instant::now();
        let reports = OF_DROPLET_AT_ONCE as usize / MAX_FLOWS;
        for _ in 0..reports {
            stream.wait_for_turn(MAX_FLOWS).await;
        }
        assert!(begin.elapsed() < RATE_RETRY, "a burst is taken at once");
        for _ in 0..reports {
            stream.wait_for_turn(MAX_FLOWS).await;
        }
        let expected = Duration::from_secs(u64::from(OF_DROPLET_AT_ONCE / OF_DROPLET_A_SECOND));
        assert!(begin.elapsed() > expected * 9 / 10, "{:?}", begin.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn losses_of_a_droplet_are_told() {
        let relay = relay();
        let (_, mut following) = relay.store.follow(query(), 0, 0);
        let report = Report {
            lost: Some(ToldLost {
                budget: 14,
                ..ToldLost::default()
            }),
            ..Report::default()
        };
        stream(&relay).receive(report).await.unwrap();
        let expected = Lost {
            budget: 14,
            ..Lost::default()
        };
        let told = following.next().await;
        assert_eq!(
            told,
            Some(crate::store::Told::Lost(Some("node-a".into()), expected))
        );
    }
}
