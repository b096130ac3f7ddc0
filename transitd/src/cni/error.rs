//! What fails in the verbs, and the CNI code of each (CNI spec 1.1; from 100 Thuban's own).

use thiserror::Error;
use thuban_proto::cni::CniError;

use super::check::Difference;
use super::status::NotReady;
use crate::attachments::InvalidId;
use crate::attachments::store::StoreError;
use crate::dataplane::links::LinkingError;
use crate::dataplane::tables::TableError;
use crate::netlink::NetlinkError;

#[derive(Debug, Error)]
pub enum AttachmentError {
    #[error(transparent)]
    Id(#[from] InvalidId),
    #[error("{field}: expected {expected}")]
    Request {
        field: &'static str,
        expected: &'static str,
    },
    #[error("container {container_id} has an interface {ifname} of this network already")]
    Exists { container_id: String, ifname: String },
    #[error("pod {namespace}/{name} is refused: {reason}: {message}")]
    Refused {
        namespace: String,
        name: String,
        reason: String,
        message: String,
    },
    #[error("pod {namespace}/{name} is not ready to be wired after {seconds} s: {missing}")]
    NotReady {
        namespace: String,
        name: String,
        seconds: u64,
        missing: &'static str,
    },
    #[error("the endpoint of pod {namespace}/{name} changed while it was wired")]
    Changed { namespace: String, name: String },
    #[error("container {container_id} has no interface {ifname} of this network")]
    Unknown { container_id: String, ifname: String },
    #[error(transparent)]
    Difference(#[from] Difference),
    #[error(transparent)]
    Status(#[from] NotReady),
    #[error("cannot set up the pod's interface")]
    Netlink(#[from] NetlinkError),
    #[error("cannot attach the agent")]
    Links(#[from] LinkingError),
    #[error("cannot write the pod's rows")]
    Tables(#[from] TableError),
    #[error("cannot write the attachment's file")]
    Store(#[from] StoreError),
    #[error("cannot end the connections that conntrack knows of the pod")]
    Conntrack(#[source] std::io::Error),
    #[error("wiring the pod was interrupted")]
    Interrupted,
    #[error("{} steps of the removal failed, the first: {}", .0.len(), .0.first().map_or(String::new(), |e| chain(e)))]
    Teardown(Vec<AttachmentError>),
}

impl AttachmentError {
    /// 3, 4, 5, 11, 50, 51: the spec's. 100: interface exists. 101: refused. 102: could not be wired. 103: could not be
    /// removed. 104: not as ADD made it.
    pub fn code(&self) -> u32 {
        match self {
            Self::Id(_)
            | Self::Request { .. }
            | Self::Netlink(NetlinkError::NotANamespace { .. } | NetlinkError::Namespace { .. }) => 4,
            Self::Unknown { .. } => 3,
            Self::Store(_) => 5,
            Self::NotReady { .. }
            | Self::Changed { .. }
            | Self::Interrupted
            | Self::Tables(TableError::Full { .. }) => 11,
            Self::Exists { .. } | Self::Netlink(NetlinkError::InterfaceExists(_)) => 100,
            Self::Refused { .. } => 101,
            Self::Netlink(_) | Self::Links(_) | Self::Tables(_) | Self::Conntrack(_) => 102,
            Self::Teardown(_) => 103,
            Self::Difference(_) => 104,
            Self::Status(reason) => reason.code(),
        }
    }
}

impl From<&AttachmentError> for CniError {
    fn from(error: &AttachmentError) -> Self {
        let details = match std::error::Error::source(error) {
            Some(source) => chain(source),
            None => String::new(),
        };
        Self {
            code: error.code(),
            message: error.to_string(),
            details,
        }
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
