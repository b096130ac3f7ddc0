//! Questions that a pod asks over its network, and the answers. [`serve`] answers with the server's name, so that the
//! asker knows which pod it reached. [`ask`] asks, and repeats a question until somebody answers.
//!
//! A pod gets its questions from its environment and prints its answers into its log, one JSON object a line. Nobody
//! needs the right to run commands in the pod. What an answer means is for the reader of the log to say.

pub mod ask;
mod dns;
pub mod serve;

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// The environment variable with the questions of a pod, a list in JSON.
pub const QUESTIONS: &str = "THUBAN_QUESTIONS";

/// A question, which is repeated until it is answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Question {
    /// The number of the answer.
    pub id: usize,
    pub request: Request,
    /// How long it is repeated, in milliseconds.
    pub patience_ms: u64,
}

/// What is asked, and whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Request {
    /// The name of the server of this program at a TCP port.
    Tcp(SocketAddr),
    /// The name of the server of this program at a UDP port.
    Udp(SocketAddr),
    /// Whether a TCP port accepts a connection.
    Connect(SocketAddr),
    /// The IPv4 addresses of a name, from a DNS server.
    Dns {
        server: SocketAddr,
        /// The whole name, without a dot at its end.
        name: String,
    },
}

/// The answer to a question: a line of the pod's log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// The number of the question.
    pub id: usize,
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Outcome {
    /// The name of a server, the addresses of a name with commas between them, or empty for a connection.
    Answered(String),
    /// Nobody answered in time, and why the last try failed.
    Failed(String),
}
