//! Makes rules of the node again that somebody took away: whoever reloads the node's own rules flushes all tables.
//!
//! The kernel tells of each change of nftables; a look at every scan finds what it did not tell of, and a write that failed.

use std::sync::Arc;
use std::time::Duration;

use thuban_common::host_stack::{NFT_LIMITS_TABLE, NFT_OVERLAY_TABLE, NFT_TABLE};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::warn;

use crate::netfilter::{self, watch};
use crate::node::Node;

/// Changes come in crowds, our own among them.
const MIN_LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// A transaction is told in many messages.
const CHANGE_DELAY: Duration = Duration::from_millis(50);

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    // Never notified, where the kernel does not tell.
    let changes = watch::changes().unwrap_or_else(|error| {
        warn!(
            error = &error as &dyn std::error::Error,
            "changes of nftables are not heard of, only looked for at each scan"
        );
        Arc::default()
    });
    let mut scan = interval(Duration::from_secs(node.settings.scan_interval.div_ceil(2)));
    scan.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = scan.tick() => {}
            () = changes.notified() => sleep(CHANGE_DELAY).await,
        }
        restore(&node).await;
        sleep(MIN_LOOK_INTERVAL).await;
    }
}

async fn restore(node: &Node) {
    let program = node.state().netfilter.program().to_owned();
    let tables = [NFT_TABLE, NFT_OVERLAY_TABLE, NFT_LIMITS_TABLE];
    let look = move || tables.map(|table| netfilter::is_there(&program, table));
    let Ok([has_rules, has_overlay_port, has_limits]) = tokio::task::spawn_blocking(look).await else {
        return;
    };
    let mut state = node.state();
    if !has_overlay_port {
        warn!(
            table = NFT_OVERLAY_TABLE,
            "a table of nftables is gone, it is made again"
        );
        state.netfilter.doubt_overlay_port();
    }
    if !has_limits {
        warn!(
            table = NFT_LIMITS_TABLE,
            "a table of nftables is gone, it is made again"
        );
        state.netfilter.doubt_limits();
    }
    let written = state.protect_port().and(state.limit_pods());
    // Before the first snapshot nobody knows what is to be in the other one.
    let written = if !state.synced || has_rules && state.netfilter.is_written() {
        written
    } else {
        if !has_rules {
            warn!(table = NFT_TABLE, "a table of nftables is gone, it is made again");
        }
        state.netfilter.doubt();
        written.and_then(|()| state.serve())
    };
    if let Err(error) = written {
        warn!(
            error = &error as &dyn std::error::Error,
            "the node's rules could not be written, it is tried again"
        );
    }
}
