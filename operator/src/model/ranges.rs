//! What of a network is in force: its status says so, not its spec.

use thuban_api::Network;
use thuban_api::identifiers::NetworkId;

/// Whether ranges of the network are in force.
pub fn is_accepted(network: &Network) -> bool {
    !in_force(network).is_empty()
}

/// Its id in rows; none until ranges are in force.
pub fn id(network: &Network) -> Option<NetworkId> {
    let ranges = in_force(network).iter().filter_map(|cidr| cidr.parse().ok());
    NetworkId::of(&ranges.collect::<Vec<_>>())
}

/// The ranges in force.
pub fn in_force(network: &Network) -> &[String] {
    network.status.as_ref().map_or(&[], |status| &status.cidrs)
}
