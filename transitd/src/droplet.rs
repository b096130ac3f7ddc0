//! Registers this node's Droplet and keeps its heartbeat Lease fresh.
use std::sync::Arc;
use crate::node::Node;
pub async fn run(_node: Arc<Node>, _client: kube::Client) {}
