//! STATUS: whether an ADD would be served. The answer depends on what is known of this node, never on one tenant's
//! network.

use tokio::task::block_in_place;
use tracing::warn;

use super::error::{AttachmentError, NotReady};
use crate::dataplane::hook::Hook;
use crate::dataplane::hooks::TransitHook;
use crate::netlink;
use crate::node::Node;

pub async fn run(node: &Node) -> Result<(), AttachmentError> {
    {
        // The lock of links may be held for as long as the kernel's lock of interfaces is.
        if let Some(program) = block_in_place(|| node.links().kept().next()) {
            return Err(NotReady::OldProgram(program).into());
        }
        let state = node.state();
        if !state.synced || state.is_replacing {
            return Err(NotReady::NoProgram.into());
        }
    }
    match netlink::find_link(&node.netlink, &node.uplink.name).await {
        Ok(Some(link)) if netlink::is_up(&link) => {
            block_in_place(|| attached(node, netlink::xdp_program(&link)))
        }
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

/// Checks that transit is where it was attached; `at_xdp` is the program that the uplink has there.
fn attached(node: &Node, at_xdp: Option<u32>) -> Result<(), AttachmentError> {
    let links = node.links();
    let hooks = [
        Some(Hook::TransitTc),
        (node.transit_hook == TransitHook::Xdp).then_some(Hook::TransitXdp),
    ];
    for hook in hooks.into_iter().flatten() {
        if !links.is_attached(hook, &node.uplink.name, at_xdp)? {
            return Err(NotReady::NotAttached(hook.program()).into());
        }
    }
    Ok(())
}
