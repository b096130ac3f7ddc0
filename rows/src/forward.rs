//! The row that tells where an endpoint that lived on this droplet lives now: its packets follow it until bouncers and
//! subscribers know.

use std::net::IpAddr;

use thuban_api::identifiers::Vni;
use thuban_proto::transit::ForwardRow;

use crate::droplet::Underlay;
use crate::fields::{self, InvalidRow};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forward {
    pub vni: Vni,
    /// Either address of the endpoint.
    pub address: IpAddr,
    pub droplet: Underlay,
}

impl TryFrom<ForwardRow> for Forward {
    type Error = InvalidRow;

    fn try_from(row: ForwardRow) -> Result<Self, InvalidRow> {
        Ok(Self {
            vni: fields::vni(row.vni)?,
            address: fields::address(&row.address)?,
            droplet: Underlay::read(&row.droplet)?,
        })
    }
}

impl From<&Forward> for ForwardRow {
    fn from(row: &Forward) -> Self {
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            droplet: row.droplet.octets().to_vec(),
        }
    }
}
