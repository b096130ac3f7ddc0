//! A service's row, validated: an address of one VPC, its ports and their backends.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use thuban_common::packet::ipv4::{SCTP, TCP, UDP, is_unicast};
use thuban_common::packet::ipv6;
use thuban_common::services::{BackendEntry, ServiceKey};
use thuban_common::tables::{Address, EndpointKey};
use thuban_proto::transit as proto;

use super::row::{InvalidRow, key};

/// Most ports of a service.
pub const MAX_PORTS: usize = 128;
/// Most backends of a port.
pub const MAX_BACKENDS: usize = 16384;
/// A day, as Kubernetes has it.
const MAX_AFFINITY: u32 = 86400;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub key: EndpointKey,
    /// No two with the same protocol and port.
    pub ports: Vec<Port>,
    /// Of one that the node serves: by its own endpoint.
    pub inside: bool,
    /// It is the cluster's DNS: only by a view of it.
    pub names: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    pub key: ServiceKey,
    /// Seconds; 0: none.
    pub affinity: u32,
    /// For clients of this droplet alone, and dropped without backends, for others have some.
    pub local: bool,
    /// Of the service's family, all different.
    pub backends: BTreeSet<BackendEntry>,
}

impl TryFrom<proto::ServiceRow> for Service {
    type Error = InvalidRow;

    fn try_from(row: proto::ServiceRow) -> Result<Self, InvalidRow> {
        let key = service_key(row.vni, &row.address)?;
        if row.ports.len() > MAX_PORTS {
            return Err(invalid("service.ports", "at most 128"));
        }
        let read = row.ports.iter().map(|port| read(key, port));
        let ports = read.collect::<Result<Vec<_>, _>>()?;
        let different: BTreeSet<_> = ports
            .iter()
            .map(|port| (port.key.protocol, port.key.port))
            .collect();
        if different.len() != ports.len() {
            return Err(invalid("service.ports", "no two with the same protocol and port"));
        }
        let (inside, names) = (row.inside, row.names);
        Ok(Self {
            key,
            ports,
            inside,
            names,
        })
    }
}

/// What of a service is reached by way of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    pub key: EndpointKey,
    pub ports: Vec<ExposedPort>,
    /// Of the service's family.
    pub addresses: BTreeSet<Address>,
    /// Where load balancers ask whether there are backends here.
    pub health_port: Option<u16>,
    /// namespace/name.
    pub service: String,
}

impl Exposed {
    /// Backends that are reached by their own addresses.
    pub fn local_backends(&self) -> impl Iterator<Item = &BackendEntry> {
        self.ports.iter().flat_map(|port| port.local.iter().flatten())
    }

    /// Addresses of those that stay.
    pub fn staying(&self) -> BTreeSet<Address> {
        let ports = self.ports.iter();
        let staying = ports.flat_map(|port| {
            let addresses = port.local.iter().flatten().map(|backend| backend.address);
            addresses.filter(|address| !port.ending.contains(address))
        });
        staying.collect()
    }

    /// Whether all that comes goes to backends of this droplet.
    pub fn is_local(&self) -> bool {
        self.ports.iter().all(|port| port.local.is_some())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExposedPort {
    pub protocol: u8,
    pub port: u16,
    /// At addresses of the node.
    pub node_port: Option<u16>,
    /// This droplet's backends, if those of others are not reached from outside.
    pub local: Option<BTreeSet<BackendEntry>>,
    /// Addresses of those of them that end, of which load balancers are not told.
    pub ending: BTreeSet<Address>,
    /// Underlay addresses of droplets whose backends have a share of what comes from elsewhere than a droplet.
    pub peers: BTreeSet<Ipv4Addr>,
}

impl TryFrom<proto::ExposedRow> for Exposed {
    type Error = InvalidRow;

    fn try_from(row: proto::ExposedRow) -> Result<Self, InvalidRow> {
        let key = service_key(row.vni, &row.address)?;
        if row.ports.len() > MAX_PORTS {
            return Err(invalid("exposed.ports", "at most 128"));
        }
        let ports = row.ports.iter().map(|port| {
            let node_port = (port.node_port != 0).then_some(port.node_port);
            let local = port.local.then(|| backends(key, &port.backends));
            let ending = port.ending.iter().map(|bytes| bytes.as_slice().try_into());
            let ending: Result<_, _> = ending.collect();
            let peers = port.peers.iter().map(|bytes| {
                let address: Address = bytes.as_slice().try_into().ok()?;
                Ipv6Addr::from(address).to_ipv4_mapped()
            });
            let peers: Option<_> = peers.collect();
            Ok(ExposedPort {
                protocol: protocol(port.protocol)?,
                port: number(port.port, "exposed.port")?,
                node_port: node_port
                    .map(|port| number(port, "exposed.node_port"))
                    .transpose()?,
                local: local.transpose()?,
                ending: ending.map_err(|_| invalid("exposed.ending", "addresses, 16 bytes"))?,
                peers: peers.ok_or(invalid("exposed.peers", "IPv4 addresses, 16 bytes"))?,
            })
        });
        let addresses = row.addresses.iter().map(|bytes| {
            let address: Option<Address> = bytes.as_slice().try_into().ok();
            let address =
                address.filter(|address| is_usable(address) && is_v4(address) == is_v4(&key.address));
            address.ok_or(invalid(
                "exposed.addresses",
                "unicast addresses of the service's family, 16 bytes",
            ))
        });
        let health_port = (row.health_port != 0).then_some(row.health_port);
        let health_port = health_port.map(|port| number(port, "exposed.health_port"));
        Ok(Self {
            key,
            ports: ports.collect::<Result<_, _>>()?,
            addresses: addresses.collect::<Result<_, _>>()?,
            health_port: health_port.transpose()?,
            service: row.service,
        })
    }
}

fn protocol(number: u32) -> Result<u8, InvalidRow> {
    u8::try_from(number)
        .ok()
        .filter(|protocol| matches!(*protocol, TCP | UDP | SCTP))
        .ok_or(invalid("service.protocol", "6, 17 or 132"))
}

/// The key of a service's row.
pub fn service_key(vni: u32, address: &[u8]) -> Result<EndpointKey, InvalidRow> {
    let key = key(vni, address)?;
    if is_usable(&key.address) {
        Ok(key)
    } else {
        Err(invalid(
            "service.address",
            "a unicast address that is not link-local",
        ))
    }
}

fn read(of: EndpointKey, port: &proto::ServicePort) -> Result<Port, InvalidRow> {
    let protocol = protocol(port.protocol)?;
    if port.affinity_seconds > MAX_AFFINITY {
        return Err(invalid("service.affinity_seconds", "at most 86400"));
    }
    Ok(Port {
        key: ServiceKey {
            vni: of.vni,
            address: of.address,
            port: number(port.port, "service.port")?.to_be(),
            protocol,
            padding: 0,
        },
        affinity: port.affinity_seconds,
        local: port.local,
        backends: backends(of, &port.backends)?,
    })
}

fn backends(of: EndpointKey, told: &[proto::ServiceBackend]) -> Result<BTreeSet<BackendEntry>, InvalidRow> {
    if told.len() > MAX_BACKENDS {
        return Err(invalid("service.backends", "at most 16384"));
    }
    let read = told.iter().map(|backend| {
        let address: Address = backend
            .address
            .as_slice()
            .try_into()
            .ok()
            .filter(|address| {
                is_usable(address) && is_v4(address) == is_v4(&of.address) && *address != of.address
            })
            .ok_or(invalid(
                "service.backends.address",
                "a unicast address of the service's family, 16 bytes",
            ))?;
        Ok(BackendEntry {
            address,
            port: number(backend.port, "service.backends.port")?.to_be(),
            padding: 0,
        })
    });
    read.collect()
}

/// One unicast address, as a range.
pub fn address(bytes: &[u8], field: &'static str) -> Result<IpNet, InvalidRow> {
    let address: Option<Address> = bytes.try_into().ok().filter(is_usable);
    let address = address.ok_or(invalid(field, "unicast addresses, 16 bytes"))?;
    Ok(IpNet::from(Ipv6Addr::from(address).to_canonical()))
}

fn number(port: u32, field: &'static str) -> Result<u16, InvalidRow> {
    u16::try_from(port)
        .ok()
        .filter(|port| *port != 0)
        .ok_or(invalid(field, "1 to 65535"))
}

fn is_v4(address: &Address) -> bool {
    ipv6::is_mapped(address)
}

/// What one host may have: no loopback, link-local, multicast.
fn is_usable(address: &Address) -> bool {
    match Ipv6Addr::from(*address).to_ipv4_mapped() {
        Some(v4) => is_unicast(v4.octets()[0]) && !v4.is_link_local(),
        None => ipv6::is_unicast(address),
    }
}

const fn invalid(field: &'static str, expected: &'static str) -> InvalidRow {
    InvalidRow::Field { field, expected }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(text: &str) -> Vec<u8> {
        let address: std::net::IpAddr = text.parse().unwrap();
        match address {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets().to_vec(),
            std::net::IpAddr::V6(v6) => v6.octets().to_vec(),
        }
    }

    fn port(number: u32, backend: &str) -> proto::ServicePort {
        proto::ServicePort {
            protocol: 6,
            port: number,
            backends: vec![proto::ServiceBackend {
                address: mapped(backend),
                port: 8080,
            }],
            affinity_seconds: 0,
            local: false,
        }
    }

    fn row(address: &str, ports: Vec<proto::ServicePort>) -> Result<Service, InvalidRow> {
        Service::try_from(proto::ServiceRow {
            vni: 7,
            address: mapped(address),
            ports,
            inside: false,
            names: false,
        })
    }

    fn refused(address: &str, port: proto::ServicePort, field: &str) {
        let error = row(address, vec![port]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{field}: expected")), "{error}");
    }

    #[test]
    fn a_row_is_read_in_both_families_and_backends_are_sorted_and_different() {
        let mut twice = port(80, "10.0.1.9");
        twice.backends.extend([
            twice.backends[0].clone(),
            port(80, "10.0.1.5").backends[0].clone(),
        ]);
        let service = row("10.96.0.1", vec![twice, port(81, "10.0.1.5")]).unwrap();
        let last: Vec<u8> = service.ports[0].backends.iter().map(|b| b.address[15]).collect();
        assert_eq!(last, [5, 9]);
        assert_eq!(service.ports[0].key.port, 80_u16.to_be());
        assert!(row("fd00:96::1", vec![port(80, "fd00::5")]).is_ok());
        assert!(row("10.96.0.1", vec![]).unwrap().ports.is_empty());
    }

    #[test]
    fn what_no_packet_can_mean_is_refused_by_field() {
        let good = || port(80, "10.0.1.5");
        for address in [
            "0.0.0.0",
            "127.0.0.1",
            "224.0.0.1",
            "169.254.1.1",
            "fe80::1",
            "ff02::1",
            "::1",
        ] {
            refused(address, good(), "service.address");
            refused("10.96.0.1", port(80, address), "service.backends.address");
        }
        refused("10.96.0.1", port(80, "fd00::5"), "service.backends.address");
        refused("fd00:96::1", good(), "service.backends.address");
        refused("10.96.0.1", port(80, "10.96.0.1"), "service.backends.address");
        refused("10.96.0.1", port(0, "10.0.1.5"), "service.port");
        refused("10.96.0.1", port(65536, "10.0.1.5"), "service.port");
        let with = |change: &dyn Fn(&mut proto::ServicePort)| {
            let mut port = good();
            change(&mut port);
            port
        };
        refused("10.96.0.1", with(&|port| port.protocol = 1), "service.protocol");
        refused("10.96.0.1", with(&|port| port.protocol = 262), "service.protocol");
        refused(
            "10.96.0.1",
            with(&|port| port.backends[0].port = 0),
            "service.backends.port",
        );
        refused(
            "10.96.0.1",
            with(&|port| port.affinity_seconds = 86401),
            "service.affinity_seconds",
        );
        let many = with(&|port| port.backends = vec![port.backends[0].clone(); MAX_BACKENDS + 1]);
        refused("10.96.0.1", many, "service.backends");
        assert!(row("10.96.0.1", vec![good(), good()]).is_err());
        assert!(row("10.96.0.1", (1..=129).map(|n| port(n, "10.0.1.5")).collect()).is_err());
    }
}
