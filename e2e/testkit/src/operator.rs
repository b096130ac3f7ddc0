//! The operator's side of the stream, played by the test: TLS with the fixed name, rows as the test says.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thuban_proto::OPERATOR_TLS_NAME;
use thuban_proto::transit::droplet_message::Message;
use thuban_proto::transit::transit_server::{Transit, TransitServer};
use thuban_proto::transit::{
    DropletMessage, Hello, OperatorMessage, PolicyKey, Probe, Program, ReportDenials, Row, RowKey,
    operator_message, row,
};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt};
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::tls;
use crate::wait::wait_until;

/// How long tests wait for a condition that must become true in the end: on a busy machine the kernel's locks and the
/// disk keep everything waiting.
pub const IN_THE_END: Duration = Duration::from_mins(1);

/// The state that all streams share.
#[derive(Default)]
pub struct Shared {
    pub rows: Vec<row::Row>,
    pub epoch: u64,
    pub received: Vec<Message>,
    pub tokens: Vec<String>,
    /// The only protocol version that the operator accepts; none: any.
    pub speaks: Option<u32>,
    stream: Option<(mpsc::UnboundedSender<Result<OperatorMessage, Status>>, u64)>,
}

pub struct Operator {
    pub shared: Arc<Mutex<Shared>>,
    pub address: String,
    pub ca: PathBuf,
    runtime: Option<tokio::runtime::Runtime>,
}

struct Service(Arc<Mutex<Shared>>);

impl Operator {
    /// Starts to serve on a listener that was made in the node's namespace.
    pub fn start(listener: std::net::TcpListener, directory: &Path, rows: Vec<row::Row>) -> Self {
        let ca = directory.join("ca.pem");
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Mutex::new(Shared {
            rows,
            epoch: 1,
            ..Default::default()
        }));
        let routes = Routes::new(TransitServer::new(Service(Arc::clone(&shared))));
        let runtime = tls::serve(listener, OPERATOR_TLS_NAME, &ca, routes);
        Self {
            shared,
            address,
            ca,
            runtime: Some(runtime),
        }
    }

    /// Sends a delta and remembers it for later snapshots. Returns its sequence.
    pub fn push(&self, upserts: Vec<row::Row>, deletes: Vec<RowKey>) -> u64 {
        self.shared.lock().unwrap().rows.extend(upserts.iter().cloned());
        let upserts = upserts.into_iter().map(|row| Row { row: Some(row) });
        self.push_raw(upserts.collect(), deletes)
    }

    /// Replaces a row by another one; without a stream this comes with the next snapshot.
    pub fn replace(&self, old: &row::Row, deletes: Vec<RowKey>, new: row::Row) {
        let mut shared = self.shared.lock().unwrap();
        shared.rows.retain(|row| row != old);
        shared.rows.push(new.clone());
        let epoch = shared.epoch;
        if let Some((sender, sequence)) = &mut shared.stream {
            *sequence += 1;
            let program = Program {
                epoch,
                sequence: *sequence,
                snapshot: false,
                upserts: vec![Row { row: Some(new) }],
                deletes,
            };
            // transitd redials a stream that has ended.
            let _ = sender.send(Ok(OperatorMessage {
                message: Some(operator_message::Message::Program(program)),
            }));
        }
    }

    /// Sends a delta, whatever it holds, and forgets it. Returns its sequence.
    pub fn push_raw(&self, upserts: Vec<Row>, deletes: Vec<RowKey>) -> u64 {
        let mut shared = self.shared.lock().unwrap();
        let epoch = shared.epoch;
        let (sender, sequence) = shared.stream.as_mut().expect("no stream");
        *sequence += 1;
        let program = Program {
            epoch,
            sequence: *sequence,
            snapshot: false,
            upserts,
            deletes,
        };
        sender
            .send(Ok(OperatorMessage {
                message: Some(operator_message::Message::Program(program)),
            }))
            .unwrap();
        *sequence
    }

    /// Asks what these sets of network policy deny, each by its VNI and id.
    pub fn ask_for_denials(&self, sets: &[(u32, u32)]) {
        self.ask(sets, false);
    }

    /// Asks which packets of pods are dropped.
    pub fn ask_for_drops(&self) {
        self.ask(&[], true);
    }

    fn ask(&self, sets: &[(u32, u32)], drops: bool) {
        let key = |(vni, id): &(u32, u32)| PolicyKey { vni: *vni, id: *id };
        let asked = ReportDenials {
            sets: sets.iter().map(key).collect(),
            drops,
        };
        self.say(operator_message::Message::ReportDenials(asked));
    }

    /// Asks for a probe of a path.
    pub fn probe(&self, probe: Probe) {
        self.say(operator_message::Message::Probe(probe));
    }

    fn say(&self, message: operator_message::Message) {
        let shared = self.shared.lock().unwrap();
        let (sender, _) = shared.stream.as_ref().expect("no stream");
        let message = Some(message);
        sender.send(Ok(OperatorMessage { message })).unwrap();
    }

    pub fn push_and_wait(&self, upserts: Vec<row::Row>, deletes: Vec<RowKey>) {
        let sequence = self.push(upserts, deletes);
        self.wait_for_ack_of(sequence);
    }

    pub fn wait_for_ack_of(&self, sequence: u64) {
        self.wait_for(
            "the ack of a delta",
            |m| matches!(m, Message::Ack(ack) if ack.sequence >= sequence),
        );
    }

    /// Returns the first received message that fits; panics after a while.
    pub fn wait_for(&self, what: &str, fits: impl Fn(&Message) -> bool) -> Message {
        let look = || Ok(self.received(&fits));
        wait_until(what, IN_THE_END, Duration::from_millis(20), look).unwrap()
    }

    fn received(&self, fits: &impl Fn(&Message) -> bool) -> Option<Message> {
        let shared = self.shared.lock().unwrap();
        shared.received.iter().find(|message| fits(message)).cloned()
    }

    /// Returns how many messages that fit have come.
    pub fn count(&self, fits: impl Fn(&Message) -> bool) -> usize {
        let shared = self.shared.lock().unwrap();
        shared.received.iter().filter(|message| fits(message)).count()
    }

    pub fn wait_for_ack(&self) {
        self.wait_for("an ack", |m| matches!(m, Message::Ack(_)));
    }

    pub fn hellos(&self) -> Vec<Hello> {
        let hello = |m: &Message| {
            if let Message::Hello(hello) = m {
                Some(hello.clone())
            } else {
                None
            }
        };
        self.shared
            .lock()
            .unwrap()
            .received
            .iter()
            .filter_map(hello)
            .collect()
    }

    pub fn forget_received(&self) {
        self.shared.lock().unwrap().received.clear();
    }

    /// Ends the stream; transitd dials again.
    pub fn hang_up(&self) {
        self.shared.lock().unwrap().stream = None;
    }
}

impl Drop for Operator {
    fn drop(&mut self) {
        self.shared.lock().unwrap().stream = None;
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[tonic::async_trait]
impl Transit for Service {
    type ConnectStream = Pin<Box<dyn Stream<Item = Result<OperatorMessage, Status>> + Send>>;

    async fn connect(
        &self,
        request: Request<Streaming<DropletMessage>>,
    ) -> Result<Response<Self::ConnectStream>, Status> {
        let token = request
            .metadata()
            .get("authorization")
            .map(|v| v.to_str().unwrap().to_owned());
        let mut inbound = request.into_inner();
        let first = inbound.message().await?.and_then(|message| message.message);
        if let Some(Message::Hello(hello)) = &first {
            let speaks = self.0.lock().unwrap().speaks;
            if speaks.is_some_and(|version| version != hello.protocol_version) {
                return Err(Status::failed_precondition("protocol version"));
            }
        }
        let (sender, receiver) = mpsc::unbounded_channel();
        let shared = Arc::clone(&self.0);
        {
            let mut shared = shared.lock().unwrap();
            shared.tokens.extend(token);
            shared.received.extend(first);
            let upserts = shared
                .rows
                .iter()
                .map(|row| Row {
                    row: Some(row.clone()),
                })
                .collect();
            let program = Program {
                epoch: shared.epoch,
                sequence: 1,
                snapshot: true,
                upserts,
                deletes: vec![],
            };
            let message = OperatorMessage {
                message: Some(operator_message::Message::Program(program)),
            };
            sender.send(Ok(message)).unwrap();
            shared.stream = Some((sender, 1));
        }
        tokio::spawn(async move {
            while let Some(Ok(message)) = inbound.next().await {
                shared.lock().unwrap().received.extend(message.message);
            }
        });
        let outbound = tokio_stream::wrappers::UnboundedReceiverStream::new(receiver);
        Ok(Response::new(Box::pin(outbound)))
    }
}
