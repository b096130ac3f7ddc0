//! STATUS: whether an ADD would be served, by what is known of this node; never by one tenant's network.

use thiserror::Error;
use tracing::warn;

use super::error::AttachmentError;
use crate::dataplane::hooks::TransitHook;
use crate::dataplane::links::Hook;
use crate::netlink;
use crate::node::Node;

/// Why no ADD is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotReady {
    #[error("the operator has not sent this node's program since transitd was started")]
    NoProgram,
    #[error("the kernel refuses this version's {0}, the old one is in place; see transitd's log")]
    OldProgram(&'static str),
    #[error("{0} is not attached to the uplink: no packet of another node is handled; restart transitd")]
    NotAttached(&'static str),
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
            Self::NoUplink | Self::NotAttached(_) => 51,
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
        Ok(Some(link)) if netlink::is_up(&link) => attached(node, netlink::xdp_program(&link)),
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

/// Whether transit is where it was put; `at_xdp` is the program that the uplink has there.
fn attached(node: &Node, at_xdp: Option<u32>) -> Result<(), AttachmentError> {
    let state = node.state();
    let hooks = [
        Some(Hook::TransitTc),
        (node.transit_hook == TransitHook::Xdp).then_some(Hook::TransitXdp),
    ];
    for hook in hooks.into_iter().flatten() {
        if !state.links.is_attached(hook, &node.uplink.name, at_xdp)? {
            return Err(NotReady::NotAttached(hook.program()).into());
        }
    }
    Ok(())
}
