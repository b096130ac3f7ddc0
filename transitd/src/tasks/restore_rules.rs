//! Makes rules of the node again that were removed: a reload of the node's own rules flushes all tables.
//!
//! The kernel reports each change of nftables. A look at every scan finds changes that it did not report, and writes
//! that failed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::warn;

use crate::netfilter::watch;
use crate::node::Node;

/// The shortest time between looks: changes come in crowds, our own among them.
const MIN_LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The pause after a change: a transaction is reported in many messages.
const CHANGE_DELAY: Duration = Duration::from_millis(50);

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    // The task is never notified if the kernel does not report changes.
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
        let node = Arc::clone(&node);
        if tokio::task::spawn_blocking(move || node.restore_rules())
            .await
            .is_err()
        {
            return;
        }
        sleep(MIN_LOOK_INTERVAL).await;
    }
}
