//! Fills in `overlay_port.nft`, the text of table `inet thuban-overlay`, for `nft -f`: UDP port 6081 is the overlay's.
//!
//! Droplets believe Geneve by its outer source. Agents and transit send theirs past netfilter. So every packet for
//! that port that passes netfilter is somebody else's: translated, forwarded, reflected, or sent by a process of the
//! node.
//!
//! Invariant: the rules depend on nothing that a tenant can change, and are in force before the first row is here.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;

use thuban_common::host_stack::{NFT_OVERLAY_TABLE, overlay_priority};
use thuban_common::tables::GENEVE_PORT;

use super::nft::Nft;
use super::template::Values;
use crate::attachments::HOST_PREFIX;
use crate::netlink::host_end::HOST_END;

/// The operator refuses the same port that the data plane guards.
const _: () = assert!(thuban_api::OVERLAY_PORT == GENEVE_PORT);

const TEMPLATE: &str = include_str!("overlay_port.nft");

/// Returns the droplets that the kernel's table has; none if there is no table.
pub fn droplets(nft: &Nft) -> BTreeSet<Ipv4Addr> {
    let text = nft.list(&["-j", "list", "set", "inet", NFT_OVERLAY_TABLE, "droplets"]);
    let set: serde_json::Value = serde_json::from_slice(&text.unwrap_or_default()).unwrap_or_default();
    let objects = set["nftables"].as_array().into_iter().flatten();
    let elements = objects
        .filter_map(|object| object["set"]["elem"].as_array())
        .flatten();
    elements
        .filter_map(|element| element.as_str()?.parse().ok())
        .collect()
}

/// The variable parts of the rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OverlayPort {
    /// Underlay addresses of the other droplets.
    pub droplets: BTreeSet<Ipv4Addr>,
    /// Whether the device that aggregates Geneve has the port on this node. If not, tunnels of the node's own may have
    /// it.
    pub is_claimed: bool,
}

impl OverlayPort {
    pub fn ruleset(&self) -> String {
        let mut values = Values::default();
        values.one("NFT_OVERLAY_TABLE", NFT_OVERLAY_TABLE);
        values.one("FORWARDED", overlay_priority::FORWARDED);
        values.one("SENT", overlay_priority::SENT);
        values.one("RECEIVED", overlay_priority::RECEIVED);
        values.one("GENEVE_PORT", GENEVE_PORT);
        values.one("HOST_END", HOST_END);
        values.one("HOST_PREFIX", HOST_PREFIX);
        let leaves = format!("oifname != \"{HOST_PREFIX}*\" oifname != \"{HOST_END}\"");
        values.one("leaves", leaves);
        values.joined("droplets", &self.droplets);
        values.condition("if_claimed", self.is_claimed);
        values.condition("if_not_claimed", !self.is_claimed);
        values.fill(TEMPLATE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_placeholder_is_filled_in() {
        for is_claimed in [false, true] {
            let droplets = [Ipv4Addr::LOCALHOST].into();
            let text = OverlayPort { droplets, is_claimed }.ruleset();
            assert!(!text.contains("{{") && !text.contains("}}"), "{text}");
        }
    }
}
