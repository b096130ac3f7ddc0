//! Rows as the world keeps them, for each droplet that has them. What rows and keys there are is `thuban_rows`'.

use std::net::Ipv4Addr;
use std::sync::Arc;

use ipnet::IpNet;
use prost::Message as _;
use thuban_proto::transit as proto;
use thuban_rows::{Droplet, Row};

pub use thuban_rows::{RowKey as Key, read_address as address};

/// A row as it goes over the wire, shared by the droplets that have it alike: it takes a fraction of the memory of its
/// message, and a cluster has several for each endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRow(Arc<[u8]>);

impl PackedRow {
    pub fn new(row: &Row) -> Self {
        Self(proto::Row::from(row).encode_to_vec().into())
    }

    pub fn unpack(&self) -> proto::Row {
        // What `new` wrote can be read.
        proto::Row::decode(&*self.0).unwrap_or_default()
    }
}

/// A known droplet.
pub fn droplet(address: Ipv4Addr) -> Row {
    let address = address.into();
    Row::Droplet(Droplet { address })
}

/// Ranges in force, which have been validated.
pub fn ranges<'a>(texts: impl IntoIterator<Item = &'a String>) -> Vec<IpNet> {
    texts.into_iter().filter_map(|text| text.parse().ok()).collect()
}
