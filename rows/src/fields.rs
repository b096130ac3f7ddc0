//! Fields that several kinds of rows have: reads and writes them. IPv4 addresses within VPCs are sent mapped into 16
//! bytes.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use thiserror::Error;
use thuban_api::identifiers::{NetworkId, Vni, mapped};

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum InvalidRow {
    #[error("a row or key of a kind that is not known")]
    UnknownKind,
    #[error("{field}: expected {expected}")]
    Field {
        field: &'static str,
        expected: &'static str,
    },
}

pub const fn invalid(field: &'static str, expected: &'static str) -> InvalidRow {
    InvalidRow::Field { field, expected }
}

pub fn vni(number: u32) -> Result<Vni, InvalidRow> {
    Vni::new(number).ok_or(invalid("vni", "1 to 16777215"))
}

pub fn network(number: u32) -> Result<NetworkId, InvalidRow> {
    NetworkId::new(number).ok_or(invalid("network", "a network's id, not 0"))
}

pub fn pod_uid(uid: String) -> Result<String, InvalidRow> {
    if uid.is_empty() {
        return Err(invalid("pod_uid", "the pod's UID"));
    }
    Ok(uid)
}

/// Reads an address of a message: 16 bytes, IPv4 mapped. Other lengths give none.
pub fn read_address(bytes: &[u8]) -> Option<IpAddr> {
    Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical())
}

pub fn address(bytes: &[u8]) -> Result<IpAddr, InvalidRow> {
    read_address(bytes).ok_or(invalid("address", "an address of 16 bytes"))
}

pub fn octets(address: impl Into<IpAddr>) -> Vec<u8> {
    mapped(address).to_vec()
}

/// Reads the IPv6 address of an endpoint: empty is none.
pub fn address6(bytes: &[u8]) -> Result<Option<Ipv6Addr>, InvalidRow> {
    if bytes.is_empty() {
        return Ok(None);
    }
    let address = <[u8; 16]>::try_from(bytes).ok().map(Ipv6Addr::from);
    address.filter(is_unicast6).map(Some).ok_or(invalid(
        "address6",
        "empty, or an IPv6 unicast address of 16 bytes that is not link-local",
    ))
}

/// Whether a row may have the IPv6 address: it is one host's, and the host may be on another link.
pub fn is_unicast6(address: &Ipv6Addr) -> bool {
    !address.is_unspecified()
        && !address.is_loopback()
        && !address.is_multicast()
        && !address.is_unicast_link_local()
        && address.to_ipv4_mapped().is_none()
}

/// Writes an address as 16 bytes; none is empty.
pub fn octets6(address: Option<Ipv6Addr>) -> Vec<u8> {
    address
        .map(|address| address.octets().to_vec())
        .unwrap_or_default()
}

/// Whether one host of a network may have the address: no loopback, link-local, multicast, `0.0.0.0/8` or `::/96`.
pub fn is_usable(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(v4) => {
            let first = v4.octets()[0];
            first != 0 && first != 127 && first < 224 && !v4.is_link_local()
        }
        IpAddr::V6(v6) => {
            !v6.is_multicast()
                && !v6.is_unicast_link_local()
                && v6.octets()[..12].iter().any(|byte| *byte != 0)
        }
    }
}

/// Reads IPv4 ranges and IPv6 ranges, which are in separate fields: a droplet that doesn't know IPv6 goes on with IPv4.
pub fn cidrs(list: &[String], list6: &[String]) -> Result<Vec<IpNet>, InvalidRow> {
    let v4 = list.iter().map(|text| {
        text.parse::<Ipv4Net>()
            .ok()
            .filter(|cidr| cidr.addr() == cidr.network())
            .map(IpNet::from)
            .ok_or(invalid("cidrs", "IPv4 CIDRs whose host bits are 0"))
    });
    let v6 = list6.iter().map(|text| {
        text.parse::<Ipv6Net>()
            .ok()
            .filter(|cidr| cidr.addr() == cidr.network() && cidr.addr().to_ipv4_mapped().is_none())
            .map(IpNet::from)
            .ok_or(invalid("cidrs6", "IPv6 CIDRs whose host bits are 0"))
    });
    v4.chain(v6).collect()
}

/// Splits ranges into (IPv4, IPv6), as [`cidrs`] reads them.
pub fn by_family(cidrs: &[IpNet]) -> (Vec<String>, Vec<String>) {
    let (v4, v6): (Vec<&IpNet>, Vec<&IpNet>) = cidrs.iter().partition(|cidr| matches!(cidr, IpNet::V4(_)));
    (texts(v4), texts(v6))
}

/// Reads ranges of both families from one field.
pub fn of_both_families(list: &[String], field: &'static str) -> Result<Vec<IpNet>, InvalidRow> {
    let read = |text: &String| {
        text.parse::<IpNet>()
            .ok()
            .filter(|cidr| cidr.addr() == cidr.network())
            .filter(|cidr| !matches!(cidr, IpNet::V6(cidr) if cidr.addr().to_ipv4_mapped().is_some()))
            .ok_or(invalid(field, "CIDRs whose host bits are 0"))
    };
    list.iter().map(read).collect()
}

pub fn texts<'a>(cidrs: impl IntoIterator<Item = &'a IpNet>) -> Vec<String> {
    cidrs.into_iter().map(ToString::to_string).collect()
}

#[cfg(test)]
mod tests {
    use super::{is_usable, octets, read_address};

    #[test]
    fn addresses_are_mapped_into_sixteen_bytes_and_back() {
        for given in ["10.0.1.2", "fd00:1::2"] {
            let given: std::net::IpAddr = given.parse().unwrap();
            assert_eq!(read_address(&octets(given)), Some(given));
        }
        assert_eq!(read_address(&[10, 0, 1, 2]), None);
        assert_eq!(read_address(&[]), None);
    }

    #[test]
    fn what_no_host_can_have_is_told_from_what_one_may() {
        for good in ["10.96.0.1", "192.0.2.1", "fd00:96::1", "2001:db8::"] {
            assert!(is_usable(good.parse().unwrap()), "{good}");
        }
        for bad in [
            "0.0.0.0",
            "0.1.2.3",
            "127.0.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "169.254.1.1",
            "fe80::1",
            "ff02::1",
            "::1",
            "::",
            "::1.2.3.4",
        ] {
            assert!(!is_usable(bad.parse().unwrap()), "{bad}");
        }
    }
}
