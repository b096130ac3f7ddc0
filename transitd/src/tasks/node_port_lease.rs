//! Keeps ports of tenants' Services open for as long as the operator is heard, and closes them when the operator has
//! been away for too long (`netfilter::node_ports`).
//!
//! Invariant: a stream that is the same at two looks was alive at the first one. Between them its keepalive asked the
//! operator, or would have ended the stream. So a transitd that was stopped for an hour doesn't take an old stream for
//! a live one.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tracing::{info, warn};

use crate::boot;
use crate::node::Node;
use crate::state::State;

/// The number of looks in a lease.
const LOOKS: u32 = 20;
/// The longest time between looks. It is longer than the stream's keepalive takes to give up, if the lease has its
/// usual length.
const MAX_INTERVAL: Duration = Duration::from_secs(30);
/// The shortest time between looks, for tests.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let lease = node.node_port_lease();
    let mut looks = interval((lease / LOOKS).clamp(MIN_INTERVAL, MAX_INTERVAL));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = None;
    let mut is_over = false;
    loop {
        looks.tick().await;
        let now = boot::nanoseconds();
        let stream = stream(&node.state());
        let heard = last.and_then(|(before, at)| (Some(before) == stream).then_some(at));
        last = stream.map(|stream| (stream, now));
        let renewing = Arc::clone(&node);
        if tokio::task::spawn_blocking(move || renewing.renew_lease(heard))
            .await
            .is_err()
        {
            return;
        }
        let heard = node.state().heard;
        let was_over = std::mem::replace(&mut is_over, heard.is_some_and(|heard| is_past(heard, lease)));
        match (was_over, is_over) {
            (false, true) => warn!(
                seconds = lease.as_secs(),
                "the operator has been away for too long: new connections to tenants' NodePorts are dropped"
            ),
            (true, false) => info!("the operator is back, tenants' NodePorts are open"),
            _ => {}
        }
    }
}

/// Returns the stream that is open and has brought a snapshot.
fn stream(state: &State) -> Option<u64> {
    state.stream.map(|_| state.streams)
}

fn is_past(heard: u64, lease: Duration) -> bool {
    Duration::from_nanos(boot::nanoseconds().saturating_sub(heard)) >= lease
}
