//! The row that tells a subscribed droplet where an endpoint's address lives: the direct path.

use std::net::IpAddr;

use thuban_api::identifiers::Vni;
use thuban_proto::transit::DirectRow;

use crate::droplet::Underlay;
use crate::fields::{self, InvalidRow};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Direct {
    pub vni: Vni,
    /// Either address of the endpoint.
    pub address: IpAddr,
    pub droplet: Underlay,
}

impl TryFrom<DirectRow> for Direct {
    type Error = InvalidRow;

    fn try_from(row: DirectRow) -> Result<Self, InvalidRow> {
        Ok(Self {
            vni: fields::vni(row.vni)?,
            address: fields::address(&row.address)?,
            droplet: Underlay::read(&row.droplet)?,
        })
    }
}

impl From<&Direct> for DirectRow {
    fn from(row: &Direct) -> Self {
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            droplet: row.droplet.octets().to_vec(),
        }
    }
}
