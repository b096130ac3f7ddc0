//! The side of thuban-observe of the stream, played by the test.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use thuban_proto::OBSERVE_TLS_NAME;
use thuban_proto::observe::observe_server::{Observe, ObserveServer};
use thuban_proto::observe::{Acknowledged, Flow, Lost, Report};
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};

use crate::operator::IN_THE_END;
use crate::tls;
use crate::wait::wait_until;

/// What all streams have told.
#[derive(Default)]
pub struct Heard {
    pub reports: Vec<Report>,
    /// The token of each stream.
    pub tokens: Vec<String>,
    /// Whether no report is acknowledged.
    pub is_silent: bool,
    stream: Option<Answers>,
}

/// The outgoing side of the newest stream.
struct Answers {
    sender: mpsc::UnboundedSender<Result<Acknowledged, Status>>,
    /// The number of the stream's reports that have come.
    reports: u64,
}

impl Heard {
    fn hear(&mut self, report: Report) {
        self.reports.push(report);
        if let Some(answers) = &mut self.stream {
            answers.reports += 1;
        }
        if !self.is_silent {
            self.acknowledge();
        }
    }

    /// Acknowledges all that has come by the newest stream.
    fn acknowledge(&self) {
        if let Some(answers) = &self.stream {
            let reports = answers.reports;
            // A stream that has ended wants no answer.
            let _ = answers.sender.send(Ok(Acknowledged { reports }));
        }
    }
}

pub struct Observer {
    pub heard: Arc<Mutex<Heard>>,
    pub address: String,
    pub ca: PathBuf,
    runtime: Option<tokio::runtime::Runtime>,
}

struct Service(Arc<Mutex<Heard>>);

impl Observer {
    /// Starts to serve on a listener. Its CA is a file of the folder.
    pub fn start(listener: TcpListener, folder: &Path) -> Self {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let ca = folder.join("observe-ca.pem");
        let address = listener.local_addr().unwrap().to_string();
        let routes = Routes::new(ObserveServer::new(Service(Arc::clone(&heard))));
        let runtime = tls::serve(listener, OBSERVE_TLS_NAME, &ca, routes);
        Self {
            heard,
            address,
            ca,
            runtime: Some(runtime),
        }
    }

    /// Acknowledges reports from now on, or does not.
    pub fn be_silent(&self, is_silent: bool) {
        let mut heard = self.heard.lock().unwrap();
        heard.is_silent = is_silent;
        if !is_silent {
            heard.acknowledge();
        }
    }

    /// Ends the stream.
    pub fn hang_up(&self) {
        self.heard.lock().unwrap().stream = None;
    }

    /// Returns what has come in all streams, in its order.
    pub fn flows(&self) -> Vec<Flow> {
        let heard = self.heard.lock().unwrap();
        let reports = heard.reports.iter();
        reports.flat_map(|report| report.flows.iter().cloned()).collect()
    }

    /// Returns the losses that reports have told, one after the other.
    pub fn lost(&self) -> Vec<Lost> {
        let heard = self.heard.lock().unwrap();
        heard.reports.iter().filter_map(|report| report.lost).collect()
    }

    /// Waits until what was heard is so; panics after a while.
    pub fn wait_for(&self, what: &str, mut is_so: impl FnMut(&Heard) -> bool) {
        let look = || Ok(is_so(&self.heard.lock().unwrap()).then_some(()));
        wait_until(what, IN_THE_END, Duration::from_millis(5), look).unwrap();
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        self.hang_up();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[tonic::async_trait]
impl Observe for Service {
    type ReportStream = UnboundedReceiverStream<Result<Acknowledged, Status>>;

    async fn report(
        &self,
        request: Request<Streaming<Report>>,
    ) -> Result<Response<Self::ReportStream>, Status> {
        let token = request.metadata().get("authorization");
        let token = token.map(|token| token.to_str().unwrap().to_owned());
        let (sender, receiver) = mpsc::unbounded_channel();
        {
            let mut heard = self.0.lock().unwrap();
            heard.tokens.extend(token);
            heard.stream = Some(Answers { sender, reports: 0 });
        }
        let heard = Arc::clone(&self.0);
        let mut reports = request.into_inner();
        tokio::spawn(async move {
            while let Some(Ok(report)) = reports.next().await {
                heard.lock().unwrap().hear(report);
            }
        });
        Ok(Response::new(UnboundedReceiverStream::new(receiver)))
    }
}
