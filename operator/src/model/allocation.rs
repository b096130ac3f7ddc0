//! Which address an endpoint asks for. The claim decides; this only proposes.

use std::net::Ipv4Addr;

use thuban_api::cidr::Cidr;

/// The lowest address of the ranges that is not taken, and the range that it is of.
pub fn propose(ranges: &[Cidr], is_taken: impl Fn(Ipv4Addr) -> bool) -> Option<(Ipv4Addr, Cidr)> {
    ranges.iter().find_map(|range| {
        range
            .hosts()
            .find(|address| !is_taken(*address))
            .map(|address| (address, *range))
    })
}

/// How many addresses a network's endpoints can have.
pub fn capacity(ranges: &[Cidr]) -> u64 {
    ranges.iter().map(|range| u64::from(range.capacity())).sum()
}

/// Name of the claim of an address.
pub fn ip_claim_name(vpc: &str, address: Ipv4Addr) -> String {
    format!("{vpc}.{address}")
}

/// The lowest free VNI.
pub fn propose_vni(is_taken: impl Fn(u32) -> bool) -> Option<u32> {
    (1..=thuban_api::identifiers::Vni::MAX).find(|vni| !is_taken(*vni))
}

#[cfg(test)]
mod tests {
    use super::{capacity, propose};

    #[test]
    fn the_lowest_free_address_is_proposed_and_the_next_range_when_one_is_full() {
        let ranges = ["10.0.1.0/30".parse().unwrap(), "10.0.9.0/29".parse().unwrap()];
        let mut taken = Vec::new();
        while let Some((address, range)) = propose(&ranges, |address| taken.contains(&address)) {
            assert!(range.contains_address(address));
            taken.push(address);
        }
        let last: Vec<_> = taken
            .iter()
            .map(|address| (address.octets()[2], address.octets()[3]))
            .collect();
        assert_eq!(last, [(1, 2), (9, 2), (9, 3), (9, 4), (9, 5), (9, 6)]);
        assert_eq!(capacity(&ranges), 6);
    }
}
