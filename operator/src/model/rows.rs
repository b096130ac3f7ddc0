//! Rows of a droplet's program and their keys. Invariant: a key names one row of one droplet, whoever made it.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use prost::Message as _;
use thuban_api::identifiers::mapped;
use thuban_proto::transit::{
    AddressKey, BouncerRow, DirectRow, DropletRow, ExposedPort, ExposedRow, ForwardRow, NetworkKey,
    NetworkRow, RefusedRow, Row, RowKey, ServicePort, ServiceRow, VpcRow, row, row_key,
};

/// Which row: ordered, so that programs are compared and sent in a stable order.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Key {
    Droplet(Ipv4Addr),
    /// VNI.
    Vpc(u32),
    /// VNI, network id.
    Network(u32, u32),
    /// VNI, the endpoint's IPv4 address: one row for both of its addresses.
    Local(u32, IpAddr),
    /// As [`Self::Local`].
    Bouncer(u32, IpAddr),
    /// VNI, either address of the endpoint.
    Direct(u32, IpAddr),
    /// As [`Self::Direct`].
    Forward(u32, IpAddr),
    /// UID that kubelet tells the CNI plugin.
    Refused(String),
    /// VNI, one of the service's addresses.
    Service(u32, IpAddr),
    /// As [`Self::Service`]; the VNI is of the VPC whose pods reach it.
    NodeService(u32, IpAddr),
    /// As [`Self::Service`].
    Exposed(u32, IpAddr),
}

/// A row as it goes over the wire, shared by the droplets that have it alike: it takes a fraction of the memory of its
/// message, and a cluster has several for each endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedRow(Arc<[u8]>);

impl PackedRow {
    pub fn new(row: &Row) -> Self {
        Self(row.encode_to_vec().into())
    }

    pub fn unpack(&self) -> Row {
        // What `new` wrote can be read.
        Row::decode(&*self.0).unwrap_or_default()
    }
}

fn address_key(vni: u32, address: IpAddr) -> AddressKey {
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
            Self::Forward(vni, address) => row_key::Key::Forward(address_key(*vni, *address)),
            Self::Refused(uid) => row_key::Key::Refused(uid.clone()),
            Self::Service(vni, address) => row_key::Key::Service(address_key(*vni, *address)),
            Self::NodeService(vni, address) => row_key::Key::NodeService(address_key(*vni, *address)),
            Self::Exposed(vni, address) => row_key::Key::Exposed(address_key(*vni, *address)),
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
            | Self::Direct(vni, _)
            | Self::Forward(vni, _)
            | Self::Service(vni, _)
            | Self::NodeService(vni, _)
            | Self::Exposed(vni, _) => Some(*vni),
        }
    }
}

/// (IPv6, IPv4): a droplet that doesn't know IPv6 reads the IPv4 ranges alone.
fn by_family(cidrs: &[String]) -> (Vec<String>, Vec<String>) {
    cidrs.iter().cloned().partition(|cidr| cidr.contains(':'))
}

pub fn droplet(address: Ipv4Addr) -> (Key, Row) {
    let row = row::Row::Droplet(DropletRow {
        address: address.octets().to_vec(),
    });
    (Key::Droplet(address), Row { row: Some(row) })
}

/// Droplets whose role is used, and those that only pass on what still comes to them.
pub struct Members {
    pub used: Vec<Ipv4Addr>,
    pub relays: Vec<Ipv4Addr>,
}

fn octets(addresses: &[Ipv4Addr]) -> Vec<Vec<u8>> {
    addresses
        .iter()
        .map(|address| address.octets().to_vec())
        .collect()
}

fn octets_of(addresses: &BTreeSet<IpAddr>) -> Vec<Vec<u8>> {
    addresses
        .iter()
        .map(|address| mapped(*address).to_vec())
        .collect()
}

/// What a VPC's addresses mean.
#[derive(Clone, Copy)]
pub struct Ranges<'a> {
    pub own: &'a [String],
    pub services: &'a [String],
    pub closed: &'a [String],
    /// Of its own, those that services have.
    pub service_addresses: &'a BTreeSet<IpAddr>,
}

/// What a droplet's part in a VPC, and the VPC itself, allow.
#[derive(Clone, Copy)]
pub struct Access {
    pub divider_here: bool,
    pub host: bool,
    pub egress: bool,
}

/// Whose names a VPC's pods find in the cluster's DNS: namespaces, and `namespace/name`s of Services.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visible {
    pub namespaces: Vec<String>,
    pub services: Vec<String>,
    /// Though their namespace is visible.
    pub hidden: Vec<String>,
}

pub fn vpc(vni: u32, ranges: Ranges, dividers: &Members, access: Access, visible: &Visible) -> (Key, Row) {
    let (cidrs6, cidrs) = by_family(ranges.own);
    let row = row::Row::Vpc(VpcRow {
        vni,
        cidrs,
        cidrs6,
        dividers: octets(&dividers.used),
        divider_here: access.divider_here,
        host_access: access.host,
        egress: access.egress,
        relays: octets(&dividers.relays),
        service_cidrs: ranges.services.to_vec(),
        closed_cidrs: ranges.closed.to_vec(),
        service_addresses: octets_of(ranges.service_addresses),
        visible_namespaces: visible.namespaces.clone(),
        visible_services: visible.services.clone(),
        hidden_services: visible.hidden.clone(),
    });
    (Key::Vpc(vni), Row { row: Some(row) })
}

pub fn network(
    vni: u32,
    network: u32,
    cidrs: &[String],
    bouncers: &Members,
    bouncer_here: bool,
) -> (Key, Row) {
    let (cidrs6, cidrs) = by_family(cidrs);
    let row = row::Row::Network(NetworkRow {
        vni,
        network,
        cidrs,
        cidrs6,
        bouncers: octets(&bouncers.used),
        bouncer_here,
        relays: octets(&bouncers.relays),
    });
    (Key::Network(vni, network), Row { row: Some(row) })
}

/// `address6` is the endpoint's other address, if it has one.
pub fn bouncer(vni: u32, address: Ipv4Addr, address6: Option<Ipv6Addr>, droplet: Ipv4Addr) -> (Key, Row) {
    let row = row::Row::Bouncer(BouncerRow {
        vni,
        address: mapped(address).to_vec(),
        address6: optional(address6),
        droplet: droplet.octets().to_vec(),
    });
    (Key::Bouncer(vni, address.into()), Row { row: Some(row) })
}

/// 16 bytes, or none.
pub fn optional(address: Option<Ipv6Addr>) -> Vec<u8> {
    address
        .map(|address| address.octets().to_vec())
        .unwrap_or_default()
}

pub fn direct(vni: u32, address: IpAddr, droplet: Ipv4Addr) -> (Key, Row) {
    let row = row::Row::Direct(DirectRow {
        vni,
        address: mapped(address).to_vec(),
        droplet: droplet.octets().to_vec(),
    });
    (Key::Direct(vni, address), Row { row: Some(row) })
}

/// Where an endpoint that lived here lives now.
pub fn forward(vni: u32, address: IpAddr, droplet: Ipv4Addr) -> (Key, Row) {
    let row = row::Row::Forward(ForwardRow {
        vni,
        address: mapped(address).to_vec(),
        droplet: droplet.octets().to_vec(),
    });
    (Key::Forward(vni, address), Row { row: Some(row) })
}

pub fn refused(pod_uid: &str, reason: &str, message: &str) -> (Key, Row) {
    let row = row::Row::Refused(RefusedRow {
        pod_uid: pod_uid.to_owned(),
        reason: reason.to_owned(),
        message: message.to_owned(),
    });
    (Key::Refused(pod_uid.to_owned()), Row { row: Some(row) })
}

/// One address of a service; the backends of `ports` are of its family.
pub fn service(vni: u32, address: IpAddr, ports: &[ServicePort]) -> (Key, Row) {
    let row = row::Row::Service(service_row(vni, address, ports));
    (Key::Service(vni, address), Row { row: Some(row) })
}

/// What nodes serve for the pods of a VPC.
pub struct NodeService<'a> {
    pub address: IpAddr,
    pub ports: &'a [ServicePort],
    /// Its backends are members of its VPC: nodes send on what comes for it by their own endpoints.
    pub inside: bool,
    /// It is the cluster's DNS.
    pub names: bool,
}

/// The same of one that nodes serve, for the pods of a VPC.
pub fn node_service(vni: u32, service: &NodeService) -> (Key, Row) {
    let address = service.address;
    let row = row::Row::NodeService(ServiceRow {
        inside: service.inside,
        names: service.names,
        ..service_row(vni, address, service.ports)
    });
    (Key::NodeService(vni, address), Row { row: Some(row) })
}

/// What of a service is reached by way of nodes.
#[derive(Clone, Copy)]
pub struct Exposure<'a> {
    pub ports: &'a [ExposedPort],
    /// Addresses besides those of nodes.
    pub outside: &'a [IpAddr],
    pub health_port: Option<u16>,
    /// namespace/name.
    pub service: &'a str,
}

/// Addresses of the other family are left out.
pub fn exposed(vni: u32, address: IpAddr, exposure: Exposure) -> (Key, Row) {
    let outside = exposure.outside.iter();
    let outside = outside.filter(|other| other.is_ipv4() == address.is_ipv4());
    let row = row::Row::Exposed(ExposedRow {
        vni,
        address: mapped(address).to_vec(),
        ports: exposure.ports.to_vec(),
        addresses: outside.map(|address| mapped(*address).to_vec()).collect(),
        health_port: exposure.health_port.unwrap_or_default().into(),
        service: exposure.service.to_owned(),
    });
    (Key::Exposed(vni, address), Row { row: Some(row) })
}

fn service_row(vni: u32, address: IpAddr, ports: &[ServicePort]) -> ServiceRow {
    ServiceRow {
        vni,
        address: mapped(address).to_vec(),
        ports: ports.to_vec(),
        inside: false,
        names: false,
    }
}

/// An address of a droplet's message: 16 bytes, IPv4 mapped.
pub fn address(bytes: &[u8]) -> Option<IpAddr> {
    Some(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?).to_canonical())
}

#[cfg(test)]
mod tests {
    use super::{address, mapped};

    #[test]
    fn addresses_are_mapped_into_sixteen_bytes_and_back() {
        for given in ["10.0.1.2", "fd00:1::2"] {
            let given: std::net::IpAddr = given.parse().unwrap();
            assert_eq!(address(&mapped(given)), Some(given));
        }
        assert_eq!(address(&[10, 0, 1, 2]), None);
        assert_eq!(address(&[]), None);
    }
}
