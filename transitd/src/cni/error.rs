//! Errors of the verbs, and the CNI code of each (CNI spec 1.1; from 100 Thuban's own).

use std::net::IpAddr;

use thiserror::Error;
use thuban_proto::cni::CniError;

use crate::attachments::InvalidId;
use crate::attachments::store::StoreError;
use crate::dataplane::pins::LinkingError;
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
    #[error("container {container_id} has an interface {ifname} of this network already; call DEL first")]
    Exists { container_id: String, ifname: String },
    #[error("pod {namespace}/{name} is refused: {reason}: {message}")]
    Refused {
        namespace: String,
        name: String,
        reason: String,
        message: String,
    },
    #[error("the network of pod {namespace}/{name} is not ready after {seconds} s: {missing}")]
    NotReady {
        namespace: String,
        name: String,
        seconds: u64,
        missing: &'static str,
    },
    #[error("the endpoint of pod {namespace}/{name} changed while the pod was connected; call ADD again")]
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
    #[error("connecting the pod was interrupted; call ADD again")]
    Interrupted,
    #[error("{} steps of the removal failed, the first: {}", .0.len(), .0.first().map_or(String::new(), |e| chain(e)))]
    Teardown(Vec<AttachmentError>),
}

impl AttachmentError {
    /// Returns the CNI error code. 3, 4, 5, 11, 50, 51: the spec's. 100: interface exists. 101: refused. 102: could
    /// not be wired. 103: could not be removed. 104: not as ADD made it.
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

/// A property that is not as ADD made it.
#[derive(Debug, Error)]
pub enum Difference {
    #[error("prevResult: {field}: expected {expected}")]
    Previous { field: &'static str, expected: String },
    #[error("the host's end {0} of the pod's interface is missing, down, or was replaced")]
    HostInterface(String),
    #[error("the host's route to {0} is missing")]
    HostRoute(IpAddr),
    #[error("{program} is not attached to {interface}")]
    Program {
        program: &'static str,
        interface: String,
    },
    #[error(
        "no table row leads {0} to the pod: its endpoint is gone, or a newer sandbox of the pod took over"
    )]
    Row(IpAddr),
    #[error("the pod's interface {0} is missing, down, or not the peer of the host's end")]
    PodInterface(String),
    #[error("the pod's interface has another MAC than {0}: all that it sends is dropped")]
    PodMac(String),
    #[error("the pod's interface lacks the address {0}")]
    Address(IpAddr),
    #[error("the pod's default route via {0} is missing")]
    Route(IpAddr),
    #[error("the pod's permanent neighbour {0} is missing: nothing that it sends leaves its node")]
    Neighbour(IpAddr),
}

/// The reason why no ADD is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotReady {
    #[error("the operator has not sent this node's program since transitd was started; see transitd's log")]
    NoProgram,
    #[error("the kernel refuses this version's {0}, and the old one stays in use; see transitd's log")]
    OldProgram(&'static str),
    #[error("{0} is not attached to the uplink: packets of other nodes are not handled; restart transitd")]
    NotAttached(&'static str),
    #[error("the kernel does not answer questions about the uplink; see transitd's log")]
    NoNetlink,
    #[error("the uplink is missing or down: pods of other nodes are out of reach")]
    NoUplink,
}

impl NotReady {
    /// Returns the code. 50: no ADD. 51: besides, pods that are there have limited connectivity.
    pub fn code(self) -> u32 {
        match self {
            Self::NoProgram | Self::OldProgram(_) | Self::NoNetlink => 50,
            Self::NoUplink | Self::NotAttached(_) => 51,
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

pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}
