//! Reads what is in force of a network: its status decides, not its spec.

use thuban_api::Network;
use thuban_api::cidr::Cidr;
use thuban_api::identifiers::NetworkId;

/// Whether ranges of the network are in force.
pub fn is_accepted(network: &Network) -> bool {
    !in_force(network).is_empty()
}

/// Returns the network's id in rows; none until ranges are in force.
pub fn id(network: &Network) -> Option<NetworkId> {
    NetworkId::of(&parsed(in_force(network)))
}

/// Returns the ranges of a list; what is none is left out.
pub fn parsed(ranges: &[String]) -> Vec<Cidr> {
    ranges.iter().filter_map(|cidr| cidr.parse().ok()).collect()
}

/// Returns the ranges in force.
pub fn in_force(network: &Network) -> &[String] {
    network.status.as_ref().map_or(&[], |status| &status.cidrs)
}
