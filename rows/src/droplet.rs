//! The row of a known droplet. Packets with an outer source that no such row has are dropped.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use serde::{Deserialize, Serialize};
use thuban_proto::transit::DropletRow;

use crate::fields::{self, InvalidRow, invalid};

/// Underlay address of a droplet, never one within a VPC. On the wire 4 bytes, network order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize, Serialize)]
#[serde(from = "[u8; 4]", into = "[u8; 4]")]
pub struct Underlay(pub Ipv4Addr);

impl Underlay {
    /// The least address.
    pub const MIN: Self = Self(Ipv4Addr::UNSPECIFIED);

    pub fn octets(self) -> [u8; 4] {
        self.0.octets()
    }

    pub(crate) fn read(bytes: &[u8]) -> Result<Self, InvalidRow> {
        let octets = <[u8; 4]>::try_from(bytes).map_err(|_| invalid("droplet", "an IPv4 address of 4 bytes"));
        octets.map(Self::from)
    }
}

impl From<Ipv4Addr> for Underlay {
    fn from(address: Ipv4Addr) -> Self {
        Self(address)
    }
}

impl From<[u8; 4]> for Underlay {
    fn from(octets: [u8; 4]) -> Self {
        Self(octets.into())
    }
}

impl From<Underlay> for [u8; 4] {
    fn from(address: Underlay) -> Self {
        address.octets()
    }
}

impl fmt::Display for Underlay {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Droplet {
    pub address: Underlay,
    /// The node's IPv6 address outside of every VPC. Only packets that nodes send on to each other use it.
    pub address6: Option<Ipv6Addr>,
}

impl TryFrom<DropletRow> for Droplet {
    type Error = InvalidRow;

    fn try_from(row: DropletRow) -> Result<Self, InvalidRow> {
        Ok(Self {
            address: Underlay::read(&row.address)?,
            address6: fields::address6(&row.address6)?,
        })
    }
}

impl From<&Droplet> for DropletRow {
    fn from(row: &Droplet) -> Self {
        Self {
            address: row.address.octets().to_vec(),
            address6: fields::octets6(row.address6),
        }
    }
}
