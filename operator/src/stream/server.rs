//! Serves one stream for each droplet: Hello, then programs to the droplet and acks from it.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kube::Client;
use thiserror::Error;
use thuban_api::identifiers::Vni;
use thuban_authority::ServerCertificate;
use thuban_authority::identity::{self, Account, Identity, IdentityError};
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::{DropletMessage, Hello, Nack};
use thuban_proto::{OPERATOR_TOKEN_AUDIENCE, PROTOCOL_VERSION};
use thuban_rows::{BASELINE, Kind, Kinds};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::TlsConnectInfo;
use tonic::{Request, Response, Status, Streaming};
use tracing::{debug, info, warn};

use super::door::{Caller, Door, Serving};
use super::service::{Messages, Transit};
use super::tls::secured;
use crate::hub::{Hub, Outgoing};
use crate::metrics;
use crate::model::rows::{self, Key};

/// Who may dial.
const TRANSITD: Account = Account {
    name: "transitd",
    audience: OPERATOR_TOKEN_AUDIENCE,
};
/// How long a stream may take to say Hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a peer may be silent before it is asked, and how long it then has to answer.
const KEEPALIVE: Duration = Duration::from_secs(4);
/// The most bytes of a caller that wait to be read.
const WINDOW: u32 = 65_535;
/// How often the server checks whether a stream's droplet acks.
const LOOK: Duration = Duration::from_secs(5);
/// How long a droplet may take to make room for a program.
const SLOWEST: Duration = Duration::from_secs(30);
/// The most epochs by which a droplet's report may be ahead of the leader's.
const LARGEST_LEAP: u64 = 1 << 20;

#[derive(Debug, Error)]
pub enum ServeError {
    #[error("listening on {address}: {source}")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
    #[error("TLS of the stream server: {0}")]
    Tls(#[from] rustls::Error),
    #[error("stream server on {address}: {source}")]
    Serve {
        address: SocketAddr,
        source: tonic::transport::Error,
    },
}

pub struct TransitService {
    pub door: Arc<Door>,
    /// The hub; none until its world is complete: droplets may already dial, and wait.
    pub hub: watch::Receiver<Option<Arc<Hub>>>,
    pub client: Client,
    /// Receives an epoch higher than ours that a droplet has followed.
    pub outranked: mpsc::Sender<u64>,
    /// The highest epoch that each droplet has seen, if it is above this leader's.
    pub witnesses: Mutex<HashMap<String, u64>>,
}

/// Serves until the process ends.
pub async fn serve(
    address: SocketAddr,
    certificate: Arc<ServerCertificate>,
    service: TransitService,
) -> Result<(), ServeError> {
    let listener = TcpListener::bind(address)
        .await
        .map_err(|source| ServeError::Listen { address, source })?;
    serve_at(listener, address, certificate, service).await
}

pub(super) async fn serve_at(
    listener: TcpListener,
    address: SocketAddr,
    certificate: Arc<ServerCertificate>,
    service: TransitService,
) -> Result<(), ServeError> {
    let connections = secured(service.door.clone().incoming(listener), certificate)?;
    Server::builder()
        // What a caller sends is kept unread until it has proven itself.
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW)
        .http2_keepalive_interval(Some(KEEPALIVE))
        .http2_keepalive_timeout(Some(KEEPALIVE))
        // A droplet has one stream.
        .max_concurrent_streams(2)
        .add_service(Transit::new(service))
        .serve_with_incoming(connections)
        .await
        .map_err(|source| ServeError::Serve { address, source })
}

impl TransitService {
    /// Opens a droplet's stream. A droplet that has proven itself gets its answer at once, and its messages as soon as
    /// the rows are known: it would dial again otherwise, and prove itself again.
    pub(super) async fn connect(
        self: Arc<Self>,
        request: Request<Streaming<DropletMessage>>,
    ) -> Result<Response<Messages>, Status> {
        let caller = request
            .extensions()
            .get::<TlsConnectInfo<Caller>>()
            .map(|info| info.get_ref().clone())
            .ok_or_else(|| Status::internal("the connection did not come by the door"))?;
        let identity = self
            .identify(&request, &caller)
            .await
            .inspect_err(|_| metrics::Stream::ends("identity"))?;
        let mut incoming = request.into_inner();
        let hello = hello(&mut incoming).await?;
        check(&hello, &identity).inspect_err(|_| metrics::Stream::ends("hello"))?;
        let serving = caller.serves(&identity.node);
        let proven = Instant::now();
        let (outgoing, receiver) = mpsc::channel(64);
        tokio::spawn(async move {
            let opened = tokio::select! {
                opened = self.open(hello, identity, serving) => opened,
                () = outgoing.closed() => return,
            };
            match opened {
                Ok((stream, programs)) => stream.run(proven, incoming, programs, outgoing).await,
                Err(status) => {
                    let _ = outgoing.try_send(Err(status));
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    /// Opens the stream of a droplet that has proven itself, once the rows are known.
    async fn open(
        &self,
        hello: Hello,
        identity: Identity,
        serving: Serving,
    ) -> Result<(DropletStream, mpsc::UnboundedReceiver<Outgoing>), Status> {
        let hub = self.hub().await?;
        if hello.highest_epoch > hub.epoch() {
            // The leap must not be larger than a Lease can carry on from.
            if hello.highest_epoch - hub.epoch() <= LARGEST_LEAP
                && let Some(epoch) = self.witness(&hub, &identity.node, hello.highest_epoch)
            {
                let _ = self.outranked.try_send(epoch);
            }
            let message = format!(
                "epoch {} was seen, this leader's is {}",
                hello.highest_epoch,
                hub.epoch()
            );
            return Err(Status::unavailable(message));
        }
        let subscriptions: Vec<(Vni, IpAddr)> = hello
            .subscriptions
            .iter()
            .filter_map(|wanted| Some((Vni::new(wanted.vni)?, rows::address(&wanted.address)?)))
            .collect();
        let kinds = Kinds::of(&hello);
        let lacking: Vec<&str> = kinds.lacking().map(Kind::name).collect();
        if !lacking.is_empty() {
            warn!(
                droplet = identity.node,
                ?lacking,
                "transitd does not understand rows of these kinds and is not sent them: upgrade it"
            );
        }
        let (id, programs) = hub.open_after(&hello, &identity.node, &subscriptions, kinds);
        info!(
            droplet = identity.node,
            attachments = hello.attachments.len(),
            subscriptions = subscriptions.len(),
            "stream opened"
        );
        let stream = DropletStream {
            hub,
            identity,
            id,
            _serving: serving,
        };
        Ok((stream, programs))
    }

    /// Notes the epoch that a droplet has seen. Returns the epoch that more than a third of the droplets have seen, if
    /// there is one above this leader's: the false claim of a single droplet must not end all leadership.
    fn witness(&self, hub: &Hub, droplet: &str, epoch: u64) -> Option<u64> {
        let mut witnesses = self.witnesses.lock().unwrap_or_else(PoisonError::into_inner);
        witnesses.insert(droplet.to_owned(), epoch);
        let known = |name: &String| hub.read(|world| world.is_droplet(name));
        witnesses.retain(|name, _| known(name));
        seen_by_many(
            witnesses.values().copied().collect(),
            hub.read(|world| world.droplets().count()),
        )
    }

    async fn hub(&self) -> Result<Arc<Hub>, Status> {
        let mut hub = self.hub.clone();
        let hub = hub.wait_for(Option::is_some).await;
        let hub = hub.ok().and_then(|hub| hub.clone());
        hub.ok_or_else(|| Status::unavailable("this operator is stopping; dial again"))
    }

    async fn identify<T>(&self, request: &Request<T>, caller: &Caller) -> Result<Identity, Status> {
        let token = request
            .metadata()
            .get("authorization")
            .and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "))
            .ok_or(IdentityError::NoToken)
            .map_err(|error| status(&error))?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map(|time| time.as_secs())
            .unwrap_or_default();
        // Any caller may send any number of these.
        identity::check_claims(TRANSITD, token, now).map_err(|error| {
            metrics::refuses("claims");
            debug!(error = %error, "a stream was refused");
            status(&error)
        })?;
        let _turn = caller
            .review()
            .await
            .ok_or(IdentityError::Busy)
            .map_err(|error| status(&error))?;
        identity::review(self.client.clone(), TRANSITD, token, now)
            .await
            .map_err(|error| {
                metrics::refuses("token");
                warn!(error = %error, "a stream was refused");
                status(&error)
            })
    }
}

/// Returns the highest epoch that more than a third of the droplets have seen.
fn seen_by_many(mut epochs: Vec<u64>, droplets: usize) -> Option<u64> {
    epochs.sort_unstable_by(|one, other| other.cmp(one));
    epochs.get(droplets / 3).copied()
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

async fn hello(incoming: &mut Streaming<DropletMessage>) -> Result<Hello, Status> {
    let first = tokio::time::timeout(HELLO_TIMEOUT, incoming.message())
        .await
        .map_err(|_| Status::deadline_exceeded("no Hello within 10 s"))??;
    match first.and_then(|message| message.message) {
        Some(Message::Hello(hello)) => Ok(hello),
        _ => Err(Status::invalid_argument("the first message must be Hello")),
    }
}

fn check(hello: &Hello, identity: &Identity) -> Result<(), Status> {
    if hello.droplet != identity.node {
        let message = format!(
            "the token is of node {}, Hello.droplet is {:?}",
            identity.node, hello.droplet
        );
        return Err(Status::permission_denied(message));
    }
    if hello.protocol_version.abs_diff(PROTOCOL_VERSION) > 1 {
        let message = format!(
            "protocol version {}, expected {PROTOCOL_VERSION} or one apart; update transitd or the operator",
            hello.protocol_version
        );
        return Err(Status::failed_precondition(message));
    }
    let kinds = Kinds::of(hello);
    if let Some(kind) = BASELINE.iter().find(|kind| !kinds.contains(**kind)) {
        let message = format!("Hello.row_kinds lacks {kind}, which every transitd must understand");
        return Err(Status::failed_precondition(message));
    }
    Ok(())
}

/// An open stream of a proven droplet.
struct DropletStream {
    hub: Arc<Hub>,
    identity: Identity,
    id: u64,
    _serving: Serving,
}

impl DropletStream {
    /// `proven`: when the token was reviewed.
    async fn run(
        self,
        proven: Instant,
        mut incoming: Streaming<DropletMessage>,
        mut programs: mpsc::UnboundedReceiver<Outgoing>,
        outgoing: mpsc::Sender<Result<Outgoing, Status>>,
    ) {
        let expiry = tokio::time::sleep(self.identity.valid_for.saturating_sub(proven.elapsed()));
        tokio::pin!(expiry);
        let mut look = tokio::time::interval(LOOK);
        let mut counted = metrics::Stream::default();
        let mut cause = None;
        let end = loop {
            tokio::select! {
                program = programs.recv() => {
                    let Some(program) = program else {
                        let end = Status::aborted("replaced by a newer stream, or not a droplet any more");
                        let _ = outgoing.try_send(Err(end));
                        break "replaced or not a droplet any more";
                    };
                    counted.sends(&program);
                    match tokio::time::timeout(SLOWEST, outgoing.send(Ok(program))).await {
                        Ok(Ok(())) => {}
                        Ok(Err(_)) => break "the droplet went away",
                        Err(_) => break "the droplet takes nothing",
                    }
                }
                message = incoming.message() => match message {
                    Ok(Some(message)) => {
                        counted.receives(&message);
                        if let Err(status) = self.receive(message) {
                            let _ = outgoing.try_send(Err(status));
                            break "a message could not be read";
                        }
                    }
                    Ok(None) => break "the droplet went away",
                    Err(status) => {
                        cause = Some(status.message().to_owned());
                        break "the droplet went away";
                    }
                },
                _ = look.tick() => if self.hub.is_silent(&self.identity.node, self.id) {
                    let _ = outgoing.try_send(Err(Status::aborted("a row has not been acked for a minute; dial again")));
                    break "the droplet acks too late";
                },
                () = &mut expiry => {
                    let _ = outgoing.try_send(Err(Status::unauthenticated("the token has expired; dial again")));
                    break "the token has expired";
                }
            }
        };
        self.hub.close(&self.identity.node, self.id);
        metrics::Stream::ends(end);
        info!(droplet = self.identity.node, end, cause, "stream closed");
    }

    fn receive(&self, message: DropletMessage) -> Result<(), Status> {
        let droplet = &self.identity.node;
        let read = |bytes: &[u8]| {
            rows::address(bytes)
                .ok_or_else(|| Status::invalid_argument("address: expected 16 bytes, IPv4 mapped"))
        };
        match message.message {
            Some(Message::Ack(ack)) => {
                let is_valid = self.hub.ack(droplet, self.id, ack.sequence);
                return is_valid
                    .then_some(())
                    .ok_or_else(|| Status::invalid_argument("Ack.sequence was not sent on this stream"));
            }
            Some(Message::Nack(nack)) => self.nack(&nack)?,
            Some(Message::Subscribe(wanted)) => {
                let address = read(&wanted.address)?;
                if let Some(vni) = Vni::new(wanted.vni) {
                    self.hub.subscribe(droplet, vni, address, true);
                }
            }
            Some(Message::Unsubscribe(given)) => {
                let address = read(&given.address)?;
                if let Some(vni) = Vni::new(given.vni) {
                    self.hub.subscribe(droplet, vni, address, false);
                }
            }
            Some(Message::Attachment(change)) => {
                if let Some(attachment) = &change.attachment {
                    self.hub.attach(droplet, attachment, change.removed);
                }
            }
            Some(Message::Load(load)) => self.hub.report(droplet, &load),
            Some(Message::Denials(denials)) => self.hub.note_denials(droplet, &denials),
            Some(Message::Checks(checks)) => self.hub.note_checks(droplet, &checks.checked),
            Some(Message::Probed(probed)) => self.hub.note_probed(droplet, probed),
            Some(Message::Hello(_)) => return Err(Status::invalid_argument("Hello comes once")),
            // This is a newer droplet's message, which needs no understanding.
            None => {}
        }
        Ok(())
    }

    fn nack(&self, nack: &Nack) -> Result<(), Status> {
        let key = nack
            .key
            .as_ref()
            .and_then(|key| Key::try_from(key).ok())
            .ok_or_else(|| {
                Status::aborted(format!(
                    "a program was not applied ({}); dial again",
                    nack.message
                ))
            })?;
        warn!(droplet = self.identity.node, ?key, reason = ?nack.reason(), message = nack.message, "row refused");
        self.hub
            .nack(&self.identity.node, self.id, nack.sequence, &key, nack.reason());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use thuban_proto::PROTOCOL_VERSION;
    use thuban_proto::transit::Hello;
    use tonic::Code;

    use super::{Identity, Kinds, check, seen_by_many};

    #[test]
    fn droplet_needs_own_token_and_version_at_most_one_apart() {
        let identity = Identity {
            node: "node-a".into(),
            valid_for: Duration::MAX,
        };
        let hello = |droplet: &str, protocol_version| Hello {
            droplet: droplet.into(),
            protocol_version,
            ..Hello::default()
        };
        for version in PROTOCOL_VERSION - 1..=PROTOCOL_VERSION + 1 {
            check(&hello("node-a", version), &identity).unwrap();
        }
        for version in [PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2, u32::MAX] {
            let refused = check(&hello("node-a", version), &identity).unwrap_err();
            assert_eq!(refused.code(), Code::FailedPrecondition);
            let told = refused.message();
            assert!(told.contains(&format!("version {version}")), "{told}");
            assert!(told.contains(&format!("expected {PROTOCOL_VERSION}")), "{told}");
        }
        let refused = check(&hello("node-b", PROTOCOL_VERSION), &identity).unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
    }

    #[test]
    fn named_kinds_of_rows_include_those_that_all_understand() {
        let identity = Identity {
            node: "node-a".into(),
            valid_for: Duration::MAX,
        };
        let hello = |row_kinds: Vec<i32>| Hello {
            droplet: "node-a".into(),
            protocol_version: PROTOCOL_VERSION,
            row_kinds,
            ..Hello::default()
        };
        let all = Kinds::all().numbers();
        let newer = [all.clone(), vec![1 << 20]].concat();
        for kinds in [Vec::new(), all.clone(), newer] {
            check(&hello(kinds), &identity).unwrap();
        }
        let refused = check(&hello(all[1..].to_vec()), &identity).unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().contains("lacks droplet"), "{refused}");
    }

    #[test]
    fn one_droplet_of_many_can_not_end_leadership() {
        assert_eq!(seen_by_many(vec![9], 1), Some(9));
        assert_eq!(seen_by_many(vec![1 << 20], 3), None);
        assert_eq!(
            seen_by_many(vec![7, 1 << 20], 3),
            Some(7),
            "nor say how far it goes"
        );
        assert_eq!(seen_by_many(vec![7; 333], 1000), None);
        assert_eq!(seen_by_many(vec![7; 334], 1000), Some(7));
    }
}
