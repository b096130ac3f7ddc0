//! The ranges of the clients that may send to a load balancer's addresses. Without the field all clients may.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use thuban_proto::transit as proto;

use crate::fields::{self, InvalidRow, invalid};

/// The most ranges of an address.
pub const MAX_CLIENTS: usize = 64;
const FIELD: &str = "clients.ranges";

/// Reads the ranges of an address's clients.
pub fn read(of: IpAddr, told: Option<proto::Clients>) -> Result<Option<BTreeSet<IpNet>>, InvalidRow> {
    let Some(told) = told else { return Ok(None) };
    if told.ranges.len() > MAX_CLIENTS {
        return Err(invalid(FIELD, "at most 64"));
    }
    let ranges = fields::of_both_families(&told.ranges, FIELD)?;
    if ranges.iter().any(|range| range.addr().is_ipv4() != of.is_ipv4()) {
        return Err(invalid(FIELD, "ranges of the address's family"));
    }
    Ok(Some(ranges.into_iter().collect()))
}

pub fn write(ranges: Option<&BTreeSet<IpNet>>) -> Option<proto::Clients> {
    ranges.map(|ranges| proto::Clients {
        ranges: fields::texts(ranges),
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn ranges_that_no_address_has_are_refused() {
        let refused = |ranges: Vec<String>| {
            let of = Ipv4Addr::new(203, 0, 113, 1).into();
            let error = read(of, Some(proto::Clients { ranges })).unwrap_err().to_string();
            assert!(error.starts_with("clients.ranges: expected"), "{error}");
        };
        refused(vec!["198.51.100.7/24".into()]);
        refused(vec!["2001:db8::/32".into()]);
        refused((0..=64).map(|last| format!("198.51.100.{last}/32")).collect());
    }
}
