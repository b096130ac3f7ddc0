//! One stream to thuban-observe: reports out, acknowledgements in.
//!
//! Invariant: at most [`MAX_ON_THE_WAY`] reports are not acknowledged. No report is sent twice.

use std::collections::VecDeque;
use std::time::Duration;

use thiserror::Error;
use thuban_proto::observe::observe_client::ObserveClient;
use thuban_proto::observe::{FlowMode, Lost, Report};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Request;

use super::queue::{Queue, sum};
use super::relay::{Droplet, Pace};
use crate::dial::Connection;

/// The most flows of a report.
pub const MAX_FLOWS: usize = 512;
/// The most reports that are sent and not acknowledged.
pub const MAX_ON_THE_WAY: usize = 8;

#[derive(Debug, Error)]
pub enum SessionError {
    #[error("thuban-observe refused or broke the stream")]
    Stream(#[source] Box<tonic::Status>),
    #[error("thuban-observe has accepted the connection and answers nothing")]
    Silent,
    #[error("thuban-observe acknowledged {given} reports of {sent}")]
    NotSent { given: u64, sent: u64 },
}

/// What a report tells, for as long as it is not acknowledged.
#[derive(Clone, Copy, Debug)]
struct Told {
    flows: usize,
    lost: Lost,
}

/// The reports of a stream that are not acknowledged yet, the oldest first.
#[derive(Debug)]
pub struct OnTheWay {
    reports: VecDeque<Told>,
    acknowledged: u64,
    /// When the last acknowledgement came, or the first report of `reports` was sent after it.
    since: Instant,
}

impl OnTheWay {
    pub fn new() -> Self {
        Self {
            reports: VecDeque::new(),
            acknowledged: 0,
            since: Instant::now(),
        }
    }

    /// Whether thuban-observe has read a report.
    pub const fn is_answered(&self) -> bool {
        self.acknowledged > 0
    }

    /// Returns what nobody has heard as far as anybody knows: all flows of these reports as lost, and the losses that
    /// they told.
    pub fn unheard(&self) -> (Lost, Lost) {
        let flows: usize = self.reports.iter().map(|told| told.flows).sum();
        let lost = Lost {
            stream: flows as u64,
            ..Lost::default()
        };
        let told = self.reports.iter().map(|told| told.lost);
        (lost, told.fold(Lost::default(), sum))
    }

    fn add(&mut self, report: &Report) {
        if self.reports.is_empty() {
            self.since = Instant::now();
        }
        self.reports.push_back(Told {
            flows: report.flows.len(),
            lost: report.lost.unwrap_or_default(),
        });
    }

    /// Forgets the first reports, up to this number of the stream.
    fn acknowledge(&mut self, given: u64) -> Result<(), SessionError> {
        let sent = self.acknowledged + self.reports.len() as u64;
        if given > sent {
            return Err(SessionError::NotSent { given, sent });
        }
        while self.acknowledged < given {
            self.reports.pop_front();
            self.acknowledged += 1;
            self.since = Instant::now();
        }
        Ok(())
    }

    fn is_silent(&self, limit: Duration) -> bool {
        !self.reports.is_empty() && self.since.elapsed() >= limit
    }
}

/// The outgoing side of a stream.
struct Reports<'a> {
    queue: &'a Queue,
    mode: FlowMode,
    sender: mpsc::Sender<Report>,
    on_the_way: &'a mut OnTheWay,
    last: Instant,
}

impl Reports<'_> {
    /// Sends what waits, as far as there is room on the way. Sends a report without flows if none was sent for `quiet`.
    fn send_waiting(&mut self, quiet: Duration) {
        // There is room for each report on the way, so the sender never waits.
        while self.on_the_way.reports.len() < MAX_ON_THE_WAY && self.sender.capacity() > 0 {
            let (flows, lost) = self.queue.take(MAX_FLOWS);
            let has_lost = lost != Lost::default();
            if flows.is_empty() && !has_lost && self.last.elapsed() < quiet {
                return;
            }
            self.send(Report {
                flows,
                lost: has_lost.then_some(lost),
                ..Report::default()
            });
        }
    }

    fn send(&mut self, mut report: Report) {
        report.mode = self.mode.into();
        self.on_the_way.add(&report);
        self.last = Instant::now();
        // If the stream is gone, the next look at its answers says so.
        let _ = self.sender.try_send(report);
    }
}

/// Runs one stream to its end. Afterwards `on_the_way` has the reports that were not acknowledged.
pub async fn run(
    connection: Connection,
    droplet: &Droplet,
    queue: &Queue,
    pace: &Pace,
    on_the_way: &mut OnTheWay,
) -> Result<(), SessionError> {
    let broken = |status| SessionError::Stream(Box::new(status));
    let (sender, receiver) = mpsc::channel(MAX_ON_THE_WAY);
    let mut reports = Reports {
        queue,
        mode: droplet.mode,
        sender,
        on_the_way,
        last: Instant::now(),
    };
    // It has no flows, because thuban-observe may refuse the stream.
    reports.send(Report {
        droplet: droplet.name.clone(),
        ..Report::default()
    });
    let mut request = Request::new(ReceiverStream::new(receiver));
    request.metadata_mut().insert("authorization", connection.token);
    let mut client = ObserveClient::new(connection.channel);
    let opened = timeout(pace.silence, client.report(request)).await;
    let mut answers = opened
        .map_err(|_| SessionError::Silent)?
        .map_err(broken)?
        .into_inner();
    queue.metrics.connected.set(1);
    let mut tick = interval(pace.report);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            answer = answers.message() => {
                let Some(answer) = answer.map_err(broken)? else {
                    return Ok(());
                };
                reports.on_the_way.acknowledge(answer.reports)?;
            }
            _ = tick.tick() => {
                if reports.on_the_way.is_silent(pace.silence) {
                    return Err(SessionError::Silent);
                }
                reports.send_waiting(pace.quiet);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(flows: usize, budget: u64) -> Report {
        Report {
            flows: vec![thuban_proto::observe::Flow::default(); flows],
            lost: Some(Lost {
                budget,
                ..Lost::default()
            }),
            ..Report::default()
        }
    }

    #[test]
    fn what_is_not_acknowledged_is_unheard() {
        let mut on_the_way = OnTheWay::new();
        for (flows, budget) in [(3, 1), (0, 5), (4, 0)] {
            on_the_way.add(&report(flows, budget));
        }
        assert!(!on_the_way.is_answered());
        on_the_way.acknowledge(1).unwrap();
        // It may come twice.
        on_the_way.acknowledge(1).unwrap();
        assert!(on_the_way.is_answered());
        let (lost, told) = on_the_way.unheard();
        assert_eq!((lost.stream, lost.budget, told.budget), (4, 0, 5));
        on_the_way.acknowledge(3).unwrap();
        assert_eq!(on_the_way.unheard(), (Lost::default(), Lost::default()));
        let error = on_the_way.acknowledge(4).unwrap_err();
        assert!(matches!(error, SessionError::NotSent { given: 4, sent: 3 }));
    }

    #[tokio::test(start_paused = true)]
    async fn only_who_owes_an_answer_is_silent() {
        let limit = Duration::from_secs(30);
        let pass = async |seconds| tokio::time::advance(Duration::from_secs(seconds)).await;
        let mut on_the_way = OnTheWay::new();
        pass(60).await;
        assert!(!on_the_way.is_silent(limit));
        on_the_way.add(&report(1, 0));
        pass(29).await;
        on_the_way.add(&report(1, 0));
        assert!(!on_the_way.is_silent(limit));
        on_the_way.acknowledge(1).unwrap();
        pass(29).await;
        assert!(!on_the_way.is_silent(limit));
        pass(1).await;
        assert!(on_the_way.is_silent(limit));
    }
}
