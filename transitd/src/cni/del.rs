//! DEL: idempotent; with nothing there, no namespace and no memory of the attachment it succeeds.

use std::sync::Arc;

use thuban_proto::cni::DelRequest;

use super::error::AttachmentError;
use super::wiring;
use crate::attachments::AttachmentId;
use crate::node::Node;

/// Removes an attachment. The removal goes on when the caller leaves.
pub async fn run(node: &Arc<Node>, request: DelRequest) -> Result<(), AttachmentError> {
    let id = AttachmentId::new(&request.container_id, &request.ifname)?;
    let node = Arc::clone(node);
    let removal = tokio::spawn(async move { remove(&node, &id).await });
    removal.await.map_err(|_| AttachmentError::Interrupted)?
}

/// Removes an attachment as DEL does; also used for attachments whose pod is gone.
pub async fn remove(node: &Arc<Node>, id: &AttachmentId) -> Result<(), AttachmentError> {
    let _lock = node.lock(id).await;
    remove_locked(node, id).await
}

/// Does what [`remove`] does, for a caller that holds the attachment's lock.
pub(super) async fn remove_locked(node: &Arc<Node>, id: &AttachmentId) -> Result<(), AttachmentError> {
    let attachment = node.state().attachments.get(id).cloned();
    wiring::teardown(node, id, attachment).await
}
