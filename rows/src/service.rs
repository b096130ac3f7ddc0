//! A service's address in one VPC, its ports and their backends: members of the VPC, to which agents send.

use std::collections::BTreeSet;
use std::net::IpAddr;

use thuban_api::identifiers::Vni;
use thuban_proto::transit::{ServiceBackend, ServicePort, ServiceRow};

use crate::fields::{self, InvalidRow, invalid};

/// The most ports of a service.
pub const MAX_PORTS: usize = 128;
/// The most backends of a port.
pub const MAX_BACKENDS: usize = 16384;
/// The longest affinity in seconds: a day, as in Kubernetes.
const MAX_AFFINITY: u32 = 86400;
/// IP protocol numbers that droplets forward: TCP, UDP, SCTP.
const PROTOCOLS: [u8; 3] = [6, 17, 132];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    pub vni: Vni,
    /// The address of the service: unicast, not link-local.
    pub address: IpAddr,
    /// The ports of the service: at most [`MAX_PORTS`], no two with the same protocol and port.
    pub ports: Vec<Port>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// IP protocol number: 6 TCP, 17 UDP, 132 SCTP.
    pub protocol: u8,
    pub port: u16,
    /// Seconds for which a client keeps its backend after its last connection; 0: none.
    pub affinity: u32,
    /// The backends are this droplet's alone, for its own clients. Without a backend packets are dropped, because other
    /// droplets have some.
    pub local: bool,
    /// Backends of the service's family, at most [`MAX_BACKENDS`]; none: new connections are refused.
    pub backends: BTreeSet<Backend>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Backend {
    pub address: IpAddr,
    pub port: u16,
}

impl TryFrom<ServiceRow> for Service {
    type Error = InvalidRow;

    fn try_from(row: ServiceRow) -> Result<Self, InvalidRow> {
        let (vni, address) = (fields::vni(row.vni)?, service_address(&row.address)?);
        let ports = read_ports(address, &row.ports)?;
        Ok(Self { vni, address, ports })
    }
}

impl From<&Service> for ServiceRow {
    fn from(row: &Service) -> Self {
        Self {
            vni: row.vni.get(),
            address: fields::octets(row.address),
            ports: row.ports.iter().map(ServicePort::from).collect(),
            inside: false,
            names: false,
        }
    }
}

impl From<&Port> for ServicePort {
    fn from(port: &Port) -> Self {
        Self {
            protocol: port.protocol.into(),
            port: port.port.into(),
            backends: port.backends.iter().map(ServiceBackend::from).collect(),
            affinity_seconds: port.affinity,
            local: port.local,
        }
    }
}

impl From<&Backend> for ServiceBackend {
    fn from(backend: &Backend) -> Self {
        Self {
            address: fields::octets(backend.address),
            port: backend.port.into(),
        }
    }
}

pub fn service_address(bytes: &[u8]) -> Result<IpAddr, InvalidRow> {
    let address = Some(fields::address(bytes)?).filter(|address| fields::is_usable(*address));
    address.ok_or(invalid(
        "service.address",
        "a unicast address that is not link-local",
    ))
}

pub fn read_ports(of: IpAddr, told: &[ServicePort]) -> Result<Vec<Port>, InvalidRow> {
    if told.len() > MAX_PORTS {
        return Err(invalid("service.ports", "at most 128"));
    }
    let ports: Vec<Port> = told.iter().map(|port| read(of, port)).collect::<Result<_, _>>()?;
    let different: BTreeSet<_> = ports.iter().map(|port| (port.protocol, port.port)).collect();
    if different.len() != ports.len() {
        return Err(invalid("service.ports", "no two with the same protocol and port"));
    }
    Ok(ports)
}

fn read(of: IpAddr, port: &ServicePort) -> Result<Port, InvalidRow> {
    Ok(Port {
        protocol: protocol(port.protocol)?,
        port: number(port.port, "service.port")?,
        affinity: affinity(port.affinity_seconds, "service.affinity_seconds")?,
        local: port.local,
        backends: backends(of, &port.backends)?,
    })
}

pub fn backends(of: IpAddr, told: &[ServiceBackend]) -> Result<BTreeSet<Backend>, InvalidRow> {
    if told.len() > MAX_BACKENDS {
        return Err(invalid("service.backends", "at most 16384"));
    }
    let read = told.iter().map(|told| backend(of, &told.address, told.port));
    read.collect()
}

/// Reads a backend of the service at an address.
pub fn backend(of: IpAddr, address: &[u8], port: u32) -> Result<Backend, InvalidRow> {
    let is_usable =
        |address: &IpAddr| fields::is_usable(*address) && address.is_ipv4() == of.is_ipv4() && *address != of;
    let address = fields::read_address(address).filter(is_usable);
    let address = address.ok_or(invalid(
        "service.backends.address",
        "a unicast address of the service's family, 16 bytes",
    ))?;
    let port = number(port, "service.backends.port")?;
    Ok(Backend { address, port })
}

pub fn protocol(number: u32) -> Result<u8, InvalidRow> {
    let protocol = u8::try_from(number).ok();
    protocol
        .filter(|protocol| PROTOCOLS.contains(protocol))
        .ok_or(invalid("service.protocol", "6, 17 or 132"))
}

/// Reads the seconds of a port's affinity.
pub fn affinity(seconds: u32, field: &'static str) -> Result<u32, InvalidRow> {
    let seconds = Some(seconds).filter(|seconds| *seconds <= MAX_AFFINITY);
    seconds.ok_or(invalid(field, "at most 86400"))
}

/// Reads the number of a port.
pub fn number(port: u32, field: &'static str) -> Result<u16, InvalidRow> {
    let port = u16::try_from(port).ok().filter(|port| *port != 0);
    port.ok_or(invalid(field, "1 to 65535"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(text: &str) -> Vec<u8> {
        fields::octets(text.parse::<IpAddr>().unwrap())
    }

    fn port(number: u32, backend: &str) -> ServicePort {
        ServicePort {
            protocol: 6,
            port: number,
            backends: vec![ServiceBackend {
                address: mapped(backend),
                port: 8080,
            }],
            affinity_seconds: 0,
            local: false,
        }
    }

    fn row(address: &str, ports: Vec<ServicePort>) -> Result<Service, InvalidRow> {
        Service::try_from(ServiceRow {
            vni: 7,
            address: mapped(address),
            ports,
            inside: false,
            names: false,
        })
    }

    fn refused(address: &str, port: ServicePort, field: &str) {
        let error = row(address, vec![port]).unwrap_err().to_string();
        assert!(error.starts_with(&format!("{field}: expected")), "{error}");
    }

    #[test]
    fn row_reads_both_families_and_sorts_unique_backends() {
        let mut twice = port(80, "10.0.1.9");
        twice.backends.extend([
            twice.backends[0].clone(),
            port(80, "10.0.1.5").backends[0].clone(),
        ]);
        let service = row("10.96.0.1", vec![twice, port(81, "10.0.1.5")]).unwrap();
        let backends = service.ports[0].backends.iter();
        let backends: Vec<String> = backends.map(|backend| backend.address.to_string()).collect();
        assert_eq!(backends, ["10.0.1.5", "10.0.1.9"]);
        assert_eq!(service.ports[0].port, 80);
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
        let with = |change: &dyn Fn(&mut ServicePort)| {
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
