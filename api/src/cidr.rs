//! IPv4 networks without host bits.

use std::net::Ipv4Addr;
use std::str::FromStr;

use ipnet::Ipv4Net;
use thiserror::Error;

/// A network in CIDR notation whose host bits are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Cidr(Ipv4Net);

#[derive(Debug, Error, PartialEq, Eq)]
pub enum CidrError {
    #[error("{0:?} is not an IPv4 network in CIDR notation, such as 10.0.0.0/16")]
    Unreadable(String),
    #[error("{given} has host bits set; did you mean {meant}?")]
    HostBits { given: String, meant: String },
}

impl Cidr {
    pub fn overlaps(self, other: Self) -> bool {
        self.contains(other) || other.contains(self)
    }

    /// Whether `other` lies within this network.
    pub fn contains(self, other: Self) -> bool {
        self.0.contains(&other.0)
    }

    pub fn contains_address(self, address: Ipv4Addr) -> bool {
        self.0.contains(&address)
    }

    /// First address: never given out.
    pub fn base(self) -> Ipv4Addr {
        self.0.network()
    }

    /// Last address: never given out.
    pub fn broadcast(self) -> Ipv4Addr {
        self.0.broadcast()
    }

    /// The address after the base, which the agent answers for.
    pub fn gateway(self) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.base()).saturating_add(1))
    }

    pub fn prefix_length(self) -> u8 {
        self.0.prefix_len()
    }

    /// Addresses that endpoints may get, lowest first: not the base, the gateway or the broadcast address.
    pub fn hosts(self) -> impl Iterator<Item = Ipv4Addr> {
        (u32::from(self.gateway()).saturating_add(1)..u32::from(self.broadcast())).map(Ipv4Addr::from)
    }

    /// How many addresses [`Self::hosts`] has.
    pub fn capacity(self) -> u32 {
        u32::from(self.broadcast())
            .saturating_sub(u32::from(self.gateway()))
            .saturating_sub(1)
    }
}

impl FromStr for Cidr {
    type Err = CidrError;

    fn from_str(text: &str) -> Result<Self, CidrError> {
        let network: Ipv4Net = text.parse().map_err(|_| CidrError::Unreadable(text.to_owned()))?;
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

    #[test]
    fn host_bits_and_nonsense_are_refused_with_a_hint() {
        let error = "10.0.0.1/16".parse::<Cidr>().unwrap_err();
        assert_eq!(
            error,
            CidrError::HostBits {
                given: "10.0.0.1/16".into(),
                meant: "10.0.0.0/16".into()
            }
        );
        for text in ["10.0.0.0", "10.0.0.0/33", "ten", "", "fd00::/64"] {
            assert!(
                matches!(text.parse::<Cidr>(), Err(CidrError::Unreadable(_))),
                "{text}"
            );
        }
    }

    #[test]
    fn base_gateway_and_broadcast_are_never_given_out() {
        let cidr: Cidr = "10.0.1.0/29".parse().unwrap();
        let hosts: Vec<_> = cidr.hosts().map(|host| host.octets()[3]).collect();
        assert_eq!(hosts, [2, 3, 4, 5, 6]);
        assert_eq!(cidr.capacity() as usize, hosts.len());
        let full: Cidr = "10.0.0.0/30".parse().unwrap();
        assert_eq!(full.hosts().count(), 1);
        assert_eq!("10.0.0.0/32".parse::<Cidr>().unwrap().hosts().count(), 0);
    }
}
