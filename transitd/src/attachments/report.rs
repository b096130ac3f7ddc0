//! Attachments as the operator is told of them.

use thuban_proto::transit as proto;
use thuban_proto::transit::droplet_message::Message;

use super::Attachment;

/// Returns the message that an attachment came or went.
pub fn change(of: &Attachment, removed: bool) -> Message {
    Message::Attachment(proto::AttachmentChange {
        attachment: Some(attachment(of)),
        removed,
    })
}

pub fn attachment(of: &Attachment) -> proto::Attachment {
    proto::Attachment {
        container_id: of.id.container_id.clone(),
        ifname: of.id.ifname.clone(),
        pod_uid: of.pod_uid.clone(),
        pod_namespace: of.pod_namespace.clone(),
        pod_name: of.pod_name.clone(),
        vni: of.vni,
        address: of.key().address.to_vec(),
        address6: of.key6().map(|key| key.address.to_vec()).unwrap_or_default(),
    }
}
