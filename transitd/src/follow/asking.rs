//! The verb's side: it asks the daemon, and hears what the daemon tells until the verb is to end.

use std::marker::PhantomData;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use aya::Pod;
use serde_json::json;
use thiserror::Error;
use thuban_proto::inspect::FollowReply;
use thuban_proto::inspect::inspect_client::InspectClient;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::{Sleep, sleep, timeout};
use tonic::transport::{Channel, Endpoint};
use tonic::{Response, Status, Streaming};

use crate::dataplane::ring::decode;
use crate::socket;

/// How long the daemon may take to begin.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that may be on their way to a verb. What a slow verb does not read waits in the daemon, which counts it.
const WINDOW: u32 = 64 * 1024;

/// The result of a call that follows.
pub type Called = Result<Response<Streaming<FollowReply>>, Status>;

#[derive(Debug, Error)]
pub enum AskError {
    #[error(
        "transitd does not run on this node, or its socket is not {socket}: this command needs the running daemon; \
         look at transitd's pod and its log"
    )]
    NotRunning {
        socket: String,
        source: tonic::transport::Error,
    },
    #[error(
        "transitd does not answer within {} s: look at transitd's pod and its log",
        ANSWER_TIMEOUT.as_secs()
    )]
    Silent,
    #[error("{}", .0.message())]
    Refused(Status),
    #[error("transitd ended, or could not go on: look at its log, and run this command again")]
    Ended,
    #[error("transitd is of another version than this command: run the command of the same image")]
    Version,
    #[error("cannot listen for signals")]
    Signal(#[source] std::io::Error),
}

/// What the daemon tells, until a signal or the end of the time.
pub struct Following<T> {
    replies: Streaming<FollowReply>,
    interrupt: Signal,
    terminate: Signal,
    end: Pin<Box<Sleep>>,
    record: PhantomData<T>,
}

/// A reply of the daemon.
pub struct Told<T> {
    /// What was lost before the record.
    pub lost: Lost,
    pub record: Option<T>,
}

impl<T: Pod> Following<T> {
    /// Asks the daemon at a socket by a call, and waits until records come. Ends after so many seconds, if there is a
    /// number.
    pub async fn begin(
        socket: PathBuf,
        seconds: Option<u64>,
        call: impl AsyncFnOnce(InspectClient<Channel>) -> Called,
    ) -> Result<Self, AskError> {
        let begun = timeout(ANSWER_TIMEOUT, ask(socket, call)).await;
        Ok(Self {
            replies: begun.map_err(|_| AskError::Silent)??,
            interrupt: signal(SignalKind::interrupt()).map_err(AskError::Signal)?,
            terminate: signal(SignalKind::terminate()).map_err(AskError::Signal)?,
            end: Box::pin(sleep(Duration::from_secs(seconds.unwrap_or(u64::MAX / 4)))),
            record: PhantomData,
        })
    }

    /// Waits for what comes next; `None`: a signal, or the end of the time. A call that is dropped loses nothing.
    pub async fn next(&mut self) -> Result<Option<Told<T>>, AskError> {
        tokio::select! {
            reply = self.replies.message() => told(reply).map(Some),
            () = &mut self.end => Ok(None),
            _ = self.interrupt.recv() => Ok(None),
            _ = self.terminate.recv() => Ok(None),
        }
    }
}

/// Connects, calls, and takes the first reply, which has no record.
async fn ask(
    socket: PathBuf,
    call: impl AsyncFnOnce(InspectClient<Channel>) -> Called,
) -> Result<Streaming<FollowReply>, AskError> {
    let path = socket.display().to_string();
    let channel = Endpoint::from_static("http://transitd")
        .initial_stream_window_size(WINDOW)
        .connect_with_connector(socket::connector(socket))
        .await
        .map_err(|source| AskError::NotRunning { socket: path, source })?;
    let replies = call(InspectClient::new(channel)).await;
    let mut replies = replies.map_err(AskError::Refused)?.into_inner();
    heard(replies.message().await)?;
    Ok(replies)
}

/// Returns a reply, if there is one.
fn heard(reply: Result<Option<FollowReply>, Status>) -> Result<FollowReply, AskError> {
    match reply {
        Ok(Some(reply)) => Ok(reply),
        Ok(None) => Err(AskError::Ended),
        // The connection is gone without a word of the daemon's: it was killed.
        Err(status) if std::error::Error::source(&status).is_some() => Err(AskError::Ended),
        Err(status) => Err(AskError::Refused(status)),
    }
}

fn told<T: Pod>(reply: Result<Option<FollowReply>, Status>) -> Result<Told<T>, AskError> {
    let reply = heard(reply)?;
    let record = match &reply.record[..] {
        [] => None,
        bytes => Some(decode(bytes).ok_or(AskError::Version)?),
    };
    let lost = Lost {
        reader: reply.lost,
        ring: reply.lost_in_ring,
    };
    Ok(Told { lost, record })
}

/// Numbers of records that were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lost {
    /// This verb did not take them in time.
    pub reader: u64,
    /// The daemon did not. They are of anybody, not of this verb alone.
    pub ring: u64,
}

impl Lost {
    /// Prints what was lost, if anything was.
    pub fn print(self, as_json: bool) {
        let lines = if as_json { self.to_json() } else { self.to_text() };
        for line in lines {
            println!("{line}");
        }
    }

    fn places(self) -> impl Iterator<Item = (u64, &'static str, &'static str)> {
        [
            (self.reader, "reader", "records (the reader was slow)"),
            (self.ring, "ring", "records on the node (ring full)"),
        ]
        .into_iter()
        .filter(|(lost, ..)| *lost != 0)
    }

    fn to_json(self) -> Vec<String> {
        self.places()
            .map(|(lost, place, _)| json!({"lost": lost, "where": place}).to_string())
            .collect()
    }

    fn to_text(self) -> Vec<String> {
        self.places()
            .map(|(lost, _, what)| format!("lost: {lost} {what}"))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_lost_is_told_by_place() {
        let nothing = Lost { reader: 0, ring: 0 };
        assert_eq!(nothing.to_text(), Vec::<String>::new());
        let both = Lost { reader: 3, ring: 40 };
        assert_eq!(
            both.to_text(),
            [
                "lost: 3 records (the reader was slow)",
                "lost: 40 records on the node (ring full)"
            ]
        );
        assert_eq!(
            both.to_json(),
            [r#"{"lost":3,"where":"reader"}"#, r#"{"lost":40,"where":"ring"}"#]
        );
        let in_ring = Lost { reader: 0, ring: 1 };
        assert_eq!(in_ring.to_json(), [r#"{"lost":1,"where":"ring"}"#]);
    }

    #[test]
    fn a_reply_has_a_record_of_the_right_size_or_none() {
        let reply = |record: &[u8]| FollowReply {
            record: record.to_vec(),
            lost: 2,
            lost_in_ring: 0,
        };
        let lost = Lost { reader: 2, ring: 0 };
        for (bytes, record) in [(&7_u64.to_ne_bytes()[..], Some(7)), (&[][..], None)] {
            let told: Told<u64> = told(Ok(Some(reply(bytes)))).unwrap();
            assert_eq!((told.record, told.lost), (record, lost));
        }
        let other = told::<u64>(Ok(Some(reply(&[1, 2]))));
        assert!(matches!(other, Err(AskError::Version)));
        assert!(matches!(told::<u64>(Ok(None)), Err(AskError::Ended)));
        let refused = told::<u64>(Err(Status::resource_exhausted("8 run")));
        assert!(matches!(&refused, Err(error @ AskError::Refused(_)) if error.to_string() == "8 run"));
    }
}
