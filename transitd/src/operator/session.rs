//! One stream: Hello, then programs in, acks and nacks, subscriptions and attachment changes out.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use thiserror::Error;
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::transit_client::TransitClient;
use thuban_proto::transit::{self as proto, DropletMessage, Hello, operator_message};
use thuban_rows::Kinds;
use thuban_telemetry::traces::{self, Span};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Request;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::Channel;
use tracing::debug;

use super::epoch::{Epoch, EpochError};
use super::peer::{Outbox, Peer};
use crate::state::service_changes::Changes;

#[derive(Debug, Error)]
pub enum SessionError {
    #[error("the operator refused or broke the stream")]
    Stream(#[source] Box<tonic::Status>),
    #[error(transparent)]
    Epoch(#[from] EpochError),
    #[error("program {given} came after {last}: the stream lost a program")]
    Sequence { given: u64, last: u64 },
    #[error("the stream's first program is not a snapshot")]
    NoSnapshot,
    #[error("the operator accepted the stream and sends nothing")]
    Silent,
    #[error("a program could not be applied completely")]
    Interrupted,
}

/// How long opening the stream may take: the operator has the token reviewed meanwhile, after those of all who came
/// before.
const OPEN_TIMEOUT: Duration = Duration::from_mins(1);

/// The time between looks whether old rules still lead anybody anywhere.
const OLD_RULES_LOOK: Duration = Duration::from_secs(1);

/// Runs one stream to its end, in a version of the contract that the operator may know.
pub async fn run(
    peer: &Arc<impl Peer>,
    mut client: TransitClient<Channel>,
    token: MetadataValue<Ascii>,
    epoch: &mut Epoch,
    version: u32,
) -> Result<(), SessionError> {
    let (sender, receiver) = mpsc::unbounded_channel();
    peer.open(hello(version, epoch.highest()), &sender);
    let (waker, woken) = mpsc::channel(1);
    let work = Work::default();
    let rest = Rest {
        work: Arc::clone(&work),
        waker,
    };
    let (result, ()) = tokio::join!(
        receive(peer, &mut client, token, epoch, &sender, receiver, rest),
        finish(peer, &work, woken, &sender),
    );
    peer.close();
    result
}

/// Returns the Hello that every transitd of this version sends.
fn hello(version: u32, highest_epoch: u64) -> Hello {
    Hello {
        protocol_version: version,
        highest_epoch,
        row_kinds: Kinds::all().numbers(),
        front_tunnel: true,
        ..Hello::default()
    }
}

/// The work that programs left, the ack that waits for it, and the spans that end with the ack.
#[derive(Debug)]
struct Rest {
    work: Work,
    waker: mpsc::Sender<()>,
}

type Work = Arc<Mutex<Option<(proto::Ack, Changes, Vec<Span>)>>>;

impl Rest {
    fn add(&self, ack: proto::Ack, changes: Changes, spans: Vec<Span>) -> Result<(), SessionError> {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *work {
            Some((waiting, earlier, begun)) => {
                *waiting = ack;
                earlier.add(changes);
                begun.extend(spans);
            }
            None => *work = Some((ack, changes, spans)),
        }
        match self.waker.try_send(()) {
            // The channel is full: the task is woken already.
            Ok(()) | Err(mpsc::error::TrySendError::Full(())) => Ok(()),
            Err(mpsc::error::TrySendError::Closed(())) => Err(SessionError::Interrupted),
        }
    }
}

/// Does the work that programs left, everything that came meanwhile at once, and acks. When the stream ends, it still
/// does what is left.
async fn finish(peer: &Arc<impl Peer>, work: &Work, mut woken: mpsc::Receiver<()>, sender: &Outbox) {
    while woken.recv().await.is_some() {
        let taken = work.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some((ack, changes, spans)) = taken else {
            continue;
        };
        let mut nacks = Vec::new();
        if !changes.is_empty() {
            let finishing = Arc::clone(peer);
            match tokio::task::spawn_blocking(move || finishing.finish(changes)).await {
                Ok(refused) => nacks = refused,
                Err(_) => return,
            }
            outlast_old_rules(peer, sender).await;
        }
        send(
            sender,
            nacks.into_iter().map(Message::Nack).chain([Message::Ack(ack)]),
        );
        spans.into_iter().for_each(Span::end);
    }
}

/// Waits until no rule that could not be replaced leads anybody anywhere, or until nobody waits for the ack any more.
async fn outlast_old_rules(peer: &Arc<impl Peer>, sender: &Outbox) {
    while !sender.is_closed() {
        let asked = Arc::clone(peer);
        let leads = tokio::task::spawn_blocking(move || asked.leads_by_old_rules()).await;
        if !leads.is_ok_and(|leads| leads) {
            return;
        }
        sleep(OLD_RULES_LOOK).await;
    }
}

fn send(sender: &Outbox, messages: impl Iterator<Item = Message>) {
    for message in messages {
        // The next read notices that the stream is gone.
        let _ = sender.send(DropletMessage {
            message: Some(message),
        });
    }
}

async fn receive(
    peer: &Arc<impl Peer>,
    client: &mut TransitClient<Channel>,
    token: MetadataValue<Ascii>,
    epoch: &mut Epoch,
    sender: &Outbox,
    receiver: mpsc::UnboundedReceiver<DropletMessage>,
    rest: Rest,
) -> Result<(), SessionError> {
    let broken = |status| SessionError::Stream(Box::new(status));
    let mut request = Request::new(UnboundedReceiverStream::new(receiver));
    request.metadata_mut().insert("authorization", token);
    let opened = timeout(OPEN_TIMEOUT, client.connect(request)).await;
    let mut stream = opened
        .map_err(|_| SessionError::Silent)?
        .map_err(broken)?
        .into_inner();
    let mut last = 0;
    while let Some(message) = stream.message().await.map_err(broken)? {
        let program = match message.message {
            Some(operator_message::Message::Program(program)) => program,
            Some(operator_message::Message::ReportDenials(asked)) => {
                peer.report_denials(asked);
                continue;
            }
            Some(operator_message::Message::Probe(asked)) => {
                peer.probe(asked);
                continue;
            }
            // This is a newer operator's message, which needs no understanding.
            None => continue,
        };
        if last == 0 && !program.snapshot {
            return Err(SessionError::NoSnapshot);
        }
        if program.sequence != last + 1 {
            return Err(SessionError::Sequence {
                given: program.sequence,
                last,
            });
        }
        epoch.admit(program.epoch)?;
        last = program.sequence;
        let ack = proto::Ack {
            epoch: program.epoch,
            sequence: program.sequence,
        };
        debug!(
            sequence = last,
            snapshot = program.snapshot,
            upserts = program.upserts.len(),
            deletes = program.deletes.len(),
            "program received"
        );
        let spans = begin_spans(peer, &program);
        let applying = Arc::clone(peer);
        // Tasks of others go on meanwhile, among them the keepalive.
        let applied = tokio::task::spawn_blocking(move || applying.apply(program)).await;
        let (nacks, changes) = applied.map_err(|_| SessionError::Interrupted)?;
        send(sender, nacks.into_iter().map(Message::Nack));
        rest.add(ack, changes, spans)?;
    }
    Ok(())
}

/// Begins a span for each row of a pod that waits for its network. A snapshot brings the rows of all pods again.
fn begin_spans(peer: &Arc<impl Peer>, program: &proto::Program) -> Vec<Span> {
    if program.snapshot || !traces::is_on() {
        return Vec::new();
    }
    let rows = program.upserts.iter().filter_map(|row| row.row.as_ref());
    let locals = rows.filter_map(|row| match row {
        proto::row::Row::Local(local) if peer.is_awaited(&local.pod_uid) => Some(local),
        _ => None,
    });
    let begin = |local: &proto::LocalRow| {
        let name = if local.ready {
            "apply ready row"
        } else {
            "apply row"
        };
        Span::begin(&local.pod_uid, name)
            .with("k8s.namespace.name", &local.pod_namespace)
            .with("k8s.pod.name", &local.pod_name)
    };
    locals.map(begin).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hello_names_all_kinds_of_rows() {
        let told = Kinds::of(&hello(2, 7));
        assert_eq!(told.lacking().count(), 0);
        assert_eq!(told, Kinds::all());
    }
}
