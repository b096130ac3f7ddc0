//! Turns the bytes of a pod's query into the bytes of the answer.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use thiserror::Error;
use tokio::time::timeout;
use tracing::debug;

use super::filter::filter;
use super::query::{Question, Unfit};
use super::upstream::{self, Transport, UpstreamError};
use super::view::{Verdict, View, Zone};
use crate::metrics::DnsResult;

/// The most bytes of a message, by any transport.
const MAX_MESSAGE_BYTES: usize = u16::MAX as usize;

/// The reason why upstream gives no answer to pass on.
#[derive(Debug, Error)]
enum Failure {
    #[error(transparent)]
    Upstream(#[from] UpstreamError),
    #[error("the cluster's DNS does not answer")]
    Silent,
    #[error("a pod or VPC with fewer queries took its place")]
    Displaced,
    #[error("cannot encode the query")]
    Encode(#[source] hickory_proto::ProtoError),
    #[error("cannot decode the answer")]
    Decode(#[source] hickory_proto::serialize::binary::DecodeError),
}

/// The address of upstream, and how long it may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    pub(super) patience: Duration,
}

/// Returns the answer, if there is to be one, and the result that is counted. Waits for upstream no longer than
/// `lost`.
pub(super) async fn answer(
    upstream: Upstream,
    view: &View,
    transport: Transport,
    bytes: &[u8],
    lost: impl Future<Output = ()>,
) -> (Option<Vec<u8>>, DnsResult) {
    let question = match Question::parse(bytes) {
        Ok(question) => question,
        Err(Unfit::Silent) => return (None, DnsResult::Malformed),
        Err(Unfit::Malformed(answer)) => return (answer, DnsResult::Malformed),
        Err(Unfit::Unsupported(answer)) => return (answer, DnsResult::Unsupported),
    };
    let room = match transport {
        Transport::Udp => question.payload(),
        Transport::Tcp => MAX_MESSAGE_BYTES,
    };
    let own = |code| question.negative(code, Zone::Cluster, view.domain());
    let (message, result) = match view.decide(question.name()) {
        Verdict::Refuse => (own(ResponseCode::NXDomain), DnsResult::Refused),
        Verdict::NoData => (own(ResponseCode::NoError), DnsResult::NoData),
        Verdict::Forward(zone) => match forward(upstream, view, transport, zone, &question, lost).await {
            Ok(Forwarded::Whole(answer)) if answer.len() <= room => {
                return (Some(answer), DnsResult::Forwarded);
            }
            Ok(Forwarded::Whole(_)) => (question.truncated(), DnsResult::Forwarded),
            Ok(Forwarded::Made(message, result)) => (*message, result),
            Err(error) => {
                debug!(
                    error = &error as &dyn std::error::Error,
                    "no answer from upstream"
                );
                let result = match error {
                    Failure::Displaced => DnsResult::Displaced,
                    _ => DnsResult::Failed,
                };
                (question.reply(ResponseCode::ServFail), result)
            }
        },
    };
    (encode(&question, &message, room), result)
}

/// Upstream's answer, for the pod.
enum Forwarded {
    /// The answer as it came, but for the id.
    Whole(Vec<u8>),
    /// The answer that is sent in its place.
    Made(Box<Message>, DnsResult),
}

async fn forward(
    upstream: Upstream,
    view: &View,
    transport: Transport,
    zone: Zone,
    question: &Question,
    lost: impl Future<Output = ()>,
) -> Result<Forwarded, Failure> {
    let outgoing = question.outgoing().map_err(Failure::Encode)?;
    let asking = upstream::ask(upstream.address, transport, &outgoing);
    let mut bytes = tokio::select! {
        answer = timeout(upstream.patience, asking) => answer.map_err(|_| Failure::Silent)??,
        () = lost => return Err(Failure::Displaced),
    };
    question.restore(&outgoing, &mut bytes);
    // A truncated answer is believed in nothing but that.
    if transport == Transport::Udp && is_truncated(&bytes) {
        return Ok(Forwarded::Made(
            Box::new(question.truncated()),
            DnsResult::Forwarded,
        ));
    }
    let message = Message::from_vec(&bytes).map_err(Failure::Decode)?;
    Ok(match filter(view, zone, question, message) {
        None => Forwarded::Whole(bytes),
        Some(filtered) => {
            let result = if filtered.less {
                DnsResult::Filtered
            } else {
                DnsResult::Forwarded
            };
            Forwarded::Made(Box::new(filtered.message), result)
        }
    })
}

/// Whether TC, in the third byte of the header, is set.
fn is_truncated(bytes: &[u8]) -> bool {
    bytes.get(2).is_some_and(|flags| flags & 0b10 != 0)
}

/// Encodes an answer; `None` only if it can't be encoded at all.
fn encode(question: &Question, message: &Message, room: usize) -> Option<Vec<u8>> {
    match message.to_vec() {
        Ok(bytes) if bytes.len() <= room => Some(bytes),
        Ok(_) => question.truncated().to_vec().ok(),
        Err(_) => question.reply(ResponseCode::ServFail).to_vec().ok(),
    }
}
