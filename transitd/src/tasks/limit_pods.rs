//! Tells the rules the VPC of each pod, for the VPC's limit of connections. A pod's own limit needs no telling.

use std::sync::Arc;

use tracing::warn;

use crate::node::Node;

/// Runs until the daemon ends.
pub async fn run(node: Arc<Node>) {
    loop {
        node.attached.notified().await;
        let node = Arc::clone(&node);
        let limited = tokio::task::spawn_blocking(move || node.limit_pods()).await;
        if let Ok(Err(error)) = limited {
            // The next change of an attachment, or the next look at the tables, tries again.
            warn!(
                error = &error as &dyn std::error::Error,
                "pods' connections are not bounded by VPC as they should be"
            );
        }
    }
}
