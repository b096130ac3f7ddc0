//! Queries by TCP: many on a connection, answered as they come (RFC 7766).

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::SinkExt;
use futures::stream::{FuturesUnordered, StreamExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::bytes::Bytes;
use tokio_util::codec::{FramedRead, FramedWrite, LengthDelimitedCodec};
use tracing::warn;

use super::query::MAX_QUERY_BYTES;
use super::shared::{Shared, Views};
use super::upstream::Transport;
use crate::metrics::DnsResult;

/// The most queries of one connection in flight; the next ones are read when one is answered.
const MAX_PIPELINED: usize = 16;
/// The pause after a failed accept.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

pub(super) async fn serve<V: Views>(shared: &Arc<Shared<V>>, listener: TcpListener) {
    let mut at_work = JoinSet::new();
    loop {
        let (stream, client) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "cannot accept connections for DNS");
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        while at_work.try_join_next().is_some() {}
        let Some(place) = shared.admit_connection(client.ip()) else {
            continue;
        };
        let shared = Arc::clone(shared);
        at_work.spawn(async move {
            tokio::select! {
                () = converse(&shared, stream, client.ip()) => {}
                () = place.lost() => shared.metrics.hung_up(DnsResult::Displaced),
            }
        });
    }
}

/// Frames messages: two bytes of length come before each.
fn codec(longest: usize) -> LengthDelimitedCodec {
    LengthDelimitedCodec::builder()
        .length_field_type::<u16>()
        .max_frame_length(longest)
        .new_codec()
}

/// Serves a connection until the client hangs up, is silent, sends what can't be a query, or doesn't receive its
/// answers.
async fn converse<V: Views>(shared: &Shared<V>, stream: TcpStream, source: IpAddr) {
    // Answers are small, and the client waits for each.
    let _ = stream.set_nodelay(true);
    let (reader, writer) = stream.into_split();
    let mut queries = FramedRead::new(reader, codec(MAX_QUERY_BYTES));
    let mut answers = FramedWrite::new(writer, codec(usize::from(u16::MAX)));
    let mut in_flight = FuturesUnordered::new();
    let mut more = true;
    while more || !in_flight.is_empty() {
        tokio::select! {
            query = queries.next(), if more && in_flight.len() < MAX_PIPELINED => match query {
                Some(Ok(query)) => {
                    // The client is looked up anew for each query: its pod may be gone, or its VPC's view may have
                    // changed.
                    if let Some(admitted) = shared.admit(source) {
                        in_flight.push(async move { shared.answer(admitted, Transport::Tcp, &query).await });
                    }
                }
                Some(Err(_)) => {
                    shared.metrics.answered(DnsResult::Malformed);
                    return;
                }
                None => more = false,
            },
            Some(answer) = in_flight.next() => {
                let Some(answer) = answer else {
                    continue;
                };
                let sent = timeout(shared.limits.patience, answers.send(Bytes::from(answer)));
                if !matches!(sent.await, Ok(Ok(()))) {
                    return;
                }
            }
            () = sleep(shared.limits.idle) => return,
        }
    }
}
