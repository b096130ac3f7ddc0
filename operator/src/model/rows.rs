//! Rows as the world stores them, for each droplet that has them. `thuban_rows` defines rows and keys.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use ipnet::IpNet;
use prost::Message as _;
use thuban_proto::transit as proto;
use thuban_rows::{Droplet, Row};

pub use thuban_rows::{RowKey as Key, read_address as address};

/// A row in the form in which it is sent, shared by the droplets that have the same row. It takes a fraction of the
/// memory of its message, and a cluster has several rows for each endpoint. The bytes are those of a program with this
/// row and nothing else: such bytes one after the other are a program with all of their rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRow(Arc<[u8]>);

impl PackedRow {
    pub fn new(row: &Row) -> Self {
        let program = proto::Program {
            upserts: vec![row.into()],
            ..proto::Program::default()
        };
        Self(program.encode_to_vec().into())
    }

    pub fn unpack(&self) -> proto::Row {
        // `new` wrote these bytes, so they can be read, and have one row.
        let program = proto::Program::decode(&*self.0).unwrap_or_default();
        program.upserts.into_iter().next().unwrap_or_default()
    }

    /// Returns the row as a part of a program.
    pub fn bytes(&self) -> &[u8] {
        &self.0
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
