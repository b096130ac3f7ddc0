//! The row that tells a bouncer where an endpoint of its network lives. One row has both addresses, so an endpoint with
//! IPv6 costs as many rows as one without.

use std::net::{IpAddr, Ipv6Addr};

use thuban_api::identifiers::Vni;
use thuban_proto::transit::BouncerRow;

use crate::droplet::Underlay;
use crate::fields::{self, InvalidRow};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bouncer {
    pub vni: Vni,
    /// The endpoint's IPv4 address, by which it is known.
    pub address: IpAddr,
    pub address6: Option<Ipv6Addr>,
    pub droplet: Underlay,
}

impl TryFrom<BouncerRow> for Bouncer {
    type Error = InvalidRow;

    fn try_from(row: BouncerRow) -> Result<Self, InvalidRow> {
        Ok(Self {
            vni: fields::vni(row.vni)?,
            address: fields::address(&row.address)?,
            address6: fields::address6(&row.address6)?,
            droplet: Underlay::read(&row.droplet)?,
        })
    }
}

impl From<&Bouncer> for BouncerRow {
    fn from(row: &Bouncer) -> Self {
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            address6: fields::octets6(row.address6),
            droplet: row.droplet.octets().to_vec(),
        }
    }
}
