//! Types for integers and bytes that mean something.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::cidr::Cidr;

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{0} is not a VNI, 1 to 16777215")]
pub struct VniError(u32);

/// Geneve VNI, 1 to 2^24 - 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Vni(u32);

impl Vni {
    pub const MAX: u32 = (1 << 24) - 1;
    /// The least one.
    pub const MIN: Self = Self(1);

    pub const fn new(number: u32) -> Option<Self> {
        if number >= 1 && number <= Self::MAX {
            Some(Self(number))
        } else {
            None
        }
    }

    pub const fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for Vni {
    type Error = VniError;

    fn try_from(number: u32) -> Result<Self, VniError> {
        Self::new(number).ok_or(VniError(number))
    }
}

impl From<Vni> for u32 {
    fn from(vni: Vni) -> Self {
        vni.0
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("0 is no network's id")]
pub struct NetworkIdError;

/// A network within its VPC: the base address of its first IPv4 range as a number (docs/adr/0001), so never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct NetworkId(u32);

impl NetworkId {
    pub const fn new(number: u32) -> Option<Self> {
        if number == 0 { None } else { Some(Self(number)) }
    }

    /// Returns the id of a network with these ranges; none without an IPv4 range. Ranges are only appended, so it never
    /// changes.
    pub fn of(ranges: &[Cidr]) -> Option<Self> {
        ranges.iter().find_map(|range| match range.base() {
            IpAddr::V4(base) => Self::new(u32::from(base)),
            IpAddr::V6(_) => None,
        })
    }

    pub const fn get(self) -> u32 {
        self.0
    }
}

impl TryFrom<u32> for NetworkId {
    type Error = NetworkIdError;

    fn try_from(number: u32) -> Result<Self, NetworkIdError> {
        Self::new(number).ok_or(NetworkIdError)
    }
}

impl From<NetworkId> for u32 {
    fn from(id: NetworkId) -> Self {
        id.0
    }
}

impl fmt::Display for NetworkId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is not a MAC address such as 02:54:0a:00:01:02")]
pub struct MacError(String);

/// An Ethernet address, printed with colons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize, Serialize)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Returns the MAC address of an endpoint that has no other: locally administered, then the address.
    pub fn of(address: Ipv4Addr) -> Self {
        let [a, b, c, d] = address.octets();
        Self([0x02, 0x54, a, b, c, d])
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let octets = self.0.map(|octet| format!("{octet:02x}"));
        formatter.write_str(&octets.join(":"))
    }
}

impl FromStr for MacAddr {
    type Err = MacError;

    fn from_str(text: &str) -> Result<Self, MacError> {
        let error = || MacError(text.to_owned());
        let mut bytes = [0; 6];
        let mut parts = text.split(':');
        for byte in &mut bytes {
            let part = parts.next().filter(|part| part.len() == 2).ok_or_else(error)?;
            *byte = u8::from_str_radix(part, 16).map_err(|_| error())?;
        }
        if parts.next().is_some() {
            Err(error())
        } else {
            Ok(Self(bytes))
        }
    }
}

/// Returns an address in the form that rows and tables have: IPv6 as it is, IPv4 mapped into IPv6 (RFC 4291 section
/// 2.5.5.2), network order.
pub fn mapped(address: impl Into<IpAddr>) -> [u8; 16] {
    match address.into() {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::{MacAddr, NetworkId, Vni};

    #[test]
    fn a_networks_id_is_its_first_ipv4_ranges() {
        let ranges = |texts: &[&str]| -> Vec<_> { texts.iter().map(|text| text.parse().unwrap()).collect() };
        let id = |texts: &[&str]| NetworkId::of(&ranges(texts)).map(NetworkId::get);
        assert_eq!(
            id(&["10.0.1.0/24", "fd00::/64", "10.0.2.0/24"]),
            Some(0x0a00_0100)
        );
        assert_eq!(id(&["fd00::/64", "10.0.1.0/24"]), Some(0x0a00_0100));
        assert_eq!(id(&["fd00::/64"]), None);
    }

    #[test]
    fn vnis_are_24_bits_and_not_zero() {
        assert!(Vni::new(0).is_none() && Vni::new(1 << 24).is_none());
        assert_eq!(Vni::new(Vni::MAX).map(Vni::get), Some(0xff_ffff));
        assert!(Vni::try_from(0).is_err() && NetworkId::try_from(0).is_err());
        assert_eq!(Vni::new(1), Some(Vni::MIN));
    }

    #[test]
    fn mac_addresses_are_read_back_as_printed() {
        let mac = MacAddr::of([10, 0, 1, 2].into());
        assert_eq!(mac.to_string(), "02:54:0a:00:01:02");
        assert_eq!(mac.to_string().parse(), Ok(mac));
        for text in [
            "",
            "02:54:0a:00:01",
            "02:54:0a:00:01:02:03",
            "2:54:0a:00:01:02",
            "zz:54:0a:00:01:02",
        ] {
            assert!(text.parse::<MacAddr>().is_err(), "{text}");
        }
    }
}
