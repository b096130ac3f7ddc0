//! Removes lists of network policy that no program reads any more, and writes what could not be written before.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use crate::dataplane::tables::TableError;
use crate::node::Node;

const INTERVAL: Duration = Duration::from_secs(1);

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    let mut interval = interval(INTERVAL);
    interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        interval.tick().await;
        let node = Arc::clone(&node);
        match tokio::task::spawn_blocking(move || node.expire_policies()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(
                error = &error as &dyn std::error::Error,
                "entries of network policy could not be written, it is tried again"
            ),
            Err(_) => return,
        }
    }
}

impl Node {
    /// Writes the rules of the node's stack, too, if other sets deny all than before. Blocks.
    fn expire_policies(&self) -> Result<(), TableError> {
        let (written, are_due) = {
            let mut state = self.state();
            let before = state.rules.are_due();
            let written = state.expire_policies();
            // What was due before has a writer.
            (written, !before && state.rules.are_due())
        };
        if are_due {
            self.write_changed_rules();
        }
        written
    }
}
