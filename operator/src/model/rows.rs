//! Rows of a droplet's program and their keys. Invariant: a key names one row of one droplet, whoever made it.

use std::net::Ipv4Addr;

use thuban_api::identifiers::mapped;
use thuban_proto::transit::{
    AddressKey, BouncerRow, DirectRow, DropletRow, NetworkKey, NetworkRow, RefusedRow, Row, RowKey, VpcRow,
    row, row_key,
};

/// Which row: ordered, so that programs are compared and sent in a stable order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    Droplet(Ipv4Addr),
    /// VNI.
    Vpc(u32),
    /// VNI, network id.
    Network(u32, u32),
    Local(u32, Ipv4Addr),
    Bouncer(u32, Ipv4Addr),
    Direct(u32, Ipv4Addr),
    /// UID that kubelet tells the CNI plugin.
    Refused(String),
}

fn address_key(vni: u32, address: Ipv4Addr) -> AddressKey {
    AddressKey {
        vni,
        address: mapped(address).to_vec(),
    }
}

impl Key {
    /// As it goes over the wire.
    pub fn to_proto(&self) -> RowKey {
        let key = match self {
            Self::Droplet(address) => row_key::Key::Droplet(address.octets().to_vec()),
            Self::Vpc(vni) => row_key::Key::Vpc(*vni),
            Self::Network(vni, network) => row_key::Key::Network(NetworkKey {
                vni: *vni,
                network: *network,
            }),
            Self::Local(vni, address) => row_key::Key::Local(address_key(*vni, *address)),
            Self::Bouncer(vni, address) => row_key::Key::Bouncer(address_key(*vni, *address)),
            Self::Direct(vni, address) => row_key::Key::Direct(address_key(*vni, *address)),
            Self::Refused(uid) => row_key::Key::Refused(uid.clone()),
        };
        RowKey { key: Some(key) }
    }

    /// The VPC that the row belongs to, if any.
    pub fn vni(&self) -> Option<u32> {
        match self {
            Self::Droplet(_) | Self::Refused(_) => None,
            Self::Vpc(vni)
            | Self::Network(vni, _)
            | Self::Local(vni, _)
            | Self::Bouncer(vni, _)
            | Self::Direct(vni, _) => Some(*vni),
        }
    }
}

pub fn droplet(address: Ipv4Addr) -> (Key, Row) {
    let row = row::Row::Droplet(DropletRow {
        address: address.octets().to_vec(),
    });
    (Key::Droplet(address), Row { row: Some(row) })
}

pub fn vpc(
    vni: u32,
    cidrs: &[String],
    dividers: &[Ipv4Addr],
    divider_here: bool,
    host_access: bool,
) -> (Key, Row) {
    let dividers = dividers.iter().map(|address| address.octets().to_vec()).collect();
    let row = row::Row::Vpc(VpcRow {
        vni,
        cidrs: cidrs.to_vec(),
        dividers,
        divider_here,
        host_access,
    });
    (Key::Vpc(vni), Row { row: Some(row) })
}

pub fn network(
    vni: u32,
    network: u32,
    cidrs: &[String],
    bouncers: &[Ipv4Addr],
    bouncer_here: bool,
) -> (Key, Row) {
    let bouncers = bouncers.iter().map(|address| address.octets().to_vec()).collect();
    let row = row::Row::Network(NetworkRow {
        vni,
        network,
        cidrs: cidrs.to_vec(),
        bouncers,
        bouncer_here,
    });
    (Key::Network(vni, network), Row { row: Some(row) })
}

pub fn bouncer(vni: u32, address: Ipv4Addr, droplet: Ipv4Addr) -> (Key, Row) {
    let row = row::Row::Bouncer(BouncerRow {
        vni,
        address: mapped(address).to_vec(),
        droplet: droplet.octets().to_vec(),
    });
    (Key::Bouncer(vni, address), Row { row: Some(row) })
}

pub fn direct(vni: u32, address: Ipv4Addr, droplet: Ipv4Addr) -> (Key, Row) {
    let row = row::Row::Direct(DirectRow {
        vni,
        address: mapped(address).to_vec(),
        droplet: droplet.octets().to_vec(),
    });
    (Key::Direct(vni, address), Row { row: Some(row) })
}

pub fn refused(pod_uid: &str, reason: &str, message: &str) -> (Key, Row) {
    let row = row::Row::Refused(RefusedRow {
        pod_uid: pod_uid.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
    });
    (Key::Refused(pod_uid.to_owned()), Row { row: Some(row) })
}

/// An address of a droplet's message: IPv4 mapped into 16 bytes.
pub fn address(bytes: &[u8]) -> Option<Ipv4Addr> {
    std::net::Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).to_ipv4_mapped()
}

#[cfg(test)]
mod tests {
    use super::{address, mapped};

    #[test]
    fn addresses_are_mapped_into_sixteen_bytes_and_back() {
        let given = std::net::Ipv4Addr::new(10, 0, 1, 2);
        assert_eq!(address(&mapped(given)), Some(given));
        assert_eq!(address(&[10, 0, 1, 2]), None);
        assert_eq!(address(&[0xfd; 16]), None);
    }
}
