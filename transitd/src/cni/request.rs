//! The request of an ADD, once its fields are safe to act on.

use thuban_proto::cni::AddRequest;

use super::error::AttachmentError;
use crate::attachments::AttachmentId;
use crate::boot;

#[derive(Clone, Debug)]
pub struct ValidatedAdd {
    pub id: AttachmentId,
    pub netns: String,
    pub pod_uid: String,
    pub pod_namespace: String,
    pub pod_name: String,
    pub cni_network: String,
    /// When the runtime asked, nanoseconds since boot.
    pub asked_at: u64,
}

impl TryFrom<AddRequest> for ValidatedAdd {
    type Error = AttachmentError;

    fn try_from(request: AddRequest) -> Result<Self, Self::Error> {
        let id = AttachmentId::new(&request.container_id, &request.ifname)?;
        if !request.netns.starts_with('/') {
            let expected = "the absolute path of the pod's network namespace";
            return Err(AttachmentError::Request {
                field: "netns",
                expected,
            });
        }
        if request.pod_uid.is_empty() {
            return Err(AttachmentError::Request {
                field: "pod_uid",
                expected: "the pod's UID",
            });
        }
        let AddRequest {
            netns,
            pod_uid,
            pod_namespace,
            pod_name,
            network,
            ..
        } = request;
        Ok(Self {
            id,
            netns,
            pod_uid,
            pod_namespace,
            pod_name,
            cni_network: network,
            asked_at: boot::nanoseconds(),
        })
    }
}
