//! Rows as the world stores them, for each droplet that has them. `thuban_rows` defines rows and keys.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;
use prost::Message as _;
use thuban_proto::transit as proto;
use thuban_rows::{Droplet, Row};

pub use thuban_rows::{RowKey as Key, read_address as address};

/// A row in the form in which it is sent, shared by the droplets that have the same row. It takes a fraction of the
/// memory of its message, and a cluster has several rows for each endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRow(Arc<[u8]>);

impl PackedRow {
    pub fn new(row: &Row) -> Self {
        Self(proto::Row::from(row).encode_to_vec().into())
    }

    pub fn unpack(&self) -> proto::Row {
        // `new` wrote these bytes, so they can be read.
        proto::Row::decode(&*self.0).unwrap_or_default()
    }
}

/// Returns the row of a known droplet.
pub fn droplet(address: Ipv4Addr, address6: Option<Ipv6Addr>) -> Row {
    let address = address.into();
    Row::Droplet(Droplet { address, address6 })
}

/// Reads ranges in force, which have been validated.
pub fn ranges<'a>(texts: impl IntoIterator<Item = &'a String>) -> Vec<IpNet> {
    texts.into_iter().filter_map(|text| text.parse().ok()).collect()
}
