//! Queries by UDP.

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UdpSocket;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tracing::warn;

use super::query::MAX_QUERY_BYTES;
use super::shared::{Shared, Views};
use super::upstream::Transport;

/// The pause after an error of the socket.
const RECEIVE_RETRY: Duration = Duration::from_millis(100);

pub(super) async fn serve<V: Views>(shared: &Arc<Shared<V>>, socket: Arc<UdpSocket>) {
    let mut at_work = JoinSet::new();
    // The buffer has one byte more than fits, so that a message that is too long is noticed.
    let mut buffer = [0; MAX_QUERY_BYTES + 1];
    loop {
        let (length, client) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                warn!(%error, "cannot receive DNS queries");
                sleep(RECEIVE_RETRY).await;
                continue;
            }
        };
        while at_work.try_join_next().is_some() {}
        let Some(admitted) = shared.admit(client.ip()) else {
            continue;
        };
        let query = buffer.get(..length).unwrap_or_default().to_vec();
        let (shared, socket) = (Arc::clone(shared), Arc::clone(&socket));
        at_work.spawn(async move {
            if let Some(answer) = shared.answer(admitted, Transport::Udp, &query).await {
                // A pod that is gone meanwhile doesn't need the answer.
                let _ = timeout(shared.limits.patience, socket.send_to(&answer, client)).await;
            }
        });
    }
}
