//! IPv4 and IPv6 networks without host bits.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use ipnet::IpNet;
use thiserror::Error;

/// A network in CIDR notation whose host bits are zero. IPv4 is never written as mapped IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr(IpNet);

#[derive(Debug, Error, PartialEq, Eq)]
pub enum CidrError {
    #[error("{0:?} is not a network in CIDR notation, such as 10.0.0.0/16 or fd00:1::/64")]
    Unreadable(String),
    #[error("{given} has host bits set; did you mean {meant}?")]
    HostBits { given: String, meant: String },
}

impl Cidr {
    /// Whether the networks share an address. Networks of different families never overlap.
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other) || other.contains(self)
    }

    /// Whether `other` lies within this network.
    pub fn contains(self, other: Self) -> bool {
        self.0.contains(&other.0)
    }

    pub fn contains_address(self, address: impl Into<IpAddr>) -> bool {
        self.0.contains(&address.into())
    }

    pub fn is_ipv4(self) -> bool {
        matches!(self.0, IpNet::V4(_))
    }

    /// Returns the first address: never given out (IPv6: the subnet-router anycast address, RFC 4291 section 2.6.1).
    pub fn base(self) -> IpAddr {
        self.0.network()
    }

    /// Returns the last address: never given out.
    pub fn last(self) -> IpAddr {
        self.0.broadcast()
    }

    /// Returns the address after the base: never given out. In an IPv4 network the agent answers for it.
    pub fn gateway(self) -> IpAddr {
        self.address(number(self.base()).saturating_add(1))
    }

    pub fn prefix_length(self) -> u8 {
        self.0.prefix_len()
    }

    /// Yields the addresses that endpoints may get, lowest first: not the base, the gateway or the last one.
    pub fn hosts(self) -> impl Iterator<Item = IpAddr> {
        self.hosts_from(self.base())
    }

    /// Yields the addresses of [`Self::hosts`] that are not below `first`.
    pub fn hosts_from(self, first: IpAddr) -> impl Iterator<Item = IpAddr> {
        let lowest = number(self.gateway()).saturating_add(1);
        let numbers = lowest.max(number(first))..number(self.last());
        numbers.map(move |number| self.address(number))
    }

    /// Whether endpoints may get the address.
    pub fn is_host(self, address: IpAddr) -> bool {
        self.contains_address(address) && ![self.base(), self.gateway(), self.last()].contains(&address)
    }

    /// Returns how many addresses [`Self::hosts`] has; for a large IPv6 network, the largest number of the type.
    pub fn capacity(self) -> u64 {
        let gateway = number(self.gateway());
        let hosts = number(self.last()).saturating_sub(gateway).saturating_sub(1);
        u64::try_from(hosts).unwrap_or(u64::MAX)
    }

    /// Returns how many addresses the range has; for ::/0, the largest number of the type.
    pub fn size(self) -> u128 {
        (number(self.last()) - number(self.base())).saturating_add(1)
    }

    /// Returns the address of a place in the range; `None` behind its end.
    pub fn nth(self, place: u128) -> Option<IpAddr> {
        let is_inside = place < self.size();
        is_inside.then(|| self.address(number(self.base()).saturating_add(place)))
    }

    /// Returns the address of this family with that number, which is within the family's range.
    fn address(self, number: u128) -> IpAddr {
        match self.0 {
            IpNet::V4(_) => Ipv4Addr::from(u32::try_from(number).unwrap_or(u32::MAX)).into(),
            IpNet::V6(_) => Ipv6Addr::from(number).into(),
        }
    }
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u32::from(address).into(),
        IpAddr::V6(address) => address.into(),
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let network: IpNet = text.parse().map_err(|_| CidrError::Unreadable(text.to_owned()))?;
        if network.trunc() != network {
            return Err(CidrError::HostBits {
                given: text.to_owned(),
                meant: network.trunc().to_string(),
            });
        }
        Ok(Self(network))
    }
}

impl std::fmt::Display for Cidr {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(formatter)
    }
}

#[cfg(test)]
mod tests {
    use super::{Cidr, CidrError};

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn host_bits_and_nonsense_are_refused_with_a_hint() {
        for (given, meant) in [("10.0.0.1/16", "10.0.0.0/16"), ("fd00:1::5/64", "fd00:1::/64")] {
            let error = given.parse::<Cidr>().unwrap_err();
            let (given, meant) = (given.into(), meant.into());
            assert_eq!(error, CidrError::HostBits { given, meant });
        }
        for text in [
            "10.0.0.0",
            "10.0.0.0/33",
            "ten",
            "",
            "fd00::",
            "fd00::/129",
            "fe80::%1/64",
        ] {
            assert!(
                matches!(text.parse::<Cidr>(), Err(CidrError::Unreadable(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn base_gateway_and_last_address_are_never_given_out() {
        let hosts: Vec<_> = cidr("10.0.1.0/29").hosts().map(|host| host.to_string()).collect();
        assert_eq!(
            hosts,
            ["10.0.1.2", "10.0.1.3", "10.0.1.4", "10.0.1.5", "10.0.1.6"]
        );
        assert_eq!(cidr("10.0.1.0/29").capacity() as usize, hosts.len());
        assert_eq!(cidr("10.0.0.0/30").hosts().count(), 1);
        assert_eq!(cidr("10.0.0.0/32").hosts().count(), 0);
        assert_eq!(cidr("255.255.255.255/32").hosts().count(), 0);
        let hosts: Vec<_> = cidr("fd00:1::f8/125")
            .hosts()
            .map(|host| host.to_string())
            .collect();
        assert_eq!(
            hosts,
            [
                "fd00:1::fa",
                "fd00:1::fb",
                "fd00:1::fc",
                "fd00:1::fd",
                "fd00:1::fe"
            ]
        );
        let large = cidr("fd00:1::/64");
        assert_eq!(
            large.hosts().next().map(|host| host.to_string()),
            Some("fd00:1::2".into())
        );
        assert_eq!(large.capacity(), u64::MAX - 2);
        assert_eq!(cidr("fd00::/8").capacity(), u64::MAX);
    }

    #[test]
    fn families_never_overlap() {
        assert!(!cidr("0.0.0.0/0").overlaps(cidr("::/0")));
        assert!(!cidr("::/0").contains_address(std::net::Ipv4Addr::new(10, 0, 0, 1)));
        assert!(cidr("fd00::/48").overlaps(cidr("fd00:0:0:1::/64")));
        assert!(!cidr("fd00::/48").overlaps(cidr("fd00:0:1::/64")));
    }
}
