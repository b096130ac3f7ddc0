//! STATUS: whether an ADD would be served, by what is known of this node; never by one tenant's network.

use thiserror::Error;
use tracing::warn;

use super::error::AttachmentError;
use crate::netlink;
use crate::node::Node;

/// Why no ADD is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotReady {
    #[error("the operator has not sent this node's program since transitd was started")]
    NoProgram,
    #[error("the kernel refuses this version's {0}, the old one is in place; see transitd's log")]
    OldProgram(&'static str),
    #[error("the kernel cannot be asked about the uplink; see transitd's log")]
    NoNetlink,
    #[error("the uplink is missing or down: pods of other nodes are out of reach")]
    NoUplink,
}

impl NotReady {
    /// 50: no ADD. 51: besides, pods that are there have limited connectivity.
    pub fn code(self) -> u32 {
        match self {
            Self::NoProgram | Self::OldProgram(_) | Self::NoNetlink => 50,
            Self::NoUplink => 51,
        }
    }
}

pub async fn run(node: &Node) -> Result<(), AttachmentError> {
    {
        let state = node.state();
        if let Some(program) = state.links.kept().next() {
            return Err(NotReady::OldProgram(program).into());
        }
        if !state.synced {
            return Err(NotReady::NoProgram.into());
        }
    }
    match netlink::find_link(&node.netlink, &node.uplink.name).await {
        Ok(Some(link)) if netlink::is_up(&link) => Ok(()),
        Ok(_) => Err(NotReady::NoUplink.into()),
        Err(error) => {
            warn!(
                error = &error as &dyn std::error::Error,
                "the uplink cannot be looked at"
            );
            Err(NotReady::NoNetlink.into())
        }
    }
}
